"""Looking through the job's variables for everything that a savepoint must remember.

Rule 1: only data and objects of the job's own classes are entered; a library's objects are noted
by identity. Rule 2: the walk is bounded in depth, in length and in total.
Rule 3: nothing of the job is called: no property, no `__getattr__`, no `__len__` of its own.

What is decided here is *what kind of thing* a value is. How it comes back is in `values.py`.
"""

import sys
from collections import deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from . import rng
from .containers import Bag, Listing, Table, table_base
from .copies import Copies
from .frames import is_library
from .objects import attributes, closure
from .values import Bound, Chance, Fields, Other, Tensor, Thing, Value

_LENGTH_MAX = 1000  # elements of one container; 1000 floats take 0.1 ms
_DEPTH_MAX = 8  # steps from a variable: state.model_config.schedule["warmup"] is 3
_TOTAL_MAX = 20_000  # values of one walk that are no constants; about 20 ms
_HISTORY_MAX = 4096  # elements of a tensor with autograd history: a loss, not logits
_HEAVY_BYTES = 64 << 20  # a larger variable is taken to be the data set, and is only watched
_TYPES_MAX = 4096
_WATCHED_MAX = 64  # attributes of a library's object that are compared
_CONSTANTS = (int, float, complex, str, bytes, type(None), type(...), range, slice)
_PLAIN_OBJECTS = (("types", "SimpleNamespace"), ("argparse", "Namespace"))
_IMMUTABLE = (
    ("enum", "Enum"),
    ("pathlib", "PurePath"),
    ("datetime", "date"),
    ("datetime", "timedelta"),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    ("numpy", "generic"),
    ("numpy", "dtype"),
)
_NEVER_ENTERED = (
    ("threading", "Thread"),
    ("multiprocessing.process", "BaseProcess"),
    ("io", "IOBase"),
    ("builtins", "BaseException"),
)


_EXACT: Dict[type, str] = {
    FunctionType: "function", MethodType: "method", ModuleType: "code",
    BuiltinFunctionType: "code",
}  # fmt: skip


class Kinds:
    """Which of our kinds a Python type is; remembered per type."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._known: Dict[type, str] = {}

    def of(self, kind: type) -> str:
        """One of constant, code, class, function, method, tensor, array, table, listing, bag,
        chance, training, thing, iterator, other."""
        known = self._known.get(kind)
        if known is None:
            if len(self._known) > _TYPES_MAX:  # a job that makes classes as it goes
                self._known.clear()
            known = self._known[kind] = self._decide(kind)
        return known

    def _decide(self, kind: type) -> str:
        torch = self._torch
        if kind in _EXACT:
            return _EXACT[kind]
        fixed = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
        if issubclass(kind, (*_CONSTANTS, *fixed, *_loaded(_IMMUTABLE))):
            return "constant"
        if issubclass(kind, type):
            return "class"
        if issubclass(kind, tuple):
            return "listing" if kind is tuple or hasattr(kind, "_fields") else "other"
        if issubclass(kind, torch.Tensor):
            return "tensor" if kind in (torch.Tensor, torch.nn.Parameter) else "other"
        if issubclass(kind, _loaded((("numpy", "ndarray"),))):
            return "array" if kind is sys.modules["numpy"].ndarray else "other"
        if issubclass(kind, rng.generator_types(torch)):
            return "chance"
        schedulers, scalers = torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler
        if issubclass(kind, (torch.nn.Module, torch.optim.Optimizer, schedulers, scalers)):
            return "training"
        if issubclass(kind, _loaded(_NEVER_ENTERED)):
            return "other"
        if issubclass(kind, dict):
            return "table"
        if issubclass(kind, (list, deque)):
            return "listing"
        if issubclass(kind, set):
            return "bag"
        if kind in _loaded(_PLAIN_OBJECTS) or _is_users(kind):
            return "thing"
        return "iterator" if hasattr(kind, "__next__") else "other"

    def is_constant(self, value: Any) -> bool:
        """Whether a value is immutable data."""
        return self.of(type(value)) == "constant"

    def constants_of(self, value: Any) -> Dict[str, Any]:
        """The plain attributes of a library's object: when they change, it has changed."""
        own = attributes(value) if not isinstance(value, type) else {}
        if len(own) > _WATCHED_MAX:
            return {}
        known = self._known
        return {name: held for name, held in own.items() if known.get(type(held)) == "constant"}

    def is_code(self, value: Any) -> bool:
        """Whether a value is a function, class or module."""
        return self.of(type(value)) in ("code", "class", "function", "method")


