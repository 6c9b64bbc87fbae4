"""The layout of the job's own checkpoints, learned from one that it saved, to build another.

Each entry is matched with where it came from: the `state_dict()` of a module, an optimizer, a
schedule or a scaler; one parameter or buffer; a generator's state; the count of steps; a variable
of the job; a literal in its code. An entry that none of these explains makes the layout unusable,
and is named. Nothing is copied: modules and optimizers are referenced weakly, variables by name.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Set, Tuple

from ..torch_state.registry import Registry
from .layout_entries import Build, Now, calling, first, held, member, steps, unknown, variable
from .variable_lookup import PLAIN, VariableScope

DEPTH = 8


class Layout(NamedTuple):
    """How to build one entry, and all that is in it.

    Attributes:
        build: returns it as it would be now; raises Refused.
        alive: whether it holds state that every save computes anew: no variable stands for it.
        kinds: what state dicts are in it: "module", "optimizer".
    """

    build: Build
    alive: bool
    kinds: Set[str]


class Learner:
    """Matches one checkpoint, at the moment when it is saved."""

    def __init__(self, torch: Any, registry: Registry, scene: VariableScope, steps: int) -> None:
        self._torch = torch
        self._registry = registry
        self._scene = scene
        self._steps = steps
        self._chance = [(read, read()) for read in _chance(torch)]
        own = scene.generators(torch.Generator)
        self._own_chance = [(name, generator.get_state()) for name, generator in own]

    def learn(self, saved: Any) -> Layout:
        """Return the layout of what the job saved."""
        return self._entry("", "", saved, 0)

    def _entry(self, path: str, key: str, value: Any, depth: int) -> Layout:
        if isinstance(value, self._torch.Tensor):
            return self._tensor(path, value)
        chance = self._generator(value) if isinstance(value, (dict, list, tuple)) else None
        if chance is not None:
            return Layout(chance, True, set())
        if isinstance(value, dict):
            found = self._state_dict(value)
            if found is not None:
                kind, thing = found
                return Layout(calling(path, weakref.ref(thing)), True, {kind})
        if type(value) in (dict, OrderedDict, list, tuple) and depth < DEPTH:
            return self._container(path, value, depth)
        if type(value) in PLAIN:
            return Layout(self._plain(path, key, value), False, set())
        return Layout(held(path, self._scene.holders(value)), False, set())

    def _container(self, path: str, value: Any, depth: int) -> Layout:
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        kind = type(value)
        keys = [key for key, _ in pairs]
        dot = "." if path else ""
        parts = [self._entry(f"{path}{dot}{k}", str(k), each, depth + 1) for k, each in pairs]

        def build(now: Now) -> Any:
            built = [part.build(now) for part in parts]
            return kind(zip(keys, built)) if issubclass(kind, dict) else kind(built)

        alive = any(part.alive for part in parts)
        kinds: Set[str] = set().union(*(part.kinds for part in parts))
        holders = [] if alive else self._scene.holders(value)
        return Layout(first(holders, build), alive, kinds)

    # ── what a value may be ───────────────────────────────────────────────────────────────────

    def _tensor(self, path: str, tensor: Any) -> Layout:
        chance = self._generator(tensor)
        if chance is not None:
            return Layout(chance, True, set())
        if tensor.numel():
            for module in self._registry.modules:
                for table in ("_parameters", "_buffers"):
                    for name, each in getattr(module, table).items():
                        if each is not None and _same_memory(each, tensor):
                            found = member(path, weakref.ref(module), table, name)
                            return Layout(found, True, {"module"})
        return Layout(held(path, self._scene.holders(tensor)), False, set())

    def _generator(self, value: Any) -> Optional[Build]:
        for read, state in self._chance:
            if same(self._torch, state, value):
                return lambda now: read()
        for name, state in self._own_chance:
            if same(self._torch, state, value):
                return lambda now: now.scene.get(name).get_state()
        return None

    def _state_dict(self, value: Dict[Any, Any]) -> Optional[Tuple[str, Any]]:
        """The object whose state dict this is, and what it is; None unless it is one for sure."""
        registry = self._registry
        if "state" in value and "param_groups" in value:
            kind, several = "optimizer", list(registry.optimizers)
        elif any(isinstance(each, self._torch.Tensor) for each in value.values()):
            kind, several = "module", [m for m in registry.modules if _leads_to(m, value)]
        else:
            kind, several = "other", [*registry.schedulers, *registry.scalers]
        found = [(_shared(thing, value), thing) for thing in several if self._is_of(thing, value)]
        best = max((shared for shared, _ in found), default=-1)
        things = [thing for shared, thing in found if shared == best]
        if len(things) == 1 or (things and kind == "module"):
            return kind, things[0]
        return None

    def _is_of(self, thing: Any, value: Dict[Any, Any]) -> bool:
        return same(self._torch, thing.state_dict(), value)

    def _plain(self, path: str, key: str, value: Any) -> Build:
        """A literal may equal a count by accident, so an int of no name is no literal."""
        names = self._scene.named(key, value)
        counts = type(value) is int and value == self._steps
        literal = any(type(each) is type(value) and each == value for each in self._scene.constants)
        if names:
            return variable(path, names, steps if counts else unknown(path))
        if counts and not literal:
            return steps
        if literal and type(value) is str and not self._scene.has(key):
            return lambda now: value
        why = f": no variable named {key!r} held the same when it was saved"
        if type(value) is int:
            why += f", nor was that the number of steps, {self._steps}"
        return unknown(path, why)


def same(torch: Any, a: Any, b: Any) -> bool:
    """Whether two things hold the same, down to the bits of their tensors."""
    if a is b:
        return True
    if type(a) is not type(b) and not (isinstance(a, dict) and isinstance(b, dict)):
        return False
    if isinstance(a, torch.Tensor):
        return _same_memory(a, b) or (a.device == b.device and bool(torch.equal(a, b)))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(torch, a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(torch, x, y) for x, y in zip(a, b))
    if hasattr(a, "tobytes"):
        return bool(a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


def _same_memory(a: Any, b: Any) -> bool:
    return bool(
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.device == b.device
        and a.layout == b.layout
    )


def containers(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the dicts, lists and tuples of a checkpoint."""
    if isinstance(value, (dict, list, tuple)) and depth < DEPTH:
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from containers(each, depth + 1)


def _chance(torch: Any) -> Iterator[Callable[[], Any]]:
    """Yield what reads the states of the generators that are in use."""
    yield torch.get_rng_state
    if torch.cuda.is_initialized():
        yield torch.cuda.get_rng_state
        yield torch.cuda.get_rng_state_all
    for module, name in (("numpy.random", "get_state"), ("random", "getstate")):
        if module in sys.modules:
            yield getattr(sys.modules[module], name)


def _leads_to(module: Any, value: Dict[Any, Any]) -> bool:
    """Whether the first tensor of a state dict is where its key leads to from this module."""
    for key, tensor in value.items():
        if not isinstance(key, str) or not hasattr(tensor, "data_ptr"):
            continue
        *way, last = key.split(".")
        for name in way:
            module = module._modules.get(name)
            if module is None:
                return False
        found = module._parameters.get(last)
        found = module._buffers.get(last) if found is None else found
        return found is not None and _same_memory(found, tensor)
    return False


def _shared(thing: Any, value: Dict[Any, Any]) -> int:
    """How many objects inside the state dict are the very ones that `thing` would give again."""
    now = thing.state_dict()
    ids = {id(each) for each in containers(now)}
    return sum(id(each) in ids for each in containers(value))
