"""The program's part of one savepoint: where it stands, and what its variables hold.

Covers the variables of all running frames of the job's own code and the globals of its own modules,
with what they refer to: containers, objects of its own classes, closures, generators. A library's
variables are not covered.
"""

import sys
from types import FrameType
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

from ..runtime.object_access import attributes, closure, find
from .call_stack import (
    CannotRestore,
    frame_locations,
    is_library,
    is_module_level,
    is_readable,
    read_variables,
    require_same_location,
    write_variables,
)
from .captured_values import ABSENT, Fields, ObjectRef, Restoration, Value
from .containers import SavedDict, SavedSequence
from .iterators import SavedIterator
from .open_files import SavedSource
from .variable_walk import VariableWalker

SavedAndLive = List[Tuple[Fields, Mapping[str, Any]]]

_MODULES_MAX = 256  # about 10 ms


class OwnModules:
    """The job's own modules in `sys.modules`, looked up again when modules are added."""

    def __init__(self) -> None:
        self.left_out = 0  # modules over the limit
        self._count = 0
        self._names: List[str] = []
        self._judged: Dict[str, bool] = {}

    def namespaces(self) -> List[Tuple[str, Dict[str, Any]]]:
        """Name and globals of each."""
        if self._count != len(sys.modules):
            self._count = len(sys.modules)
            names = [name for name in list(sys.modules) if self._is_own(name)]
            self._names, self.left_out = names[:_MODULES_MAX], len(names[_MODULES_MAX:])
        modules = ((name, sys.modules.get(name)) for name in self._names)
        return [(name, vars(module)) for name, module in modules if module is not None]

    def _is_own(self, name: str) -> bool:
        known = self._judged.get(name)
        if known is None:
            file = getattr(sys.modules[name], "__file__", None)
            known = isinstance(file, str) and not is_library(file)
            self._judged[name] = known
        return known


class ProgramState:
    """Where the job stood, and its variables.

    Attributes:
        functions: variables of each frame, None for frames without variables of their own.
        globals: of each module, by id of its namespace. names: of these modules.
    """

    def __init__(self, frames: List[FrameType], modules: OwnModules, walk: VariableWalker) -> None:
        self.frame_locations = frame_locations(frames)
        self.functions: List[Optional[Fields]] = [None] * len(frames)
        self.globals: Dict[int, Fields] = {}
        self.names: Dict[int, str] = {}
        for i, frame in enumerate(frames):
            if is_library(frame.f_code.co_filename):
                continue
            self._add_globals(frame.f_globals, walk)
            if not is_module_level(frame) and is_readable(frame):
                self.functions[i] = walk.fields(_named(read_variables(frame)))
        for _, namespace in modules.namespaces():
            self._add_globals(namespace, walk)

    def _add_globals(self, namespace: Dict[str, Any], walk: VariableWalker) -> None:
        if id(namespace) not in self.globals:
            self.names[id(namespace)] = str(namespace.get("__name__"))
            self.globals[id(namespace)] = walk.fields(_named(namespace))

    def verify(self, frames: List[FrameType]) -> None:
        """Raise CannotRestore unless the job stands at the saved place."""
        require_same_location(self.frame_locations, frame_locations(frames), frames)

    def verify_iterators(
        self, frames: List[FrameType], modules: OwnModules, others: SavedAndLive, keep_data: bool
    ) -> None:
        """Raise CannotRestore where an iterator, a file or a queue has moved and cannot be rewound.

        Args:
            others: fields beside the job's variables.
            keep_data: check counters only; other data is acceptable.
        """
        seen: Set[int] = set()
        spaces = {id(namespace): namespace for _, namespace in modules.namespaces()}
        spaces.update((id(frame.f_globals), frame.f_globals) for frame in frames)
        places: SavedAndLive = [*others]
        places += [(fields, spaces.get(number, {})) for number, fields in self.globals.items()]
        places += [
            (variables, read_variables(frame))
            for frame, variables in zip(frames, self.functions)
            if variables is not None
        ]
        for fields, live in places:
            for name, why in _obstacles(fields, live, keep_data, "", seen):
                raise CannotRestore(f"{name!r} cannot be restored: {why}")

    def restore(self, frames: List[FrameType], modules: OwnModules, back: Restoration) -> None:
        """Restore every variable; those that cannot be restored are named as missed."""
        if modules.left_out:
            back.miss(f"globals of {modules.left_out} modules")
        spaces = {id(namespace): namespace for _, namespace in modules.namespaces()}
        spaces.update((id(frame.f_globals), frame.f_globals) for frame in frames)
        for number, fields in self.globals.items():
            if number in spaces:
                fields.restore(spaces[number], back)
        for frame, variables in zip(frames, self.functions):
            if variables is not None:
                live = read_variables(frame)
                content = variables.content(live, back, str)
                for name in variables.added(live, back):
                    back.miss(name)
                write_variables(frame, {k: v for k, v in content.items() if live.get(k) is not v})


def _named(variables: Any) -> List[Tuple[str, Any]]:
    return [item for item in list(variables.items()) if not item[0].startswith("__")]


def _obstacles(
    fields: Fields, live: Mapping[Any, Any], keep: bool, path: str, seen: Set[int]
) -> Iterator[Tuple[str, str]]:
    """Yield name and reason of each value that cannot be restored."""
    for key, part in fields.special.items():
        yield from _obstacle(part, live.get(key, ABSENT), keep, f"{path}{key}", seen)


def _obstacle(
    part: Value, live: Any, keep: bool, path: str, seen: Set[int]
) -> Iterator[Tuple[str, str]]:
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, (SavedIterator, SavedSource)):
        why = part.obstacle(live, keep)
        if why:
            yield path, why
    elif isinstance(part, ObjectRef):
        owner = find(part.reference, part.id, live)
        if owner is not None:
            yield from _obstacles(part.fields, attributes(owner), keep, f"{path}.", seen)
            cells = {name: cell.cell_contents for name, cell in closure(owner).items()}
            yield from _obstacles(part.cells, cells, keep, f"{path}.", seen)
    elif isinstance(part, SavedDict) and isinstance(live, dict):
        for key, each in part.fields.special.items():
            now = dict.get(live, key, ABSENT)
            yield from _obstacle(each, now, keep, f"{path}[{key!r}]", seen)
    elif isinstance(part, SavedSequence) and type(live) is part.type:
        for i, each in part.special.items():
            now = live[i] if i < len(live) else ABSENT
            yield from _obstacle(each, now, keep, f"{path}[{i}]", seen)
