"""Looking through the job's variables for everything that a savepoint must remember.

Rule 1: the walk is bounded in depth, in length and in total.
Rule 2: nothing of the job is called: no property, no `__getattr__`, no `__len__` of its own.
Rule 3: what is too large to look into is remembered as lost, and will be named.

What kind of thing a value is, `type_classes.py` says; how it comes back is in `captured_values.py`.
"""

import sys
from collections import deque
from types import ModuleType
from typing import Any, Callable, Collection, Dict, Iterable, List, Optional, Set, Tuple

from ..runtime.object_access import attributes, closure
from .call_stack import CannotRestore, is_library
from .captured_values import Bound, Fields, ObjectRef, Other, RngState, Tensor, Value
from .containers import Listing, SetValue, Table, table_base
from .iterators import Spots, Stream
from .open_files import source_of
from .tensor_copies import Copies, writes_are_counted
from .type_classes import Kinds, is_own

_CONSTANTS_MAX = 1000  # elements of a container of numbers; they take 0.1 ms
_TENSORS_MAX = 20_000  # elements of a container of tensors: an EMA copy, say
_OTHERS_MAX = 100  # elements of a container of containers or objects; more is a data set
_DEPTH_MAX = 8  # steps from a variable: state.model_config.schedule["warmup"] is 3
_TOTAL_MAX = 20_000  # values of one walk that are no constants; about 20 ms
_HISTORY_MAX = 4096  # elements of a tensor with autograd history: a loss, not logits
_HEAVY_TENSOR = 64 << 20  # bytes; a larger variable is not copied; torch counts writes to it
_HEAVY_ARRAY = 16 << 20  # bytes; nothing counts writes to an array, so it is copied each time


