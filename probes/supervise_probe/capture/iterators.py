"""Where iterators stand, and how one of them stands there again.

Rule 1: nothing is advanced, and nothing of the job is called: built-in types and generators only.
Rule 2: no iterator is held. A new one is made of numbers, over the inner ones that still live.
Rule 3: one that went on since and cannot stand there again is told before anything is changed.
What cannot be told of is left as it is, and named behind the rollback.

A generator's place cannot be set back, but the random generators in its variables can: one that
has no number or word of its own in them goes on from there. Loaders are the business of
`savepoints/batch_replay.py`: `taped` iterators give again what they gave.
"""

import ast
import copy
import itertools
import warnings
from types import GeneratorType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from ..runtime.object_access import weak
from .call_stack import is_readable, read_variables
from .captured_values import GONE, Back, Other, RngState
from .open_files import FILES, position
from .type_classes import Kinds

_DEPTH_MAX = 4  # iterators over iterators
_PLAIN = (int, float, str, bytes, bool, type(None))
_INDEXED: Tuple[type, ...] = (type(iter([])), type(iter(())))
_RANGE = type(iter(range(0)))
_WRAPPERS = (enumerate, zip, map, filter)
_NUMBERING = (itertools.count, enumerate)  # what they give is a number, whatever the batch
_BUILT_IN = ("builtins", "itertools", "collections", "_collections")

Again = Callable[[Any, bool], Any]


class Spot(NamedTuple):
    """Where an iterator stands.

    Attributes:
        key: equal as long as it stands there; None where that cannot be told.
        again: from what is at its place now, and whether other batches will do, an iterator that
            stands there, or GONE. None: only the same one can, if it has not moved.
    """

    key: Any
    again: Optional[Again] = None


UNKNOWN = Spot(None)


class Spots:
    """Finds out where iterators stand."""

    def __init__(self, kinds: Kinds, taped: Callable[[Any], bool]) -> None:
        self._kinds = kinds
        self.taped = taped

    def of(self, value: Any, chances: Optional[List[Any]] = None, depth: int = 0) -> Spot:
        """Return where it stands; generators' own random generators are added to `chances`."""
        kind = type(value)
        if depth > _DEPTH_MAX:
            return UNKNOWN
        if self.taped(value):
            return _taped(value)
        try:
            if kind is itertools.count:
                return _count(value)
            if kind is _RANGE:
                return _range(value)
            if kind in _INDEXED:
                return _indexed(value)
            if kind in _WRAPPERS:
                return self._wrapper(value, chances, depth + 1)
            if kind is GeneratorType:
                return self._generator(value, chances)
            if kind.__module__ in _BUILT_IN:
                return Spot((kind.__name__, id(value), self._gauge(value, depth + 1)))
        except Exception:  # a type that says less in this version of Python
            return UNKNOWN
        return UNKNOWN

    def stand(self, spot: Spot, live: Any, keep: bool) -> Any:
        """Return an iterator that stands at `spot`: the one that is there if it has not moved."""
        if live is not GONE and spot.key is not None and self.of(live).key == spot.key:
            return live
        again = GONE if spot.again is None else spot.again(live, keep)
        return live if again is GONE and keep else again

    def _wrapper(self, value: Any, chances: Optional[List[Any]], depth: int) -> Spot:
        kind, reduced = type(value), value.__reduce__()
        number: Any = reduced[1][1] if kind is enumerate else None
        first = 1 if kind in (map, filter) else 0  # behind the function
        inner = [self.of(each, chances, depth) for each in _inner(kind, reduced)]
        state = reduced[2:]

        def again(live: Any, keep: bool) -> Any:
            parts = live.__reduce__() if type(live) is kind else None
            if first and parts is None:
                return GONE  # the function is gone
            now = [GONE] * len(inner) if parts is None else _inner(kind, parts)
            if len(now) != len(inner):
                return GONE
            new = [self.stand(*each, keep) for each in zip(inner, now)]
            if any(each is GONE for each in new):
                return GONE
            arguments = [*parts[1][:first], *new] if parts is not None else new
            made: Any = enumerate(new[0], number) if kind is enumerate else kind(*arguments)
            if state:
                made.__setstate__(*state)
            return made

        return Spot((kind.__name__, number, tuple(each.key for each in inner)), again)

    def _generator(self, value: Any, chances: Optional[List[Any]]) -> Spot:
        frame = value.gi_frame
        if frame is None:
            return Spot(("over", id(value)))
        if value.gi_running or not is_readable(frame):
            return UNKNOWN
        variables, outer = read_variables(frame), frame.f_code.co_freevars
        held: Dict[str, Any] = {}
        for name, each in variables.items():
            if name in outer:
                continue  # a variable of the function around it, which goes back by itself
            if self._kinds.of(type(each)) == "chance" and chances is not None:
                chances.append(each)
            elif type(each) in _PLAIN:
                held[name] = each
            elif type(each) in FILES:
                held[name] = position(each)
            elif type(each).__module__ in _BUILT_IN and hasattr(type(each), "__next__"):
                held[name] = self.of(each, chances, 1).key
        return Spot(("generator", id(value), frame.f_lasti, held))

    def _gauge(self, value: Any, depth: int) -> Any:
        hint = getattr(type(value), "__length_hint__", None)
        if hint is not None:
            return hint(value)
        with warnings.catch_warnings():  # itertools give this up in 3.14, and say so from 3.12 on
            warnings.simplefilter("ignore")
            reduced = value.__reduce__()
        return self._summary(reduced[1:], depth)

    def _summary(self, part: Any, depth: int) -> Any:
        if type(part) in _PLAIN:
            return part
        if type(part) is tuple:
            return tuple(self._summary(each, depth) for each in part)
        if type(part) is list:
            return len(part)
        return self.of(part, None, depth).key if hasattr(type(part), "__next__") else None


