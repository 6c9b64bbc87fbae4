"""Positions of iterators, and new iterators at the same position.

Rule 1: nothing is advanced, and no code of the job is called: built-in types and generators only.
Rule 2: no iterator is held. A new one is built from numbers, over the inner ones that still exist.
Rule 3: one that has moved and cannot be rebuilt is refused before anything is changed. Where the
position is not known, the iterator keeps its position and is named after the rollback.

A generator cannot be rewound, but the random generators in its variables can: one whose variables
hold no number or text of its own needs nothing else. Iterators of a DataLoader are the business of
`savepoints/batch_replay.py`.
"""

import ast
import copy
import itertools
import warnings
from types import GeneratorType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from ..runtime.object_access import weak
from .call_stack import is_readable, read_variables
from .captured_values import ABSENT, IdentityRef, Restoration, RngState
from .open_files import FILES, file_position
from .type_classes import TypeClasses

_DEPTH_MAX = 4  # iterators over iterators
_PLAIN = (int, float, str, bytes, bool, type(None))
_INDEXED: Tuple[type, ...] = (type(iter([])), type(iter(())))
_RANGE = type(iter(range(0)))
_WRAPPERS = (enumerate, zip, map, filter)
_COUNTERS = (itertools.count, enumerate)  # they yield a number, whatever the batch
_BUILT_IN = ("builtins", "itertools", "collections", "_collections")

Rebuild = Callable[[Any, bool], Any]


class IteratorPosition(NamedTuple):
    """Where an iterator stands.

    Attributes:
        key: equal as long as it stands there; None where that is not known.
        rebuild: from the present iterator, and whether other data is acceptable, an iterator that
            stands there, or ABSENT. None: it cannot be rebuilt.
    """

    key: Any
    rebuild: Optional[Rebuild] = None


UNKNOWN = IteratorPosition(None)


class IteratorPositions:
    """Finds out where iterators stand.

    Args:
        replayed: whether the batches of an iterator are recorded.
    """

    def __init__(self, kinds: TypeClasses, replayed: Callable[[Any], bool]) -> None:
        self._kinds = kinds
        self._replayed = replayed

    def of(
        self, value: Any, generators: Optional[List[Any]] = None, depth: int = 0
    ) -> IteratorPosition:
        """Return the position; the RNGs of Python generators are appended to `generators`."""
        kind = type(value)
        if depth > _DEPTH_MAX:
            return UNKNOWN
        if self._replayed(value):
            return _replayed(value)
        try:
            if kind is itertools.count:
                return _count(value)
            if kind is _RANGE:
                return _range(value)
            if kind in _INDEXED:
                return _indexed(value)
            if kind in _WRAPPERS:
                return self._wrapper(value, generators, depth + 1)
            if kind is GeneratorType:
                return self._generator(value, generators)
            if kind.__module__ in _BUILT_IN:
                state = self._state(value, depth + 1)
                return IteratorPosition((kind.__name__, id(value), state))
        except Exception:  # a type that tells less in this version of Python
            return UNKNOWN
        return UNKNOWN

    def iterator_at(self, saved: IteratorPosition, live: Any, keep: bool) -> Any:
        """Return an iterator that stands at `saved`: `live` if it has not moved."""
        if live is not ABSENT and saved.key is not None and self.of(live).key == saved.key:
            return live
        rebuilt = ABSENT if saved.rebuild is None else saved.rebuild(live, keep)
        return live if rebuilt is ABSENT and keep else rebuilt

    def _wrapper(self, value: Any, generators: Optional[List[Any]], depth: int) -> IteratorPosition:
        kind, reduced = type(value), value.__reduce__()
        number: Any = reduced[1][1] if kind is enumerate else None
        first = 1 if kind in (map, filter) else 0  # after the function
        inner = [self.of(each, generators, depth) for each in _inner(kind, reduced)]
        state = reduced[2:]

        def rebuild(live: Any, keep: bool) -> Any:
            parts = live.__reduce__() if type(live) is kind else None
            if first and parts is None:
                return ABSENT  # the function no longer exists
            now = [ABSENT] * len(inner) if parts is None else _inner(kind, parts)
            if len(now) != len(inner):
                return ABSENT
            new = [self.iterator_at(*each, keep) for each in zip(inner, now)]
            if any(each is ABSENT for each in new):
                return ABSENT
            arguments = [*parts[1][:first], *new] if parts is not None else new
            made: Any = enumerate(new[0], number) if kind is enumerate else kind(*arguments)
            if state:
                made.__setstate__(*state)
            return made

        return IteratorPosition((kind.__name__, number, tuple(each.key for each in inner)), rebuild)

    def _generator(self, value: Any, generators: Optional[List[Any]]) -> IteratorPosition:
        frame = value.gi_frame
        if frame is None:
            return IteratorPosition(("over", id(value)))
        if value.gi_running or not is_readable(frame):
            return UNKNOWN
        variables, outer = read_variables(frame), frame.f_code.co_freevars
        held: Dict[str, Any] = {}
        for name, each in variables.items():
            if name in outer:
                continue  # a variable of the enclosing function, restored with that one
            if self._kinds.of(type(each)) == "rng" and generators is not None:
                generators.append(each)
            elif type(each) in _PLAIN:
                held[name] = each
            elif type(each) in FILES:
                held[name] = file_position(each)
            elif type(each).__module__ in _BUILT_IN and hasattr(type(each), "__next__"):
                held[name] = self.of(each, generators, 1).key
        return IteratorPosition(("generator", id(value), frame.f_lasti, held))

    def _state(self, value: Any, depth: int) -> Any:
        hint = getattr(type(value), "__length_hint__", None)
        if hint is not None:
            return hint(value)
        with warnings.catch_warnings():  # itertools drops this in 3.14, and warns from 3.12 on
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


