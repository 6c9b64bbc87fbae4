"""What builds one entry of a checkpoint anew: from an object, a variable, or the count of steps.

Each function returns a `Build`, and keeps names and weak references only.
"""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Tuple

from ..errors import Refused
from .variable_lookup import MISSING, Name, VariableScope

_SHORT = 60  # characters of an entry's path in a sentence

Stale = Callable[[Name, bool], bool]  # (name, whether it is a container): not to be believed


class Now(NamedTuple):
    """What a layout is filled in from."""

    scene: VariableScope
    stale: Stale
    steps: int


Build = Callable[[Now], Any]


def calling(path: str, reference: Any) -> Build:
    """The state dict of a weakly referenced object."""

    def build(now: Now) -> Any:
        thing = reference()
        if thing is None:
            raise Refused(f"what the {_short(path)} entry was saved from no longer exists")
        return thing.state_dict()

    return build


def member(path: str, reference: Any, table: str, name: str) -> Build:
    """One parameter or buffer of a weakly referenced module."""

    def build(now: Now) -> Any:
        found = getattr(reference(), table, {}).get(name)
        if found is None:
            raise Refused(f"what the {_short(path)} entry was saved from no longer exists")
        return found.detach() if table == "_parameters" else found

    return build


def first(holders: List[Name], otherwise: Build) -> Build:
    """The object that a variable holds; built anew where each save makes another."""

    def build(now: Now) -> Any:
        for name in holders:
            found = now.scene.get(name)
            if found is not MISSING and not now.stale(name, True):
                return found
        return otherwise(now)

    return build


def held(path: str, holders: List[Name]) -> Build:
    """An object that a variable holds."""
    return first(holders, unknown(path))


def variable(path: str, names: List[Name], otherwise: Build) -> Build:
    """What the nearest variable of that name holds, if others as near hold the same."""

    def build(now: Now) -> Any:
        found = [(n, now.scene.get(n)) for n in names if not now.stale(n, False)]
        there = [(n, value) for n, value in found if value is not MISSING]
        nearest = _nearness(there[0][0]) if there else None
        near = [value for name, value in there if _nearness(name) == nearest]
        return near[0] if near and near.count(near[0]) == len(near) else otherwise(now)

    return build


def _nearness(name: Name) -> Tuple[Any, int]:
    return name.scope, len(name.way)


def steps(now: Now) -> int:
    """The steps that were made; a `Build` itself."""
    return now.steps


def unknown(path: str, why: str = "") -> Build:
    """Nothing explains it; `why` ends the sentence that says so."""

    def build(now: Now) -> Any:
        raise Refused(f"the {_short(path)} entry of the job's checkpoints is not known{why}")

    return build


def _short(path: str) -> str:
    return repr(path if len(path) <= _SHORT else "..." + path[-_SHORT:])
