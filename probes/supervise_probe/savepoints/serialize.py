"""A savepoint as plain data, from which another process of the same script can continue.

Ids and weak references mean nothing there, so everything is named by its place: modules by order of
registration and by name, parameters by their module, optimizer state by parameter, variables by
function and name. Code is identified by a digest of its bytecode, with all functions inside it.

Rule 1: only what `torch.load(weights_only=True)` takes: numbers, strings, tuples, lists, dicts and
tensors. Everything else is a tuple whose first item is its kind; `deserialize.py` reads it.
Rule 2: an iterator is refused: it would start from its beginning.
"""

import hashlib
import sys
from types import CodeType
from typing import Any, Dict, List, Tuple

from ..capture.call_stack import CannotRestore
from ..capture.captured_values import (
    Fields,
    IdentityRef,
    ObjectRef,
    RngState,
    SavedMethod,
    Tensor,
    Value,
    type_name,
)
from ..capture.containers import SavedDict, SavedSequence, SavedSet
from ..capture.tensor_copies import TensorCopies
from ..capture.type_classes import is_job_class
from ..torch_state.registry import Registry
from .store import Savepoint

FORMAT = "supervise savepoint 2"
_PLAIN = (type(None), bool, int, float, str, bytes)


def names_of(registry: Registry) -> Dict[int, str]:
    """Return qualified names of all modules by id; those of a second tree start with its number."""
    modules = list(registry.modules)
    inner = {id(child) for module in modules for child in module._modules.values()}
    names: Dict[int, str] = {}
    for number, root in enumerate(m for m in modules if id(m) not in inner):
        todo = [(root, f"{number}." if number else "")]
        while todo:
            module, name = todo.pop()
            if id(module) not in names:
                names[id(module)] = name
                children = [(c, f"{name}{k}.") for k, c in module._modules.items() if c is not None]
                todo += reversed(children)
    return names


def views_of(copies: TensorCopies) -> Dict[int, Tuple[Any, ...]]:
    """Return the variables that are views of the training state: they must be views there too.

    Call it right after the savepoint was taken, while all its tensors exist.

    Returns:
        By number of the copy: number of the tensor it is a view of, elements from that one's start
        to its own, shape and strides.

    Raises:
        CannotRestore: a view has another type.
    """
    owners = [copies.original(number) for number in range(len(copies.slots))]
    trained: Dict[int, int] = {}
    for number, slot in enumerate(copies.slots):
        if slot.bulk and owners[number].numel():
            trained.setdefault(_memory(owners[number]), number)
    views: Dict[int, Tuple[Any, ...]] = {}
    for number, (slot, owner) in enumerate(zip(copies.slots, owners)):
        base = None if slot.bulk or slot.fresh or owner is None else trained.get(_memory(owner))
        if base is None or not slot.buffer.numel():
            continue
        whole = owners[base]
        if slot.array or owner.dtype != whole.dtype:
            raise CannotRestore("a variable views the memory of a parameter as another type")
        start = owner.storage_offset() - whole.storage_offset()
        views[number] = (base, start, tuple(owner.shape), owner.stride())
    return views


def _memory(owner: Any) -> int:
    """Return the address of the memory of a tensor or array."""
    if hasattr(owner, "untyped_storage"):
        return int(owner.untyped_storage().data_ptr())
    return int(owner.__array_interface__["data"][0])


def digest(code: CodeType) -> str:
    """Return a hash of a function's bytecode, names and constants, without line numbers."""
    found = hashlib.sha256(code.co_code)
    found.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    for constant in code.co_consts:
        found.update(_constant_text(constant).encode())
    return found.hexdigest()


def _constant_text(constant: Any) -> str:
    if isinstance(constant, CodeType):
        return digest(constant)
    if isinstance(constant, (tuple, frozenset)):
        parts = [_constant_text(each) for each in constant]
        return f"{type(constant).__name__}{sorted(parts) if type(constant) is frozenset else parts}"
    return repr(constant)


def place_of(saved: Savepoint) -> List[Tuple[str, str, int]]:
    """Return where the job stood: function, digest and offset of each frame, outermost first."""
    return [
        (step.code.co_name, digest(step.code), step.offset)
        for step in saved.program.frame_locations
    ]


def document(saved: Savepoint, names: Dict[int, str]) -> Dict[str, Any]:
    """Return all of a savepoint that was just taken; its copies may not have arrived yet.

    Args:
        names: of `names_of`, when it was taken.

    Raises:
        CannotRestore: another process cannot continue from it.
    """
    training, program, copies = saved.training, saved.program, saved.copies
    writer = Writer({optimizer.id: i for i, optimizer in enumerate(training.optimizers)})
    numbers = {parameter.id: parameter.number for parameter in training.parameters}
    model: Dict[str, Any] = {}
    modules: List[Tuple[Any, ...]] = []
    for module in training.modules:
        name = names.get(module.id, f"{len(modules)}.")
        model.update((f"{name}{key}", copies.slots[n].buffer) for key, n in module.numbers.items())
        buffers = writer.fields(module.buffers, name)
        modules.append((module.name, dict(module.numbers), buffers, _plain(module.attributes)))
    return {
        "what": FORMAT,
        "step": saved.step,
        "attempt": saved.attempt,
        "model": model,
        "place": place_of(saved),
        "modules": modules,
        "parameters": [
            (p.name, p.number, p.requires_grad, p.gradient) for p in training.parameters
        ],
        "optimizers": [_optimizer(one, numbers, writer) for one in training.optimizers],
        "others": [(name, writer.fields(held, f"{name}.")) for _, name, held in training.others],
        "functions": [
            None if fields is None else writer.fields(fields, "") for fields in program.functions
        ],
        "globals": [
            (program.names[number], writer.fields(fields, ""))
            for number, fields in program.globals.items()
        ],
        "rng": [(state.name, plain_state(state.content)) for state in saved.rng],
        "extra": writer.constants(saved.extra),
        "views": views_of(copies),
        "tensors": [
            (slot.buffer, str(slot.device), slot.array, slot.requires_grad) for slot in copies.slots
        ],
    }


