"""The place in its loop at which the job saves, and a call at that place.

Right after an optimizer step a job cannot be saved: its schedules, its scaler and its counters have
not been updated yet, and the next batch may have been drawn already. It can be saved where it saves
itself. That place is the statement, in the loop that drives the steps, which contains the save:
mostly an `if`, executed in each iteration. A file built before it holds what the job's own would.

The statement is found in the source; a trace function waits for its line for one iteration. Only
code objects of the job are kept.
"""

from __future__ import annotations

import ast
import dis
import itertools
import os
import sys
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional, Union

from ..context import Refused
from ..runtime import files
from ..runtime.call_stack import is_library, is_module_level, is_readable, read_variables

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
    way: tuple[str, ...]


class JobVariables:
    """The job's variables at one moment, innermost first. Not to be kept."""

    def __init__(
        self, frames: list[FrameType], inside: set[int], traced: Optional[FrameType] = None
    ) -> None:
        """
        Args:
            frames: as `call_stack.job_frames` returns them.
            inside: ids of the containers of the checkpoint itself, which are no sources.
            traced: the frame whose line is being traced: Python writes its variables back
                afterwards, so the dict must not be emptied.
        """
        self._spaces: dict[Scope, Mapping[str, Any]] = {}
        self._inside = inside
        self._seen: list[tuple[Name, Any]] = []
        self._by_last: dict[str, list[tuple[Name, Any]]] = {}
        self._by_id: dict[int, list[Name]] = {}
        self._by_content: dict[int, list[Name]] = {}  # by the id of their `vars`
        self.constants: list[Any] = []  # literals in the code that runs
        job_frames = [frame for frame in frames if not is_library(frame.f_code.co_filename)]
        for frame in reversed(job_frames):
            self.constants += frame.f_code.co_consts
            if not is_module_level(frame) and is_readable(frame):
                space = dict(frame.f_locals) if frame is traced else read_variables(frame)
                self._spaces.setdefault(frame.f_code, space)
        for frame in reversed(job_frames):
            self._spaces.setdefault(str(frame.f_globals.get("__name__")), frame.f_globals)

    def variables_with_value(self, key: str, value: Any) -> list[Name]:
        """Return variables, attributes and entries named `key` with this plain value, nearest
        first."""
        kind = type(value)
        self._all()
        several = self._by_last.get(key, ())
        names = [
            name for name, candidate in several if type(candidate) is kind and candidate == value
        ]
        return sorted(names, key=lambda name: len(name.way))

    def holders(self, value: Any) -> list[Name]:
        """Return the variables and attributes that hold this very object, or are it (`vars`)."""
        self._all()
        names = list(self._by_id.get(id(value), ()))
        if type(value) is dict:
            owners = self._by_content.get(id(value), ())
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
        value = MISSING if space is None else space.get(name.variable, MISSING)
        for part in name.way:
            content = _content(value)
            if content is None:
                return MISSING
            value = content if part == "__dict__" else content.get(part, MISSING)
        return value

    def generators(self, kind: type) -> list[tuple[Name, Any]]:
        """Return the job's own generators of this type."""
        return [(name, candidate) for name, candidate in self._all() if type(candidate) is kind]

    def _all(self) -> list[tuple[Name, Any]]:
        if not self._seen:
            self._seen = list(itertools.islice(self._walk(), NAMES_MAX))
            for name, value in self._seen:
                self._by_last.setdefault((name.variable, *name.way)[-1], []).append((name, value))
                self._by_id.setdefault(id(value), []).append(name)
                content = _content(value)
                if content is not None and content is not value:
                    self._by_content.setdefault(id(content), []).append(name)
        return self._seen

    def _walk(self) -> Iterator[tuple[Name, Any]]:
        for scope, space in self._spaces.items():
            for variable, value in list(space.items()):
                if not variable.startswith("__"):
                    for way, item in self._reach(value, ()):
                        yield Name(scope, variable, way), item

    def _reach(self, value: Any, way: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        yield way, value
        if len(way) < DEPTH and id(value) not in self._inside:
            content = _content(value) or {}
            for key, item in list(content.items()) if len(content) <= ENTRIES_MAX else ():
                if isinstance(key, str) and not key.startswith("__"):
                    yield from self._reach(item, (*way, key))


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


_LOOPS = (ast.For, ast.While, ast.AsyncFor)

Path = tuple[str, ...]  # a variable, and attributes or keys from there
Stack = list[tuple[CodeType, int]]  # code and line of the running functions, outermost first


class SaveSite(NamedTuple):
    """The statement before which the job can be saved."""

    code: CodeType
    lines: range  # of its head: what is executed first
    scope: Scope  # what holds the variables that the statement sees
    assigned: set[Path]  # what it assigns before it reads it, and so is stale before it

    def assigns_variable(self, variable: Path, container: bool) -> bool:
        """Whether the statement assigns this path, or changes the container there."""
        return any(
            variable[: len(name)] == name or (container and name[: len(variable)] == variable)
            for name in self.assigned
        )


def code_stack(frames: list[FrameType]) -> Stack:
    """Return code and line of the frames."""
    return [(frame.f_code, frame.f_lineno) for frame in frames]


def find_save_site(stack: Stack, frames: list[FrameType]) -> tuple[FrameType, SaveSite]:
    """Find the place, from the stack when the job saved, and its frames right after a step.

    Returns:
        The frame with the loop, and the place in it.

    Raises:
        Refused: there is none that each iteration passes.
    """
    stepped, common = code_stack(frames), 0
    for (saved_code, _), (here, _) in zip(stack, stepped):
        if saved_code is not here:
            break
        common += 1
    if not common:
        raise Refused("the job saves its checkpoints in another thread or program than it trains")
    code, save_line = stack[common - 1]
    step_line = stepped[common - 1][1]
    for inner, line in stepped[common:]:
        if _innermost_loop(_body(inner), line) is not None:
            raise Refused("the job saves when its inner loop is over, as after an epoch, only")
    loop = _innermost_loop(_body(code), step_line)
    if loop is None or not _holds(loop, save_line):
        raise Refused("the job saves outside of the loop that steps, as after an epoch, only")
    statement = _separate_statement(loop.body, save_line, step_line)
    if statement is None:
        raise Refused("the job saves and steps in one statement, which cannot be separated")
    frame = frames[common - 1]
    scope: Scope = str(frame.f_globals.get("__name__")) if is_module_level(frame) else code
    return frame, SaveSite(code, _head(statement), scope, _assigned_paths(statement))


def call_at(
    frame: FrameType,
    site: SaveSite,
    arrived: Callable[[], None],
    on_exit: Callable[[], None],
    over: Callable[[], bool],
) -> None:
    """Call `arrived` when `frame` reaches `place`; `left` if it ends before, or it is `over`.

    Raises:
        Refused: a debugger or a coverage tool is tracing already.
    """
    if sys.gettrace() is not None:
        raise Refused("a debugger or a coverage tool traces the job")
    if not is_readable(frame):
        raise Refused(f"{frame.f_code.co_name} calls locals(), which a trace would change")
    previous = frame.f_trace
    waiting, process = True, os.getpid()

    def in_loop(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal waiting
        reached = event == "line" and frame.f_lineno in site.lines
        if waiting and (reached or event == "return" or over()):
            waiting = False
            frame.f_trace = previous
            arrived() if reached else on_exit()
            if event == "return":
                sys.settrace(None)
        return in_loop if waiting else previous

    def at_calls(callee: FrameType, event: str, argument: Any) -> None:
        # Tracing leaves a copy of the variables in the frame, which would keep them alive. It can
        # be emptied once another frame is traced.
        if not waiting or os.getpid() != process:  # in a loader's worker, forked meanwhile
            sys.settrace(None)
            read_variables(frame)

    sys.settrace(at_calls)
    frame.f_trace = in_loop


def _body(code: CodeType) -> list[ast.stmt]:
    """Return the statements of a function, or of a module, from its source."""
    try:
        text = files.read_file(code.co_filename, foreign=True).decode("utf-8")
        tree, compiled = ast.parse(text), compile(text, code.co_filename, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise Refused(f"the source of {code.co_name} cannot be read: {error}") from error
    if not _is_in(compiled, code):
        raise Refused(f"the source of {code.co_name} was changed since the job started")
    if code.co_name == "<module>":
        return tree.body
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if code.co_firstlineno in (first, node.lineno):
                return node.body
    raise Refused(f"{code.co_name} is no longer in its source")


def _is_in(compiled: CodeType, code: CodeType) -> bool:
    """Whether the present source compiles to the code that runs."""
    if (compiled.co_name, compiled.co_firstlineno) == (code.co_name, code.co_firstlineno):
        lines = (list(dis.findlinestarts(piece)) for piece in (compiled, code))
        return compiled.co_code == code.co_code and next(lines) == next(lines)
    inner = (constant for constant in compiled.co_consts if isinstance(constant, CodeType))
    return any(_is_in(constant, code) for constant in inner)


def _holds(node: Any, line: int) -> bool:
    return bool(node.lineno <= line <= (node.end_lineno or node.lineno))


def _innermost_loop(body: list[ast.stmt], line: int) -> Any:
    match = None
    for statement in body:
        for node in ast.walk(statement):
            if not isinstance(node, _LOOPS) or not _holds(node, line):
                continue
            if match is None or node.lineno >= match.lineno:
                match = node
    return match


def _separate_statement(body: list[ast.stmt], save_line: int, step_line: int) -> Optional[ast.stmt]:
    """Return the statement with the save, in the innermost block that also holds the step."""
    for statement in body:
        if _holds(statement, save_line):
            if not _holds(statement, step_line):
                return statement
            blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            return next(
                (s for b in blocks if (s := _separate_statement(b, save_line, step_line))), None
            )
    return None


def _head(statement: Any) -> range:
    """Return the lines of what a statement executes first."""
    body = getattr(statement, "body", None)
    if isinstance(statement, ast.Try):  # its own line is not executed in some versions
        return range(statement.lineno, _head(statement.body[0]).stop)
    end = body[0].lineno if body else (statement.end_lineno or statement.lineno) + 1
    return range(statement.lineno, max(end, statement.lineno + 1))


def _assigned_paths(statement: ast.stmt) -> set[Path]:
    assigned: set[Path] = set()
    read: set[Path] = set()
    for node in _in_order(statement):
        path = _path(node)
        if path and isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
            read.add(path)
            if path[-1] == "update":
                assigned.add(path[:-1])
        elif path and path not in read:
            assigned.add(path)
    return assigned


def _path(node: Any) -> Path:
    """Return `("self", "best")` of `self.best` and of `self["best"]`; () of anything else."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        prefix = _path(node.value)
        if isinstance(node, ast.Attribute):
            return (*prefix, node.attr) if prefix else ()
        key = node.slice
        constant = key.value if isinstance(key, ast.Constant) else None
        return (*prefix, constant) if prefix and isinstance(constant, str) else prefix
    return ()


def _in_order(node: ast.AST) -> list[ast.AST]:
    """Return all nodes in execution order: the value of an assignment before its target."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        children = [*([node.value] if node.value else []), *targets]
    else:
        children = list(ast.iter_child_nodes(node))
    return [node, *(descendant for child in children for descendant in _in_order(child))]
