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
import os
import sys
from types import CodeType, FrameType
from typing import Any, Callable, List, NamedTuple, Optional, Set, Tuple

from ..capture.call_stack import is_module_level, is_readable, read_variables
from ..errors import Refused
from ..runtime import files
from .variable_lookup import Scope

_LOOPS = (ast.For, ast.While, ast.AsyncFor)

Path = Tuple[str, ...]  # a variable, and attributes or keys from there
Stack = List[Tuple[CodeType, int]]  # code and line of the running functions, outermost first


class SaveSite(NamedTuple):
    """The statement before which the job can be saved."""

    code: CodeType
    lines: range  # of its head: what is executed first
    scope: Scope  # what holds the variables that the statement sees
    assigned: Set[Path]  # what it assigns before it reads it, and so is stale before it

    def assigns(self, path: Path, container: bool) -> bool:
        """Whether the statement assigns this path, or changes the container there."""
        return any(
            path[: len(each)] == each or (container and each[: len(path)] == path)
            for each in self.assigned
        )


def code_stack(frames: List[FrameType]) -> Stack:
    """Return code and line of the frames."""
    return [(frame.f_code, frame.f_lineno) for frame in frames]


def find_save_site(saved: Stack, frames: List[FrameType]) -> Tuple[FrameType, SaveSite]:
    """Find the place, from the stack when the job saved, and its frames right after a step.

    Returns:
        The frame with the loop, and the place in it.

    Raises:
        Refused: there is none that each iteration passes.
    """
    stepped, same = code_stack(frames), 0
    for (there, _), (here, _) in zip(saved, stepped):
        if there is not here:
            break
        same += 1
    if not same:
        raise Refused("the job saves its checkpoints in another thread or program than it trains")
    code, save_line = saved[same - 1]
    step_line = stepped[same - 1][1]
    for inner, line in stepped[same:]:
        if _innermost_loop(_body(inner), line) is not None:
            raise Refused("the job saves when its inner loop is over, as after an epoch, only")
    loop = _innermost_loop(_body(code), step_line)
    if loop is None or not _holds(loop, save_line):
        raise Refused("the job saves outside of the loop that steps, as after an epoch, only")
    statement = _separate_statement(loop.body, save_line, step_line)
    if statement is None:
        raise Refused("the job saves and steps in one statement, which cannot be separated")
    frame = frames[same - 1]
    scope: Scope = str(frame.f_globals.get("__name__")) if is_module_level(frame) else code
    return frame, SaveSite(code, _head(statement), scope, _assigned_paths(statement))


def call_at(
    frame: FrameType,
    place: SaveSite,
    arrived: Callable[[], None],
    left: Callable[[], None],
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
    before = frame.f_trace
    waiting, process = True, os.getpid()

    def in_loop(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal waiting
        reached = event == "line" and frame.f_lineno in place.lines
        if waiting and (reached or event == "return" or over()):
            waiting = False
            frame.f_trace = before
            arrived() if reached else left()
            if event == "return":
                sys.settrace(None)
        return in_loop if waiting else before

    def at_calls(called: FrameType, event: str, argument: Any) -> None:
        # Tracing leaves a copy of the variables in the frame, which would keep them alive. It can
        # be emptied once another frame is traced.
        if not waiting or os.getpid() != process:  # in a loader's worker, forked meanwhile
            sys.settrace(None)
            read_variables(frame)

    sys.settrace(at_calls)
    frame.f_trace = in_loop


def _body(code: CodeType) -> List[ast.stmt]:
    """Return the statements of a function, or of a module, from its source."""
    try:
        text = files.read(code.co_filename, foreign=True).decode("utf-8")
        tree, compiled = ast.parse(text), compile(text, code.co_filename, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise Refused(f"the source of {code.co_name} cannot be read: {error}") from error
    if not _is_in(compiled, code):
        raise Refused(f"the source of {code.co_name} was changed since the job started")
    if code.co_name == "<module>":
        return tree.body
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if code.co_firstlineno in (first, node.lineno):
                return node.body
    raise Refused(f"{code.co_name} is no longer in its source")


def _is_in(compiled: CodeType, code: CodeType) -> bool:
    """Whether the present source compiles to the code that runs."""
    if (compiled.co_name, compiled.co_firstlineno) == (code.co_name, code.co_firstlineno):
        lines = (list(dis.findlinestarts(each)) for each in (compiled, code))
        return compiled.co_code == code.co_code and next(lines) == next(lines)
    inner = (each for each in compiled.co_consts if isinstance(each, CodeType))
    return any(_is_in(each, code) for each in inner)


def _holds(node: Any, line: int) -> bool:
    return bool(node.lineno <= line <= (node.end_lineno or node.lineno))


def _innermost_loop(body: List[ast.stmt], line: int) -> Any:
    found = None
    for statement in body:
        for node in ast.walk(statement):
            if not isinstance(node, _LOOPS) or not _holds(node, line):
                continue
            if found is None or node.lineno >= found.lineno:
                found = node
    return found


def _separate_statement(body: List[ast.stmt], save_line: int, step_line: int) -> Optional[ast.stmt]:
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


def _assigned_paths(statement: ast.stmt) -> Set[Path]:
    assigned: Set[Path] = set()
    read: Set[Path] = set()
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
        before = _path(node.value)
        if isinstance(node, ast.Attribute):
            return (*before, node.attr) if before else ()
        key = node.slice
        constant = key.value if isinstance(key, ast.Constant) else None
        return (*before, constant) if before and isinstance(constant, str) else before
    return ()


def _in_order(node: ast.AST) -> List[ast.AST]:
    """Return all nodes in execution order: the value of an assignment before its target."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        children = [*([node.value] if node.value else []), *targets]
    else:
        children = list(ast.iter_child_nodes(node))
    return [node, *(found for child in children for found in _in_order(child))]
