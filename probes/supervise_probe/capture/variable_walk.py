"""The walk over the job's variables that collects what a savepoint must hold.

Rule 1: the walk is bounded in depth, in length and in total.
Rule 2: no code of the job is called: no property, no `__getattr__`, no `__len__` of its own.
Rule 3: what is too large to enter is marked as lost, and named after a rollback.

`type_classes.py` classifies values; `captured_values.py` restores them.
"""

import sys
from collections import deque
from types import ModuleType
from typing import Any, Callable, Collection, Dict, Iterable, List, Optional, Set, Tuple

from ..runtime.object_access import attributes, closure
from .call_stack import CannotRestore, is_library
from .captured_values import Fields, IdentityRef, ObjectRef, RngState, SavedMethod, Tensor, Value
from .containers import SavedDict, SavedSequence, SavedSet, dict_base
from .iterators import IteratorPositions, SavedIterator
from .open_files import saved_source
from .tensor_copies import TensorCopies, local, writes_are_counted
from .type_classes import TypeClasses, is_job_class

_CONSTANTS_MAX = 1000  # elements of a container of numbers; they take 0.1 ms
_TENSORS_MAX = 20_000  # elements of a container of tensors: an EMA copy, say
_OTHERS_MAX = 100  # elements of a container of containers or objects; more is a data set
_DEPTH_MAX = 8  # steps from a variable: state.model_config.schedule["warmup"] is 3
_TOTAL_MAX = 20_000  # values of one walk that are no constants; about 20 ms
_HISTORY_MAX = 4096  # elements of a tensor with autograd history: a loss, not logits
_HEAVY_TENSOR = 64 << 20  # bytes; a larger variable is not copied; torch counts writes to it
_HEAVY_ARRAY = 16 << 20  # bytes; nothing counts writes to an array, so it is copied each time