class Walk:
    """One look through the variables, for one savepoint."""

    def __init__(
        self, torch: ModuleType, kinds: Kinds, copies: Copies, found: Callable[[Any], None]
    ) -> None:
        """`found` is told every module, optimizer, scheduler and scaler that comes by."""
        self._torch = torch
        self._kinds = kinds
        self._copies = copies
        self._found = found
        self._seen: Dict[int, Value] = {}
        self._held: List[Any] = []  # keeps the ids in _seen valid while the walk lasts
        self.bulk = False  # whether tensors are training state, see Copies.add

    def fields(self, items: Iterable[Tuple[Any, Any]], depth: int = 0) -> Fields:
        """Remember named places. Keys must be hashable constants or attribute names."""
        fields = Fields()
        self._fill(fields, items, depth)
        return fields

    def _fill(self, fields: Fields, items: Iterable[Tuple[Any, Any]], depth: int) -> None:
        constants, kinds = fields.constants, self._kinds
        for key, value in items:
            kind = kinds.of(type(value))
            if kind == "constant":
                constants[key] = value
            else:
                fields.special[key] = self._value(value, kind, depth)

    def value(self, value: Any) -> Optional[Value]:
        """Remember one value; None for a constant."""
        kind = self._kinds.of(type(value))
        return None if kind == "constant" else self._value(value, kind, 0)

    def _value(self, value: Any, kind: str, depth: int) -> Value:
        seen = self._seen.get(id(value))
        if seen is not None:
            return seen
        if depth > _DEPTH_MAX or len(self._seen) > _TOTAL_MAX:
            kind = "other"
        self._held.append(value)
        make = getattr(self, f"_{kind}", self._other)
        made: Value = make(value, depth + 1)
        self._seen[id(value)] = made
        return made

    def _other(self, value: Any, depth: int) -> Value:
        return Other(value, stamp=self._kinds.constants_of)

    def _code(self, value: Any, depth: int) -> Value:
        return Other(value)

    def _iterator(self, value: Any, depth: int) -> Value:
        return Other(value, lost=True)

    def _training(self, value: Any, depth: int) -> Value:
        self._found(value)
        return Other(value)

    def _chance(self, value: Any, depth: int) -> Value:
        return Chance(value)

    def _tensor(self, tensor: Any, depth: int) -> Value:
        if not is_copyable(self._torch, tensor):
            return Other(tensor)
        if tensor.grad_fn is not None:  # bound again without its history, which is of no more use
            if tensor.numel() > _HISTORY_MAX:
                return Other(tensor, lost=True)
            return Tensor(self._copies.add(tensor, fresh=True))
        if not self.bulk and tensor.numel() * tensor.element_size() > _HEAVY_BYTES:
            return Other(tensor, stamp=lambda tensor: tensor._version)
        return Tensor(self._copies.add(tensor, bulk=self.bulk))

    def _array(self, array: Any, depth: int) -> Value:
        if not array.flags.writeable or array.nbytes > _HEAVY_BYTES:
            return Other(array)
        try:
            tensor = self._torch.from_numpy(array)
        except (TypeError, ValueError):  # of objects or strings, or with negative strides
            return Other(array)
        return Tensor(self._copies.add(tensor, owner=array))

    def _table(self, value: Dict[Any, Any], depth: int) -> Value:
        constant = self._kinds.is_constant
        if dict.__contains__(value, "__builtins__") or value is sys.modules:
            return Other(value)  # a namespace of Python's own
        items = list(table_base(value).items(value))
        if len(items) > _LENGTH_MAX or not all(constant(key) for key, _ in items):
            return Other(value, stamp=dict.__len__)
        table = Table(value)
        self._seen[id(value)] = table
        self._fill(table.fields, items, depth)
        return table

    def _listing(self, value: Any, depth: int) -> Value:
        base = deque if isinstance(value, deque) else tuple if isinstance(value, tuple) else list
        if base.__len__(value) > _LENGTH_MAX:
            return Other(value, stamp=base.__len__)
        listing = Listing(value)
        self._seen[id(value)] = listing
        listing.content = content = list(base.__iter__(value))
        if {self._kinds.of(kind) for kind in set(map(type, content))} <= {"constant"}:
            return listing
        for i, element in enumerate(content):
            kind = self._kinds.of(type(element))
            if kind != "constant":
                content[i] = None
                listing.special[i] = self._value(element, kind, depth)
        return listing

    def _bag(self, value: Any, depth: int) -> Value:
        content = set(set.__iter__(value))
        if len(content) > _LENGTH_MAX or not all(map(self._kinds.is_constant, content)):
            return Other(value, stamp=set.__len__)
        return Bag(value, content)

    def _method(self, value: Any, depth: int) -> Value:
        owner = value.__self__
        return Bound(self._value(owner, self._kinds.of(type(owner)), depth))

    def _class(self, value: Any, depth: int) -> Value:
        if not _is_users(value):
            return Other(value)
        thing = Thing(value)
        own = {k: v for k, v in list(vars(value).items()) if not k.startswith("__")}
        thing.fields.constants = {k: v for k, v in own.items() if self._kinds.is_constant(v)}
        return thing

    def _function(self, value: Any, depth: int) -> Value:
        if is_library(value.__code__.co_filename) or not (value.__closure__ or value.__dict__):
            return Other(value)
        return self._thing(value, depth)

    def _thing(self, value: Any, depth: int) -> Value:
        thing = Thing(value)
        self._seen[id(value)] = thing
        self._fill(thing.fields, attributes(value).items(), depth)
        cells = closure(value)
        self._fill(thing.cells, ((k, cell.cell_contents) for k, cell in cells.items()), depth)
        return thing


def is_copyable(torch: ModuleType, tensor: Any) -> bool:
    """Whether a tensor's content can be copied to the host as it is: dense, no
    subclass with a storage of its own (DTensor), and on CPU or CUDA."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not torch.nn.parameter.is_lazy(tensor)
        and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    )


def _loaded(names: Iterable[Tuple[str, str]]) -> Tuple[type, ...]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(kind for kind in found if isinstance(kind, type))


def _is_users(kind: type) -> bool:
    """Whether a class is defined in the job's own files."""
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return isinstance(file, str) and not is_library(file)
