"""Remembered values, made of the plain data that another process wrote.

Each is made for the place that it was at, and of the objects that are at that place here: the dict
that is there gets the other's items, the object of a class of the job's own its attributes.
"""

import sys
from collections import Counter, OrderedDict, deque
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional

from ..capture.call_stack import CannotRestore
from ..capture.captured_values import (
    GONE,
    Back,
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
from .serialize import Writer
from .store import Savepoint

_OWN_TYPES: Dict[str, type] = {
    kind.__name__: kind for kind in (dict, OrderedDict, Counter, list, tuple, deque, set)
}


class Unrestorable(Value):
    """Something that this process has no counterpart of: it keeps its present value."""

    __slots__ = ()

    def restore(self, live: Any, back: Back, path: str) -> Any:
        back.miss(path)
        return live


class View(Value):
    """A variable that sees a part of a training tensor's memory."""

    __slots__ = ("number", "place")

    def __init__(self, number: int, start: int, shape: Any, stride: Any) -> None:
        self.number = number
        self.place = (start, shape, stride)

    def restore(self, live: Any, back: Back, path: str) -> Any:
        start, shape, stride = self.place
        whole = back.copies.original(self.number).detach()
        return whole.as_strided(shape, stride, whole.storage_offset() + start)


class Tensors:
    """Which tensor here stands for which there; numbers are those of the two savepoints' copies."""

    def __init__(self, torch: ModuleType, saved: Dict[str, Any], live: Savepoint) -> None:
        self._torch = torch
        self._saved = saved["tensors"]
        self._views = saved["views"]
        self._copies = live.copies
        self._numbers: Dict[int, int] = {}

    def pair(self, there: int, here: int, name: str) -> None:
        """Have the content of `there` written into `here`.

        Raises:
            CannotRestore: they are not alike.
        """
        buffer, slot = self._saved[there][0], self._copies.slots[here]
        if (buffer.dtype, buffer.shape) != slot.key[:2]:
            raise CannotRestore(
                f"{name} has another shape or type than in the savepoint: {tuple(slot.key[1])} "
                f"and not {tuple(buffer.shape)}"
            )
        slot.buffer = buffer
        self._numbers[there] = here

    def value(self, there: int, live: Optional[Value]) -> Value:
        """Return the tensor of a variable."""
        if there in self._views:
            base, start, shape, stride = self._views[there]
            return View(self._numbers[base], start, shape, stride)
        return Tensor(self.number(there, live))

    def number(self, there: int, live: Optional[Value]) -> int:
        """Return the number here: that of its pair, else of a tensor that will be a new one."""
        if there not in self._numbers:
            buffer, device, array, requires_grad = self._saved[there]
            slot = self._copies.slots[live.number] if isinstance(live, Tensor) else None
            if slot is not None and slot.bulk and (buffer.dtype, buffer.shape) == slot.key[:2]:
                slot.buffer = buffer
                self._numbers[there] = live.number  # type: ignore[union-attr]
            else:
                self._numbers[there] = self._copies.adopt(
                    buffer, self._torch.device(device), array, requires_grad
                )
        return self._numbers[there]


class Reader:
    """Makes remembered values of plain data, with the objects that are at their places here.

    Attributes:
        parameters: numbers of the copies by the parameters' ids.
    """

    def __init__(self, tensors: Tensors, live: Savepoint) -> None:
        self._tensors = tensors
        self._copies = live.copies
        self._writer = Writer({one.id: i for i, one in enumerate(live.training.optimizers)})
        self._optimizers = [one.id for one in live.training.optimizers]
        self._seen: Dict[int, Value] = {}
        self.parameters = {one.id: one.number for one in live.training.parameters}

    def reference(self, number: int) -> Callable[[], Any]:
        """Return the weak reference to a tensor of this process."""
        return self._copies.slots[number].owner

    def fields(self, saved: List[Any], live: Optional[Fields]) -> Fields:
        """Exchange the contents of named places."""
        fields = Fields()
        known: Dict[Any, Any] = {}
        if live is not None:
            known = {self._writer.key(key): key for key in (*live.constants, *live.special)}
        for name, kept in saved:
            key = known.get(name, self._key(name))
            if key is GONE:
                continue
            constant = GONE if live is None else live.constants.get(key, GONE)
            value = self._constant(kept, constant)
            if value is not GONE:
                fields.constants[key] = value
            else:
                part = None if live is None else live.special.get(key)
                fields.special[key] = self.value(kept, part, str(key))
        return fields

    def _key(self, saved: Any) -> Any:
        if isinstance(saved, tuple) and saved[0] == "optimizer":
            return self._optimizers[saved[1]]
        return self._constant(saved, GONE)

    def _constant(self, saved: Any, live: Any) -> Any:
        """Return immutable data, or GONE for what is none or is not known here."""
        if not isinstance(saved, tuple):
            return saved
        if saved[0] == "scalar":
            numpy = sys.modules.get("numpy")
            return GONE if numpy is None else numpy.dtype(saved[1]).type(saved[2])
        if saved[0] == "constant" and live is not GONE and self._writer.constant(live) == saved:
            return live if saved[2] else GONE
        return GONE

    def value(self, saved: Any, live: Optional[Value], path: str) -> Value:
        """Return what `saved` stands for, at the place of `live`.

        Raises:
            CannotRestore: a generator of random numbers is not here yet.
        """
        kind = saved[0]
        if kind == "tensor":
            return self._tensors.value(saved[1], live)
        if kind == "again":
            return self._seen.get(saved[1], Unrestorable())
        if kind in ("constant", "scalar"):
            return Unrestorable()
        made: Value = getattr(self, f"_{kind}")(saved, live, path)
        self._seen.setdefault(saved[1], made)
        return made

    def _thing(self, saved: Any, live: Optional[Value], path: str) -> Value:
        if not isinstance(live, ObjectRef) or live.type != saved[2]:
            return Unrestorable()
        self._seen[saved[1]] = live
        live.fields = self.fields(saved[3], live.fields)
        live.cells = self.fields(saved[4], live.cells)
        return live

    def _table(self, saved: Any, live: Optional[Value], path: str) -> Value:
        same = isinstance(live, Table) and name_of(live.type) == saved[2]
        if not same and saved[2] not in _OWN_TYPES:
            return Unrestorable()
        table = live if same else Table(_OWN_TYPES[saved[2]]())
        assert isinstance(table, Table)
        self._seen[saved[1]] = table
        fields = self.fields(saved[4], table.fields)
        known = {self._writer.key(key): key for key in (*fields.constants, *fields.special)}
        table.fields = fields
        table.keys = [known[key] for key in saved[3] if key in known]
        return table

    def _listing(self, saved: Any, live: Optional[Value], path: str) -> Value:
        same = isinstance(live, Listing) and name_of(live.type) == saved[2]
        if not same and saved[2] not in _OWN_TYPES:
            return Unrestorable()
        listing = live if same else Listing(_OWN_TYPES[saved[2]]())
        assert isinstance(listing, Listing)
        self._seen[saved[1]] = listing
        before, parts = listing.content, listing.special
        listing.length_max, listing.content, listing.special = saved[3], [], {}
        for i, kept in enumerate(saved[4]):
            constant = before[i] if i < len(before) and i not in parts else GONE
            value = self._constant(kept, constant)
            if value is GONE:
                listing.special[i] = self.value(kept, parts.get(i), f"{path}[{i}]")
            listing.content.append(None if value is GONE else value)
        return listing

    def _bag(self, saved: Any, live: Optional[Value], path: str) -> Value:
        bag = live if isinstance(live, SetValue) and name_of(live.type) == saved[2] else None
        known = {self._writer.constant(one): one for one in bag.content} if bag else {}
        content = {known.get(one, self._constant(one, GONE)) for one in saved[3]}
        if GONE in content or (bag is None and saved[2] != "set"):
            return Unrestorable()
        bag = bag or SetValue(set(), set())
        bag.content = content
        return bag

    def _bound(self, saved: Any, live: Optional[Value], path: str) -> Value:
        if not isinstance(live, Bound):
            return Unrestorable()
        live.owner = self.value(saved[2], live.owner, path)
        return live

    def _chance(self, saved: Any, live: Optional[Value], path: str) -> Value:
        if not isinstance(live, RngState) or live.type != saved[2]:
            raise CannotRestore(f"{path} is a {saved[2]} that this process does not have yet")
        live.state = chance_state(saved[3])
        return live

    def _other(self, saved: Any, live: Optional[Value], path: str) -> Value:
        if not isinstance(live, Other) or live.type != saved[2] or saved[3] or live.lost:
            return Unrestorable()
        stamp = None if live.stamp is None else self._writer.constants(live.stamp[1])
        return live if stamp == saved[4] else Unrestorable()


def constants(saved: Any) -> Any:
    """Return the dicts and tuples that `Writer.constants` was given."""
    if isinstance(saved, tuple) and saved[0] == "dict":
        return {key: constants(value) for key, value in saved[1]}
    if isinstance(saved, tuple) and saved[0] == "tuple":
        return tuple(constants(value) for value in saved[1])
    return saved


def chance_state(saved: Any) -> Any:
    """Return the state that `plain_state` was given."""
    if isinstance(saved, tuple) and saved[0] == "array":
        return sys.modules["numpy"].array(saved[2], dtype=saved[1])
    if isinstance(saved, tuple) and saved[0] == "dict":
        return {key: chance_state(value) for key, value in saved[1]}
    if isinstance(saved, tuple) and saved[0] == "tuple":
        return tuple(chance_state(value) for value in saved[1])
    return saved