class VariableWalker:
    """One walk over the variables, for one savepoint."""

    def __init__(
        self,
        torch: ModuleType,
        kinds: TypeClasses,
        copies: TensorCopies,
        found: Callable[[Any], None],
        replayed: Callable[[Any], bool],
    ) -> None:
        """
        Args:
            found: called with every module, optimizer, scheduler and scaler.
            replayed: whether the batches of an iterator are recorded.
        """
        self._torch = torch
        self._kinds = kinds
        self._copies = copies
        self._found = found
        self._spots = IteratorPositions(kinds, replayed)
        self._iterators: List[Tuple[Any, Optional[SavedIterator]]] = []
        self._seen: Dict[int, Value] = {}
        self._held: List[Any] = []  # keeps the ids in _seen valid while the walk lasts
        self.bulk = False  # whether tensors are training state, see TensorCopies.add

    def fields(self, items: Iterable[Tuple[Any, Any]], depth: int = 0) -> Fields:
        """Save named values. Keys must be hashable constants or attribute names."""
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
        """Save one value; None for a constant."""
        kind = self._kinds.of(type(value))
        return None if kind == "constant" else self._value(value, kind, 0)

    def _value(self, value: Any, kind: str, depth: int) -> Value:
        seen = self._seen.get(id(value))
        if seen is not None:
            if isinstance(seen, SavedIterator):
                seen.places += 1
            return seen
        too_far = depth > _DEPTH_MAX or len(self._seen) > _TOTAL_MAX
        if too_far and kind in ("dict", "sequence", "set", "object", "tensor", "array"):
            return IdentityRef(value, lost=True)
        self._held.append(value)
        make = getattr(self, f"_{kind}", self._other)
        made: Value = make(value, depth + 1)
        self._seen[id(value)] = made
        return made

    def _other(self, value: Any, depth: int) -> Value:
        source = saved_source(value, self._kinds, self._torch)
        return source or IdentityRef(value, stamp=self._kinds.stamp)

    def _code(self, value: Any, depth: int) -> Value:
        return IdentityRef(value)

    def _iterator(self, value: Any, depth: int) -> Value:
        if not hasattr(type(value), "__next__"):
            return IdentityRef(value, lost=True)
        iterator = SavedIterator(value, self._spots)
        self._iterators.append((value, iterator))
        return iterator

    def find_shared_iterators(self) -> None:
        """Mark the iterators that something else holds too, after the walk."""
        self._held.append(object())  # one reference less than a shared one
        self._iterators.append((self._held[-1], None))
        own_references = 0
        for value, iterator in reversed(self._iterators):
            if iterator is None:
                own_references = sys.getrefcount(value)
            else:
                iterator.shared = sys.getrefcount(value) - own_references > iterator.places

    def _training(self, value: Any, depth: int) -> Value:
        self._found(value)
        return IdentityRef(value)

    def _rng(self, value: Any, depth: int) -> Value:
        return RngState(value)

    def _tensor(self, tensor: Any, depth: int) -> Value:
        if not is_copyable(self._torch, tensor):
            return self._no_memory(tensor)
        if tensor.grad_fn is not None:  # restored without its history, which is no longer used
            if tensor.numel() > _HISTORY_MAX:
                return IdentityRef(tensor, lost=True)
            return Tensor(self._copies.add(tensor, fresh=True))
        counted = writes_are_counted(tensor)
        if not self.bulk and type(tensor) not in (self._torch.Tensor, self._torch.nn.Parameter):
            return IdentityRef(tensor, lost=True)  # it is not known how to make a new one
        limit = _HEAVY_TENSOR if counted else _HEAVY_ARRAY
        if not self.bulk and tensor.numel() * tensor.element_size() > limit:
            return IdentityRef(tensor, lost=not counted, stamp=_version if counted else None)
        return Tensor(self._copies.add(tensor, bulk=self.bulk))

    def _no_memory(self, tensor: Any) -> Value:
        if self.bulk and not tensor.is_meta:
            raise CannotRestore(
                f"the training state holds a {type(tensor).__name__} on {tensor.device}, laid out "
                f"as {tensor.layout}; only dense tensors on CPU or CUDA can be saved"
            )
        return IdentityRef(tensor, lost=not tensor.is_meta)

    def _array(self, array: Any, depth: int) -> Value:
        if not array.flags.writeable or array.nbytes > _HEAVY_ARRAY:
            return IdentityRef(array, lost=array.flags.writeable)
        if type(array) is not sys.modules["numpy"].ndarray:
            return IdentityRef(array, lost=True)
        try:
            tensor = self._torch.from_numpy(array)
        except (TypeError, ValueError):  # of objects or strings, or with negative strides
            return IdentityRef(array, lost=True)
        return Tensor(self._copies.add(tensor, owner=array))

    def _dict(self, value: Dict[Any, Any], depth: int) -> Value:
        constant = self._kinds.is_constant
        if dict.__contains__(value, "__builtins__") or value is sys.modules:
            return IdentityRef(value)  # a namespace of Python's own
        items = list(dict_base(value).items(value))
        if not all(constant(key) for key, _ in items) or self._too_long([v for _, v in items]):
            return IdentityRef(value, lost=True)
        table = SavedDict(value)
        self._seen[id(value)] = table
        self._fill(table.fields, items, depth)
        return table

    def _sequence(self, value: Any, depth: int) -> Value:
        base = deque if isinstance(value, deque) else tuple if isinstance(value, tuple) else list
        content = list(base.__iter__(value))
        if self._too_long(content):
            return IdentityRef(value, lost=True)
        listing = SavedSequence(value)
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

    def _set(self, value: Any, depth: int) -> Value:
        content = set(set.__iter__(value))
        if self._kinds_in(content) <= {"constant"} and not self._too_long(content):
            return SavedSet(value, content)
        return IdentityRef(value, lost=True)

    def _kinds_in(self, content: Iterable[Any]) -> Set[str]:
        return {self._kinds.of(kind) for kind in set(map(type, content))}

    def _too_long(self, content: Collection[Any]) -> bool:
        """Whether walking over every element at every savepoint costs too much."""
        if len(content) <= _OTHERS_MAX:
            return False
        kinds = self._kinds_in(content)
        tensors = kinds <= {"constant", "tensor"}
        return len(content) > (
            _CONSTANTS_MAX if kinds <= {"constant"} else _TENSORS_MAX if tensors else _OTHERS_MAX
        )

    def _method(self, value: Any, depth: int) -> Value:
        owner = value.__self__
        return SavedMethod(self._value(owner, self._kinds.of(type(owner)), depth))

    def _class(self, value: Any, depth: int) -> Value:
        if not is_job_class(value):
            return IdentityRef(value)
        thing = ObjectRef(value)
        own = {k: v for k, v in list(vars(value).items()) if not k.startswith("__")}
        thing.fields.constants = {k: v for k, v in own.items() if self._kinds.is_constant(v)}
        return thing

    def _function(self, value: Any, depth: int) -> Value:
        if is_library(value.__code__.co_filename) or not (value.__closure__ or value.__dict__):
            return IdentityRef(value)
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> Value:
        thing = ObjectRef(value)
        self._seen[id(value)] = thing
        self._fill(thing.fields, attributes(value).items(), depth)
        cells = closure(value)
        self._fill(thing.cells, ((k, cell.cell_contents) for k, cell in cells.items()), depth)
        return thing


def is_copyable(torch: ModuleType, tensor: Any) -> bool:
    """Whether a tensor, or this rank's part of it, is plain memory: dense, on CPU or CUDA."""
    tensor = local(tensor)
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not torch.nn.parameter.is_lazy(tensor)
        and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    )


def _version(tensor: Any) -> int:
    return int(tensor._version)