def _optimizer(optimizer: Any, numbers: Dict[int, int], writer: "Writer") -> Dict[str, Any]:
    name = f"{optimizer.name}."
    state = []
    for key, constant, part in optimizer.state:
        if callable(key):  # a weak reference to a parameter
            key = key()
            where = ("parameter", numbers.get(id(key), -1))
        else:
            where = ("key", writer.constant(key))
        content = writer.constant(constant) if part is None else writer.value(part, name)
        state.append((where, content))
    return {
        "type": optimizer.name,
        "members": [[numbers[one] for one in group] for group in optimizer.members],
        "param_groups": [writer.fields(group, name) for group in optimizer.groups],
        "state": state,
        "attributes": writer.fields(optimizer.attributes, name),
    }


def _plain(fields: Fields) -> List[Tuple[str, Any]]:
    """Return the plain values among a module's attributes, such as `training`."""
    return [(k, v) for k, v in fields.constants.items() if type(v) in _PLAIN]


class Writer:
    """Makes plain data of saved values; one that occurs twice is written once."""

    def __init__(self, optimizers: Dict[int, int]) -> None:
        """`optimizers`: numbers by id; a GradScaler's tables have these ids as keys."""
        self._optimizers = optimizers
        self._seen: Dict[int, int] = {}

    def fields(self, fields: Fields, path: str) -> List[Tuple[Any, Any]]:
        """Return `[(key, content)]`."""
        written = [(self.key(k), self.constant(v)) for k, v in fields.constants.items()]
        for key, part in fields.special.items():
            written.append((self.key(key), self.value(part, f"{path}{key}")))
        return written

    def key(self, key: Any) -> Any:
        """Return the plain form of a key of a dict."""
        if type(key) is int and key in self._optimizers:
            return ("optimizer", self._optimizers[key])
        return self.constant(key)

    def constant(self, value: Any) -> Any:
        """Return the plain form of immutable data; types beyond Python's own by their repr."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.floating, numpy.integer, numpy.bool_)):
            return ("scalar", str(value.dtype), value.item())
        if hasattr(kind, "_member_map_"):  # an enum
            return ("constant", type_name(value), str(value._name_))
        return ("constant", type_name(value), "" if is_job_class(kind) else repr(value))

    def constants(self, value: Any) -> Any:
        """Return the plain form of dicts, lists and tuples of constants and host tensors."""
        if isinstance(value, dict):
            return ("dict", [(key, self.constants(each)) for key, each in value.items()])
        if isinstance(value, (list, tuple)):
            return ("tuple", [self.constants(each) for each in value])
        return value if hasattr(value, "untyped_storage") else self.constant(value)

    def value(self, value: Value, path: str) -> Any:
        """Return the plain form of a saved value.

        Raises:
            CannotRestore: it is an iterator.
        """
        if isinstance(value, Tensor):
            return ("tensor", value.number)
        if id(value) in self._seen:
            return ("repeated", self._seen[id(value)])
        number = self._seen[id(value)] = len(self._seen)
        if isinstance(value, ObjectRef):
            own = self.fields(value.fields, f"{path}.")
            return ("object", number, value.type, own, self.fields(value.cells, f"{path}."))
        if isinstance(value, SavedDict):
            keys = [self.key(key) for key in value.keys]
            return ("dict", number, type_name(value.type), keys, self.fields(value.fields, path))
        if isinstance(value, SavedSequence):
            content = [
                self.value(value.special[i], f"{path}[{i}]")
                if i in value.special
                else self.constant(one)
                for i, one in enumerate(value.content)
            ]
            return ("sequence", number, type_name(value.type), value.length_max, content)
        if isinstance(value, SavedSet):
            content = [self.constant(each) for each in value.content]
            return ("set", number, type_name(value.type), content)
        if isinstance(value, SavedMethod):
            return ("method", number, self.value(value.owner, path))
        if isinstance(value, RngState):
            return ("rng", number, value.type, plain_state(value.state))
        return self._other(value, number, path)

    def _other(self, value: Value, number: int, path: str) -> Any:
        assert isinstance(value, IdentityRef)
        if value.iterator:
            raise CannotRestore(
                f"{path} is a {value.type}, which would start over in another process"
            )
        stamp = None if value.stamp is None else self.constants(value.stamp[1])
        return ("other", number, value.type, value.lost, stamp)


def plain_state(state: Any) -> Any:
    """Return the state of a generator as plain data; arrays as lists with their type."""
    if isinstance(state, dict):
        return ("dict", [(key, plain_state(value)) for key, value in state.items()])
    if isinstance(state, tuple):
        return ("tuple", [plain_state(value) for value in state])
    if hasattr(state, "tolist") and not hasattr(state, "untyped_storage"):
        return ("array", str(state.dtype), state.tolist())
    return state
