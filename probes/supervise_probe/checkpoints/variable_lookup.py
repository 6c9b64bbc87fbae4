"""The source of a plain value in the job's checkpoint: the variable that holds it.

Searches the job's own running functions and their globals, with attributes of objects and entries
of dicts, two deep. A plain value matches a variable with the entry's name (`{"step": step}`,
`{"lr": args.lr}`), an object the variable that holds this very object.

No frame and no object of the job is kept, only names.
"""

from __future__ import annotations

import itertools
import sys
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

from ..capture.call_stack import is_library, is_module_level, is_readable, read_variables

MISSING = object()
PLAIN = (bool, int, float, str, bytes, type(None))
_WITHOUT = (type, ModuleType, FunctionType, *PLAIN)
DEPTH = 2  # of attributes and entries
ENTRIES_MAX = 256  # of a dict that is searched; settings are not in a vocabulary
NAMES_MAX = 5000  # the nearest first; about 20 ms

Scope = Union[CodeType, str]  # a function, or the name of a module


class Name(NamedTuple):
    """One variable, and the way from it to the value; each part is an attribute or a key."""

    scope: Scope
    variable: str
    way: Tuple[str, ...]


class VariableScope:
    """The job's variables at one moment, innermost first. Not to be kept."""

    def __init__(
        self, frames: List[FrameType], inside: Set[int], traced: Optional[FrameType] = None
    ) -> None:
        """
        Args:
            frames: as `call_stack.job_frames` returns them.
            inside: ids of the containers of the checkpoint itself, which are no sources.
            traced: the frame whose line is being traced: Python writes its variables back
                afterwards, so the dict must not be emptied.
        """
        self._spaces: Dict[Scope, Mapping[str, Any]] = {}
        self._inside = inside
        self._seen: List[Tuple[Name, Any]] = []
        self._by_last: Dict[str, List[Tuple[Name, Any]]] = {}
        self.constants: List[Any] = []  # literals in the code that runs
        own = [frame for frame in frames if not is_library(frame.f_code.co_filename)]
        for frame in reversed(own):
            self.constants += frame.f_code.co_consts
            if not is_module_level(frame) and is_readable(frame):
                space = dict(frame.f_locals) if frame is traced else read_variables(frame)
                self._spaces.setdefault(frame.f_code, space)
        for frame in reversed(own):
            self._spaces.setdefault(str(frame.f_globals.get("__name__")), frame.f_globals)

    def named(self, key: str, value: Any) -> List[Name]:
        """Return variables, attributes and entries named `key` with this plain value, nearest
        first."""
        kind = type(value)
        self._all()
        several = self._by_last.get(key, ())
        names = [name for name, found in several if type(found) is kind and found == value]
        return sorted(names, key=lambda name: len(name.way))

    def holders(self, value: Any) -> List[Name]:
        """Return the variables and attributes that hold this very object, or are it (`vars`)."""
        names = [name for name, found in self._all() if found is value]
        if type(value) is dict:
            owners = [n for n, each in self._all() if each is not value and _content(each) is value]
            names += [Name(n.scope, n.variable, (*n.way, "__dict__")) for n in owners]
        return names

    def has(self, key: str) -> bool:
        """Whether any variable, attribute or entry has this name."""
        self._all()
        return key in self._by_last

    def get(self, name: Name) -> Any:
        """Return the present value, or MISSING."""
        space = self._spaces.get(name.scope)
        if space is None and isinstance(name.scope, str):
            space = vars(sys.modules[name.scope]) if name.scope in sys.modules else None
        found = MISSING if space is None else space.get(name.variable, MISSING)
        for part in name.way:
            content = _content(found)
            if content is None:
                return MISSING
            found = content if part == "__dict__" else content.get(part, MISSING)
        return found

    def generators(self, kind: type) -> List[Tuple[Name, Any]]:
        """Return the job's own generators of this type."""
        return [(name, found) for name, found in self._all() if type(found) is kind]

    def _all(self) -> List[Tuple[Name, Any]]:
        if not self._seen:
            self._seen = list(itertools.islice(self._walk(), NAMES_MAX))
            for name, value in self._seen:
                self._by_last.setdefault((name.variable, *name.way)[-1], []).append((name, value))
        return self._seen

    def _walk(self) -> Iterator[Tuple[Name, Any]]:
        for scope, space in self._spaces.items():
            for variable, value in list(space.items()):
                if not variable.startswith("__"):
                    for way, found in self._reach(value, ()):
                        yield Name(scope, variable, way), found

    def _reach(self, value: Any, way: Tuple[str, ...]) -> Iterator[Tuple[Tuple[str, ...], Any]]:
        yield way, value
        if len(way) < DEPTH and id(value) not in self._inside:
            content = _content(value) or {}
            for key, each in list(content.items()) if len(content) <= ENTRIES_MAX else ():
                if isinstance(key, str) and not key.startswith("__"):
                    yield from self._reach(each, (*way, key))


def _content(value: Any) -> Optional[Mapping[str, Any]]:
    """Return a dict's entries, or an object's own attributes; no code of the job runs."""
    if type(value) is dict:
        return value
    if issubclass(type(value), _WITHOUT):  # `isinstance` would ask `__class__` of a lazy module
        return None
    try:
        content = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return content if type(content) is dict else None
