"""A savepoint as plain data, which another process of the same script can go on from.

Ids and weak references mean nothing there, so everything is named by its place: modules by order of
registration and by name, parameters by their module, optimizer state by parameter, variables by
function and name. Code is known by a digest of its bytecode, with all functions defined inside.

Rule 1: only what `torch.load(weights_only=True)` takes: numbers, strings, tuples, lists, dicts and
tensors. Everything else is a tuple that begins with a word; `apply.py` reads it.
Rule 2: what has a place of its own to go on from, an iterator, is refused: it would begin anew.
"""

import hashlib
import sys
from types import CodeType
from typing import Any, Dict, List, Tuple

from ..capture.call_stack import CannotRestore
from ..capture.captured_values import (
    Bound,
    Fields,
    ObjectRef,
    Other,
    RngState,
    Tensor,
    Value,
    name_of,
)
from ..capture.containers import Listing, SetValue, Table
from ..capture.tensor_copies import Copies
from ..capture.type_classes import is_own
from ..torch_state.registry import Registry
from .store import Savepoint

WHAT = "supervise savepoint 1"
_PLAIN = (type(None), bool, int, float, str, bytes)


def names_of(registry: Registry) -> Dict[int, str]:
    """Qualified names of all modules by id; those of a second tree begin with its number."""
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


def views_of(copies: Copies) -> Dict[int, Tuple[Any, ...]]:
    """Variables that are views of the training state: they must be views there too.

    To be called where the savepoint was just taken, while all its tensors live.

    Returns:
        By number of the copy: number of the tensor it is a view of, elements from that one's start
        to its own, shape and strides.

    Raises:
        CannotRestore: it sees the same memory as another type.
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
            raise CannotRestore("a variable sees the memory of a parameter as another type")
        start = owner.storage_offset() - whole.storage_offset()
        views[number] = (base, start, tuple(owner.shape), owner.stride())
    return views


def _memory(owner: Any) -> int:
    """Where the memory of a tensor or array begins."""
    if hasattr(owner, "untyped_storage"):
        return int(owner.untyped_storage().data_ptr())
    return int(owner.__array_interface__["data"][0])


def digest(code: CodeType) -> str:
    """What tells a function from a changed one: its bytecode, names and constants, no lines."""
    found = hashlib.sha256(code.co_code)
    found.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    for constant in code.co_consts:
        found.update(_told(constant).encode())
    return found.hexdigest()


def _told(constant: Any) -> str:
    if isinstance(constant, CodeType):
        return digest(constant)
    if isinstance(constant, (tuple, frozenset)):
        parts = [_told(each) for each in constant]
        return f"{type(constant).__name__}{sorted(parts) if type(constant) is frozenset else parts}"
    return repr(constant)


def place_of(saved: Savepoint) -> List[Tuple[str, str, int]]:
    """Where the job stood: function, digest and offset of each frame, outermost first."""
    return [(step.code.co_name, digest(step.code), step.offset) for step in saved.program.itinerary]


def document(saved: Savepoint, names: Dict[int, str]) -> Dict[str, Any]:
    """Return all of a savepoint that was just taken; its copies may still be on their way.

    Args:
        names: of `names_of`, when it was taken.

    Raises:
        CannotRestore: it holds what no other process can go on from.
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
        "what": WHAT,
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
    """The numbers and words among a module's attributes, such as `training`."""
    return [(k, v) for k, v in fields.constants.items() if type(v) in _PLAIN]


class Writer:
    """Makes plain data of remembered values; one that is met twice is written once."""

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
        """Return what stands for a key of a dict."""
        if type(key) is int and key in self._optimizers:
            return ("optimizer", self._optimizers[key])
        return self.constant(key)

    def constant(self, value: Any) -> Any:
        """Return what stands for immutable data; all but Python's own is known by its words."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.floating, numpy.integer, numpy.bool_)):
            return ("scalar", str(value.dtype), value.item())
        if hasattr(kind, "_member_map_"):  # an enum
            return ("constant", name_of(value), str(value._name_))
        return ("constant", name_of(value), "" if is_own(kind) else repr(value))

    def constants(self, value: Any) -> Any:
        """Return what stands for dicts, lists and tuples of constants and tensors of the host."""
        if isinstance(value, dict):
            return ("dict", [(key, self.constants(each)) for key, each in value.items()])
        if isinstance(value, (list, tuple)):
            return ("tuple", [self.constants(each) for each in value])
        return value if hasattr(value, "untyped_storage") else self.constant(value)

    def value(self, value: Value, path: str) -> Any:
        """Return what stands for a remembered value.

        Raises:
            CannotRestore: it is an iterator.
        """
        if isinstance(value, Tensor):
            return ("tensor", value.number)
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        number = self._seen[id(value)] = len(self._seen)
        if isinstance(value, ObjectRef):
            own = self.fields(value.fields, f"{path}.")
            return ("thing", number, value.type, own, self.fields(value.cells, f"{path}."))
        if isinstance(value, Table):
            keys = [self.key(key) for key in value.keys]
            return ("table", number, name_of(value.type), keys, self.fields(value.fields, path))
        if isinstance(value, Listing):
            content = [
                self.value(value.special[i], f"{path}[{i}]")
                if i in value.special
                else self.constant(one)
                for i, one in enumerate(value.content)
            ]
            return ("listing", number, name_of(value.type), value.length_max, content)
        if isinstance(value, SetValue):
            content = [self.constant(each) for each in value.content]
            return ("bag", number, name_of(value.type), content)
        if isinstance(value, Bound):
            return ("bound", number, self.value(value.owner, path))
        if isinstance(value, RngState):
            return ("chance", number, value.type, plain_state(value.state))
        return self._other(value, number, path)

    def _other(self, value: Value, number: int, path: str) -> Any:
        assert isinstance(value, Other)
        if value.stream:
            raise CannotRestore(f"{path} is a {value.type}, which begins anew in another process")
        stamp = None if value.stamp is None else self.constants(value.stamp[1])
        return ("other", number, value.type, value.lost, stamp)


def plain_state(state: Any) -> Any:
    """Return the state of a generator as plain data; arrays are lists that know their type."""
    if isinstance(state, dict):
        return ("dict", [(key, plain_state(value)) for key, value in state.items()])
    if isinstance(state, tuple):
        return ("tuple", [plain_state(value) for value in state])
    if hasattr(state, "tolist") and not hasattr(state, "untyped_storage"):
        return ("array", str(state.dtype), state.tolist())
    return state