class VariableWalker:
    """One look through the variables, for one savepoint."""

    def __init__(
        self,
        torch: ModuleType,
        kinds: Kinds,
        copies: Copies,
        found: Callable[[Any], None],
        taped: Callable[[Any], bool],
    ) -> None:
        """
        Args:
            found: told every module, optimizer, scheduler and scaler that comes by.
            taped: whether an iterator is made to give again what it gave.
        """
        self._torch = torch
        self._kinds = kinds
        self._copies = copies
        self._found = found
        self._spots = Spots(kinds, taped)
        self._streams: List[Tuple[Any, Optional[Stream]]] = []
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
            if isinstance(seen, Stream):
                seen.places += 1
            return seen
        too_far = depth > _DEPTH_MAX or len(self._seen) > _TOTAL_MAX
        if too_far and kind in ("table", "listing", "bag", "thing", "tensor", "array"):
            return Other(value, lost=True)
        self._held.append(value)
        make = getattr(self, f"_{kind}", self._other)
        made: Value = make(value, depth + 1)
        self._seen[id(value)] = made
        return made

    def _other(self, value: Any, depth: int) -> Value:
        source = source_of(value, self._kinds, self._torch)
        return source or Other(value, stamp=self._kinds.stamp)

    def _code(self, value: Any, depth: int) -> Value:
        return Other(value)

    def _stream(self, value: Any, depth: int) -> Value:
        if not hasattr(type(value), "__next__"):
            return Other(value, lost=True)
        stream = Stream(value, self._spots)
        self._streams.append((value, stream))
        return stream

    def settle(self) -> None:
        """All was looked at: tell the iterators which of them are also held elsewhere."""
        self._held.append(object())  # held by us alone
        self._streams.append((self._held[-1], None))
        ours = 0
        for value, stream in reversed(self._streams):
            if stream is None:
                ours = sys.getrefcount(value)
            else:
                stream.shared = sys.getrefcount(value) - ours > stream.places

    def _training(self, value: Any, depth: int) -> Value:
        self._found(value)
        return Other(value)

    def _chance(self, value: Any, depth: int) -> Value:
        return RngState(value)

    def _tensor(self, tensor: Any, depth: int) -> Value:
        if not is_copyable(self._torch, tensor):
            return self._no_memory(tensor)
        if tensor.grad_fn is not None:  # bound again without its history, which is of no more use
            if tensor.numel() > _HISTORY_MAX:
                return Other(tensor, lost=True)
            return Tensor(self._copies.add(tensor, fresh=True))
        counted = writes_are_counted(tensor)
        if not self.bulk and type(tensor) not in (self._torch.Tensor, self._torch.nn.Parameter):
            return Other(tensor, lost=True)  # there is no telling how to make a new one
        limit = _HEAVY_TENSOR if counted else _HEAVY_ARRAY
        if not self.bulk and tensor.numel() * tensor.element_size() > limit:
            return Other(tensor, lost=not counted, stamp=_version if counted else None)
        return Tensor(self._copies.add(tensor, bulk=self.bulk))

    def _no_memory(self, tensor: Any) -> Value:
        if self.bulk and not tensor.is_meta:
            raise CannotRestore(
                f"the training state holds a {type(tensor).__name__} on {tensor.device}, laid out "
                f"as {tensor.layout}; only dense tensors on CPU or CUDA can be saved"
            )
        return Other(tensor, lost=not tensor.is_meta)

    def _array(self, array: Any, depth: int) -> Value:
        if not array.flags.writeable or array.nbytes > _HEAVY_ARRAY:
            return Other(array, lost=array.flags.writeable)
        if type(array) is not sys.modules["numpy"].ndarray:
            return Other(array, lost=True)
        try:
            tensor = self._torch.from_numpy(array)
        except (TypeError, ValueError):  # of objects or strings, or with negative strides
            return Other(array, lost=True)
        return Tensor(self._copies.add(tensor, owner=array))

    def _table(self, value: Dict[Any, Any], depth: int) -> Value:
        constant = self._kinds.is_constant
        if dict.__contains__(value, "__builtins__") or value is sys.modules:
            return Other(value)  # a namespace of Python's own
        items = list(table_base(value).items(value))
        if not all(constant(key) for key, _ in items) or self._too_long([v for _, v in items]):
            return Other(value, lost=True)
        table = Table(value)
        self._seen[id(value)] = table
        self._fill(table.fields, items, depth)
        return table

    def _listing(self, value: Any, depth: int) -> Value:
        base = deque if isinstance(value, deque) else tuple if isinstance(value, tuple) else list
        content = list(base.__iter__(value))
        if self._too_long(content):
            return Other(value, lost=True)
        listing = Listing(value)
        self._seen[id(value)] = listing
        listing.content = content
        if self._kinds_in(content) <= {"constant"}:
            return listing
        for i, element in enumerate(content):
            kind = self._kinds.of(type(element))
            if kind != "constant":
                content[i] = None
                listing.special[i] = self._value(element, kind, depth)
        return listing

    def _bag(self, value: Any, depth: int) -> Value:
        content = set(set.__iter__(value))
        if self._kinds_in(content) <= {"constant"} and not self._too_long(content):
            return SetValue(value, content)
        return Other(value, lost=True)

    def _kinds_in(self, content: Iterable[Any]) -> Set[str]:
        return {self._kinds.of(kind) for kind in set(map(type, content))}

    def _too_long(self, content: Collection[Any]) -> bool:
        """Whether it costs too much to look at every element at every savepoint."""
        if len(content) <= _OTHERS_MAX:
            return False
        kinds = self._kinds_in(content)
        tensors = kinds <= {"constant", "tensor"}
        return len(content) > (
            _CONSTANTS_MAX if kinds <= {"constant"} else _TENSORS_MAX if tensors else _OTHERS_MAX
        )

    def _method(self, value: Any, depth: int) -> Value:
        owner = value.__self__
        return Bound(self._value(owner, self._kinds.of(type(owner)), depth))

    def _class(self, value: Any, depth: int) -> Value:
        if not is_own(value):
            return Other(value)
        thing = ObjectRef(value)
        own = {k: v for k, v in list(vars(value).items()) if not k.startswith("__")}
        thing.fields.constants = {k: v for k, v in own.items() if self._kinds.is_constant(v)}
        return thing

    def _function(self, value: Any, depth: int) -> Value:
        if is_library(value.__code__.co_filename) or not (value.__closure__ or value.__dict__):
            return Other(value)
        return self._thing(value, depth)

    def _thing(self, value: Any, depth: int) -> Value:
        thing = ObjectRef(value)
        self._seen[id(value)] = thing
        self._fill(thing.fields, attributes(value).items(), depth)
        cells = closure(value)
        self._fill(thing.cells, ((k, cell.cell_contents) for k, cell in cells.items()), depth)
        return thing


def is_copyable(torch: ModuleType, tensor: Any) -> bool:
    """Whether a tensor is plain memory: dense, on CPU or CUDA, no wrapper such as a DTensor."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not torch.nn.parameter.is_lazy(tensor)
        and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    )


def _version(tensor: Any) -> int:
    return int(tensor._version)