class Stream(Other):
    """An iterator.

    Attributes:
        places: of the job's variables that hold it. shared: whether anything else does.
    """

    __slots__ = ("chances", "numbering", "places", "shared", "spot", "spots")

    def __init__(self, value: Any, spots: Spots) -> None:
        found: List[Any] = []
        self.spots = spots
        self.spot = spots.of(value, found)
        self.chances = [RngState(each) for each in found]
        self.numbering = type(value) in _NUMBERING
        self.places, self.shared = 1, False
        super().__init__(value, lost=self.spot.again is None, stream=True)

    def restore(self, live: Any, back: Back, path: str) -> Any:
        if self.chances and id(live) == self.id:
            found: List[Any] = []
            self.spots.of(live, found)
            known = {id(each): each for each in found}
            for chance in self.chances:
                chance.restore(known.get(chance.id), back, path)
        if id(self) not in back.done:
            back.done[id(self)] = self._again(live, back.keep_data)
        again = back.done[id(self)]
        if again is GONE or self.lost:
            back.miss(path)
        return live if again is GONE else again

    def _again(self, live: Any, keep: bool) -> Any:
        same = id(live) == self.id
        if same and (self.lost or self.spots.of(live).key == self.spot.key):
            return live
        if self.lost or (same and self.shared):
            return GONE
        return self.spots.stand(self.spot, live, keep)

    def trouble(self, live: Any, keep: bool) -> str:
        """Why what it gives from here on is not what it gave, "" where it is or nobody can tell."""
        if id(live) != self.id or (keep and not self.numbering):
            return ""  # another one is there, which is made anew when the job goes on from there
        key = self.spots.of(live).key
        if self.spot.key is None or key is None or key == self.spot.key:
            return ""
        if self.lost or self._again(live, keep) is GONE:
            why = "something else holds it too" if self.shared else "it cannot be rewound"
            return f"the {self.type} has gone on since the savepoint, and {why}"
        return ""


def _taped(value: Any) -> Spot:
    reference = weak(value)

    def again(live: Any, keep: bool) -> Any:
        there = reference()
        return GONE if there is None else there

    return Spot(("taped", id(value)), again)


def _count(value: Any) -> Spot:
    text = repr(value)  # told this way in all versions, without a copy
    numbers = ast.literal_eval(text[len("count(") : -1] + ",")
    return Spot(("count", text), lambda live, keep: itertools.count(*numbers))


def _range(value: Any) -> Spot:
    kept = copy.copy(value)
    return Spot(("range", kept.__reduce__()[1:]), lambda live, keep: copy.copy(kept))


def _indexed(value: Any) -> Spot:
    """Over a list or a tuple, which goes back by itself."""
    reduced: Any = value.__reduce__()
    if len(reduced) < 3:
        return Spot(("over", id(value)))
    number, index = id(reduced[1][0]), reduced[2]

    def again(live: Any, keep: bool) -> Any:
        parts: Any = live.__reduce__() if type(live) in _INDEXED else ()
        if len(parts) < 3 or id(parts[1][0]) != number:
            return GONE
        new = iter(parts[1][0])
        new.__setstate__(index)
        return new

    return Spot(("index", number, index), again)


def _inner(kind: type, reduced: Any) -> List[Any]:
    arguments = reduced[1]
    if kind is enumerate:
        return [arguments[0]]
    return list(arguments[1:] if kind in (map, filter) else arguments)
