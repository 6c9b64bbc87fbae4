"""The program's side of one savepoint: where it stands, and what its variables hold.

Covered are the variables of all frames of the job's own code that are running, and the globals of
its own modules, with what hangs on them: containers, objects of its own classes, closures,
generators. A library's variables are not looked at.
"""

import sys
from types import FrameType
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

from ..runtime.object_access import attributes, closure, find
from .call_stack import (
    CannotRestore,
    is_library,
    is_module_level,
    is_readable,
    itinerary,
    read_variables,
    require_same_place,
    write_variables,
)
from .captured_values import GONE, Back, Fields, ObjectRef, Value
from .containers import Listing, Table
from .iterators import Stream
from .open_files import Source
from .variable_walk import VariableWalker

Places = List[Tuple[Fields, Mapping[str, Any]]]  # what was there, and what is there now

_MODULES_MAX = 256  # about 10 ms; a job of more is a framework under development


class OwnModules:
    """Names of the job's own modules in `sys.modules`, looked up again when modules come."""

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
        functions: of each frame on the way, None of those without variables of their own.
        globals: of each module, by id of its namespace, which outlives us. names: of these modules.
    """

    def __init__(self, frames: List[FrameType], modules: OwnModules, walk: VariableWalker) -> None:
        self.itinerary = itinerary(frames)
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
        """Raise CannotRestore unless the job stands where it stood."""
        require_same_place(self.itinerary, itinerary(frames), frames)

    def verify_streams(
        self, frames: List[FrameType], modules: OwnModules, others: Places, keep_data: bool
    ) -> None:
        """Raise CannotRestore where an iterator, a file or a queue would go on from elsewhere.

        Args:
            others: places beside the job's variables.
            keep_data: this is only said of what numbers the steps.
        """
        seen: Set[int] = set()
        spaces = {id(namespace): namespace for _, namespace in modules.namespaces()}
        spaces.update((id(frame.f_globals), frame.f_globals) for frame in frames)
        places: Places = [*others]
        places += [(fields, spaces.get(number, {})) for number, fields in self.globals.items()]
        places += [
            (variables, read_variables(frame))
            for frame, variables in zip(frames, self.functions)
            if variables is not None
        ]
        for fields, live in places:
            for name, why in _troubles(fields, live, keep_data, "", seen):
                raise CannotRestore(f"what {name!r} gives cannot be had again: {why}")

    def restore(self, frames: List[FrameType], modules: OwnModules, back: Back) -> None:
        """Give every variable its old value; what cannot be is noted as missed."""
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
                for name in variables.appeared(live, back):
                    back.miss(name)
                write_variables(frame, {k: v for k, v in content.items() if live.get(k) is not v})


def _named(variables: Any) -> List[Tuple[str, Any]]:
    return [item for item in list(variables.items()) if not item[0].startswith("__")]


def _troubles(
    fields: Fields, live: Mapping[Any, Any], keep: bool, path: str, seen: Set[int]
) -> Iterator[Tuple[str, str]]:
    """Yield name and reason of what cannot be gone back to among these places."""
    for key, part in fields.special.items():
        yield from _trouble(part, live.get(key, GONE), keep, f"{path}{key}", seen)


def _trouble(
    part: Value, live: Any, keep: bool, path: str, seen: Set[int]
) -> Iterator[Tuple[str, str]]:
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, (Stream, Source)):
        why = part.trouble(live, keep)
        if why:
            yield path, why
    elif isinstance(part, ObjectRef):
        thing = find(part.reference, part.id, live)
        if thing is not None:
            yield from _troubles(part.fields, attributes(thing), keep, f"{path}.", seen)
            cells = {name: cell.cell_contents for name, cell in closure(thing).items()}
            yield from _troubles(part.cells, cells, keep, f"{path}.", seen)
    elif isinstance(part, Table) and isinstance(live, dict):
        for key, each in part.fields.special.items():
            now = dict.get(live, key, GONE)
            yield from _trouble(each, now, keep, f"{path}[{key!r}]", seen)
    elif isinstance(part, Listing) and type(live) is part.type:
        for i, each in part.special.items():
            now = live[i] if i < len(live) else GONE
            yield from _trouble(each, now, keep, f"{path}[{i}]", seen)