class SavedIterator(IdentityRef):
    """An iterator.

    Attributes:
        places: of the job's variables that hold it. shared: whether anything else does.
    """

    __slots__ = ("_generators", "_is_counter", "_positions", "_saved", "places", "shared")

    def __init__(self, value: Any, positions: IteratorPositions) -> None:
        found: List[Any] = []
        self._positions = positions
        self._saved = positions.of(value, found)
        self._generators = [RngState(each) for each in found]
        self._is_counter = type(value) in _COUNTERS
        self.places, self.shared = 1, False
        super().__init__(value, lost=self._saved.rebuild is None, iterator=True)

    def restore(self, live: Any, back: Restoration, path: str) -> Any:
        if self._generators and id(live) == self.id:
            found: List[Any] = []
            self._positions.of(live, found)
            known = {id(each): each for each in found}
            for generator in self._generators:
                generator.restore(known.get(generator.id), back, path)
        if id(self) not in back.done:
            back.done[id(self)] = self._rebuilt(live, back.keep_data)
        rebuilt = back.done[id(self)]
        if rebuilt is ABSENT or self.lost:
            back.miss(path)
        return live if rebuilt is ABSENT else rebuilt

    def _rebuilt(self, live: Any, keep: bool) -> Any:
        same = id(live) == self.id
        if same and (self.lost or self._positions.of(live).key == self._saved.key):
            return live
        if self.lost or (same and self.shared):
            return ABSENT
        return self._positions.iterator_at(self._saved, live, keep)

    def obstacle(self, live: Any, keep: bool) -> str:
        """Why it cannot be restored, "" where it can, or where that is not known."""
        if id(live) != self.id or (keep and not self._is_counter):
            return ""  # the job made another one, and makes a new one when it repeats the steps
        key = self._positions.of(live).key
        if self._saved.key is None or key is None or key == self._saved.key:
            return ""
        if self.lost or self._rebuilt(live, keep) is ABSENT:
            why = "something else holds it too" if self.shared else "it cannot be rewound"
            return f"the {self.type} has moved since the savepoint, and {why}"
        return ""


def _replayed(value: Any) -> IteratorPosition:
    reference = weak(value)

    def rebuild(live: Any, keep: bool) -> Any:
        existing = reference()
        return ABSENT if existing is None else existing

    return IteratorPosition(("replayed", id(value)), rebuild)


def _count(value: Any) -> IteratorPosition:
    text = repr(value)  # the same in all versions, without a copy
    numbers = ast.literal_eval(text[len("count(") : -1] + ",")
    return IteratorPosition(("count", text), lambda live, keep: itertools.count(*numbers))


def _range(value: Any) -> IteratorPosition:
    kept = copy.copy(value)
    key = ("range", kept.__reduce__()[1:])
    return IteratorPosition(key, lambda live, keep: copy.copy(kept))


def _indexed(value: Any) -> IteratorPosition:
    """Over a list or a tuple, which is restored by itself."""
    reduced: Any = value.__reduce__()
    if len(reduced) < 3:
        return IteratorPosition(("over", id(value)))
    number, index = id(reduced[1][0]), reduced[2]

    def rebuild(live: Any, keep: bool) -> Any:
        parts: Any = live.__reduce__() if type(live) in _INDEXED else ()
        if len(parts) < 3 or id(parts[1][0]) != number:
            return ABSENT
        new = iter(parts[1][0])
        new.__setstate__(index)
        return new

    return IteratorPosition(("index", number, index), rebuild)


def _inner(kind: type, reduced: Any) -> List[Any]:
    arguments = reduced[1]
    if kind is enumerate:
        return [arguments[0]]
    return list(arguments[1:] if kind in (map, filter) else arguments)
