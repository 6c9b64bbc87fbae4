"""A savepoint of another process of the same script, applied to one taken in this process.

A savepoint is taken here as usual; it refers to this process's objects. Then its contents are
replaced, piece by piece, by those of the other one, and it is restored. What does not fit is
refused before anything is changed; a variable that has no counterpart here is named as lost.

Training state is written into the existing tensors. A variable's tensor is a new one: the existing
one may be a view of the data set.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Tuple

from ..capture.call_stack import CannotRestore
from ..capture.captured_values import (
    ABSENT,
    Fields,
    IdentityRef,
    ObjectRef,
    Restoration,
    RngState,
    SavedMethod,
    Tensor,
    Value,
    type_name,
)
from ..capture.containers import SavedDict, SavedSequence, SavedSet
from ..capture.training_state import LOST, SavedOptimizer
from ..runtime.rng import State
from .serialize import FORMAT, Writer, place_of
from .store import Savepoint

_OWN_TYPES: Dict[str, type] = {
    kind.__name__: kind for kind in (dict, OrderedDict, Counter, list, tuple, deque, set)
}


def apply_savepoint(torch: ModuleType, saved: Dict[str, Any], live: Savepoint) -> List[str]:
    """Replace the contents of `live`, just taken here, by those of the document `saved`.

    Returns:
        Names of modules that are not loaded here.

    Raises:
        CannotRestore: it is of another program or model; `live` cannot be used any more.
    """
    if saved.get("what") != FORMAT:
        raise CannotRestore("the file is not a savepoint of this version")
    _require_same_program(saved["place"], place_of(live))
    tensors = Tensors(torch, saved, live)
    _apply_training(saved, live, tensors)
    reader = Reader(tensors, live)
    for kept, optimizer in zip(saved["optimizers"], live.training.optimizers):
        _apply_optimizer(kept, optimizer, tensors, reader)
    for kept, module in zip(saved["modules"], live.training.modules):
        module.buffers = reader.fields(kept[2], module.buffers)
        module.attributes = Fields()
        module.attributes.constants.update(kept[3])
    names = [name for name, _ in saved["others"]]
    if names != [name for _, name, _ in live.training.others]:
        raise CannotRestore("there are other schedulers or scalers than in the savepoint")
    live.training.others = [
        (reference, name, reader.fields(kept, fields))
        for (_, kept), (reference, name, fields) in zip(saved["others"], live.training.others)
    ]
    program = live.program
    for i, kept in enumerate(saved["functions"]):
        if kept is not None and program.functions[i] is not None:
            program.functions[i] = reader.fields(kept, program.functions[i])
    missing = _apply_globals(saved["globals"], program, reader)
    live.rng = _apply_rng(saved["rng"], live.rng)
    live.extra = unpacked(saved["extra"])
    live.step, live.attempt = saved["step"], saved["attempt"]
    return missing


def _require_same_program(before: List[Any], now: List[Any]) -> None:
    for was, here in reversed(list(zip(before, now))):  # the innermost is the most specific
        if was[1] != here[1]:
            raise CannotRestore(f"the code of {here[0]} differs from that of the savepoint")
        if was[2] != here[2]:
            raise CannotRestore(f"{here[0]} stands at another place than in the savepoint")
    if len(before) != len(now):
        raise CannotRestore("the step is made from another depth of calls than in the savepoint")


def _apply_training(saved: Dict[str, Any], live: Savepoint, tensors: Tensors) -> None:
    """Pair modules and parameters in their order, and set their gradients."""
    modules, parameters = live.training.modules, live.training.parameters
    optimizers = live.training.optimizers
    for what, there, here in (
        ("modules", [kept[0] for kept in saved["modules"]], [m.name for m in modules]),
        ("parameters", [kept[0] for kept in saved["parameters"]], [p.name for p in parameters]),
        (
            "optimizers",
            [kept["type"] for kept in saved["optimizers"]],
            [o.name for o in optimizers],
        ),
    ):
        if there != here:
            raise CannotRestore(
                f"there are other {what} than in the savepoint: {len(here)} and not {len(there)}"
                if len(there) != len(here)
                else f"there are {what} of other kinds or names than in the savepoint"
            )
    for (name, number, requires_grad, gradient), parameter in zip(saved["parameters"], parameters):
        tensors.pair(number, parameter.number, name)
        parameter.requires_grad = requires_grad
        if gradient is None or gradient == LOST:
            parameter.gradient = gradient
        else:
            now = parameter.gradient
            live_one = Tensor(now) if now is not None and now != LOST else None
            parameter.gradient = tensors.number(gradient, live_one)


def _apply_optimizer(
    saved: Dict[str, Any], live: SavedOptimizer, tensors: Tensors, reader: Reader
) -> None:
    here = [[reader.parameters[one] for one in group] for group in live.members]
    there = [[tensors.number(one, None) for one in group] for group in saved["members"]]
    if here != there:
        raise CannotRestore(f"{saved['type']} trains other parameters than in the savepoint")
    live.groups = [
        reader.fields(kept, group) for kept, group in zip(saved["param_groups"], live.groups)
    ]
    known = {
        reader.parameters.get(id(key())) if callable(key) else key: part
        for key, _, part in live.state
    }
    state: List[Tuple[Any, Any, Optional[Value]]] = []
    for (what, place), kept in saved["state"]:
        if what == "parameter":
            number = tensors.number(place, None)
            part = reader.value(kept, known.get(number), f"{saved['type']}.state")
            state.append((reader.reference(number), None, part))
        else:
            state.append((place, None, reader.value(kept, known.get(place), saved["type"])))
    live.state = state
    live.attributes = reader.fields(saved["attributes"], live.attributes)


def _apply_globals(saved: List[Tuple[str, Any]], program: Any, reader: Reader) -> List[str]:
    """Pair modules by name, those of one name in their order; return the missing ones."""
    here: Dict[str, List[int]] = {}
    for number, name in program.names.items():
        here.setdefault(name, []).append(number)
    missing = []
    for name, kept in saved:
        if here.get(name):
            number = here[name].pop(0)
            program.globals[number] = reader.fields(kept, program.globals[number])
        else:
            missing.append(f"module {name}")
    return missing


def _apply_rng(saved: List[Tuple[str, Any]], live: List[State]) -> List[State]:
    """Pair the global generators by name."""
    kept = dict(saved)
    missing = sorted(set(kept) - {state.name for state in live})
    if missing:
        raise CannotRestore(f"the generator of {missing[0]} is not in use here")
    return [
        State(name, set_back, unpacked(kept[name]) if name in kept else content)
        for name, set_back, content in live
    ]


class Unrestorable(Value):
    """A value without a counterpart in this process: the present value stays."""

    __slots__ = ()

    def restore(self, live: Any, back: Restoration, path: str) -> Any:
        back.miss(path)
        return live


class View(Value):
    """A variable that is a view of a training tensor."""

    __slots__ = ("number", "place")

    def __init__(self, number: int, start: int, shape: Any, stride: Any) -> None:
        self.number = number
        self.place = (start, shape, stride)

    def restore(self, live: Any, back: Restoration, path: str) -> Any:
        start, shape, stride = self.place
        whole = back.copies.original(self.number).detach()
        return whole.as_strided(shape, stride, whole.storage_offset() + start)


class Tensors:
    """Pairs tensors of the two savepoints; numbers are those of their copies."""

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
        """Return the number here: that of its pair, else of a new tensor."""
        if there not in self._numbers:
            buffer, device, array, requires_grad = self._saved[there]
            slot = self._copies.slots[live.number] if isinstance(live, Tensor) else None
            if slot is not None and slot.bulk and (buffer.dtype, buffer.shape) == slot.key[:2]:
                slot.buffer = buffer
                self._numbers[there] = live.number  # type: ignore[union-attr]
            else:
                self._numbers[there] = self._copies.add_host_tensor(
                    buffer, self._torch.device(device), array, requires_grad
                )
        return self._numbers[there]


class Reader:
    """Makes saved values of plain data, with the objects at their places here.

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
        """Return the named values `saved`, at the places of `live`."""
        fields = Fields()
        known: Dict[Any, Any] = {}
        if live is not None:
            known = {self._writer.key(key): key for key in (*live.constants, *live.special)}
        for name, kept in saved:
            key = known.get(name, self._key(name))
            if key is ABSENT:
                continue
            constant = ABSENT if live is None else live.constants.get(key, ABSENT)
            value = self._constant(kept, constant)
            if value is not ABSENT:
                fields.constants[key] = value
            else:
                part = None if live is None else live.special.get(key)
                fields.special[key] = self.value(kept, part, str(key))
        return fields

    def _key(self, saved: Any) -> Any:
        if isinstance(saved, tuple) and saved[0] == "optimizer":
            return self._optimizers[saved[1]]
        return self._constant(saved, ABSENT)

    def _constant(self, saved: Any, live: Any) -> Any:
        """Return immutable data, or ABSENT for other values and unknown constants."""
        if not isinstance(saved, tuple):
            return saved
        if saved[0] == "scalar":
            numpy = sys.modules.get("numpy")
            return ABSENT if numpy is None else numpy.dtype(saved[1]).type(saved[2])
        if saved[0] == "constant" and live is not ABSENT and self._writer.constant(live) == saved:
            return live if saved[2] else ABSENT
        return ABSENT

    def value(self, saved: Any, live: Optional[Value], path: str) -> Value:
        """Return the saved value of `saved`, at the place of `live`.

        Raises:
            CannotRestore: a random generator does not exist here.
        """
        kind = saved[0]
        if kind == "tensor":
            return self._tensors.value(saved[1], live)
        if kind == "repeated":
            return self._seen.get(saved[1], Unrestorable())
        if kind in ("constant", "scalar"):
            return Unrestorable()
        made: Value = getattr(self, f"_{kind}")(saved, live, path)
        self._seen.setdefault(saved[1], made)
        return made

    def _object(self, saved: Any, live: Optional[Value], path: str) -> Value:
        if not isinstance(live, ObjectRef) or live.type != saved[2]:
            return Unrestorable()
        self._seen[saved[1]] = live
        live.fields = self.fields(saved[3], live.fields)
        live.cells = self.fields(saved[4], live.cells)
        return live

    def _dict(self, saved: Any, live: Optional[Value], path: str) -> Value:
        same = isinstance(live, SavedDict) and type_name(live.type) == saved[2]
        if not same and saved[2] not in _OWN_TYPES:
            return Unrestorable()
        table = live if same else SavedDict(_OWN_TYPES[saved[2]]())
        assert isinstance(table, SavedDict)
        self._seen[saved[1]] = table
        fields = self.fields(saved[4], table.fields)
        known = {self._writer.key(key): key for key in (*fields.constants, *fields.special)}
        table.fields = fields
        table.keys = [known[key] for key in saved[3] if key in known]
        return table

    def _sequence(self, saved: Any, live: Optional[Value], path: str) -> Value:
        same = isinstance(live, SavedSequence) and type_name(live.type) == saved[2]
        if not same and saved[2] not in _OWN_TYPES:
            return Unrestorable()
        listing = live if same else SavedSequence(_OWN_TYPES[saved[2]]())
        assert isinstance(listing, SavedSequence)
        self._seen[saved[1]] = listing
        before, parts = listing.content, listing.special
        listing.length_max, listing.content, listing.special = saved[3], [], {}
        for i, kept in enumerate(saved[4]):
            constant = before[i] if i < len(before) and i not in parts else ABSENT
            value = self._constant(kept, constant)
            if value is ABSENT:
                listing.special[i] = self.value(kept, parts.get(i), f"{path}[{i}]")
            listing.content.append(None if value is ABSENT else value)
        return listing

    def _set(self, saved: Any, live: Optional[Value], path: str) -> Value:
        saved_set = (
            live if isinstance(live, SavedSet) and type_name(live.type) == saved[2] else None
        )
        known = {self._writer.constant(one): one for one in saved_set.content} if saved_set else {}
        content = {known.get(one, self._constant(one, ABSENT)) for one in saved[3]}
        if ABSENT in content or (saved_set is None and saved[2] != "set"):
            return Unrestorable()
        saved_set = saved_set or SavedSet(set(), set())
        saved_set.content = content
        return saved_set

    def _method(self, saved: Any, live: Optional[Value], path: str) -> Value:
        if not isinstance(live, SavedMethod):
            return Unrestorable()
        live.owner = self.value(saved[2], live.owner, path)
        return live

    def _rng(self, saved: Any, live: Optional[Value], path: str) -> Value:
        if not isinstance(live, RngState) or live.type != saved[2]:
            raise CannotRestore(f"{path} is a {saved[2]} that this process does not have")
        live.state = unpacked(saved[3])
        return live

    def _other(self, saved: Any, live: Optional[Value], path: str) -> Value:
        if not isinstance(live, IdentityRef) or live.type != saved[2] or saved[3] or live.lost:
            return Unrestorable()
        stamp = None if live.stamp is None else self._writer.constants(live.stamp[1])
        return live if stamp == saved[4] else Unrestorable()


def unpacked(saved: Any) -> Any:
    """Return the dicts, tuples and arrays that `Writer.constants` or `plain_state` was given."""
    if isinstance(saved, tuple) and saved[0] == "array":
        return sys.modules["numpy"].array(saved[2], dtype=saved[1])
    if isinstance(saved, tuple) and saved[0] == "dict":
        return {key: unpacked(value) for key, value in saved[1]}
    if isinstance(saved, tuple) and saved[0] == "tuple":
        return tuple(unpacked(value) for value in saved[1])
    return saved
