"""The job's own frames: where the step was called from, and whether a rollback can return there.

Rule 1: a frame is never held; only its code object and a weakly referenced mark outlive a call.
Rule 2: a place that cannot be proven equal is refused with one sentence, never guessed.
Rule 3: reading a frame's variables leaves nothing behind in the frame.

A rollback rewinds what happened between two visits of one program point. The frames that were
entered before and are still running (same mark) have not moved, except the innermost of them: it
drives the loop. Only from there inward must frames be restorable: no `for` (its iterator cannot be
rewound), no half-computed expression, no generator.
"""

import ctypes
import os
import sys
import sysconfig
import threading
import weakref
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from .bytecode import PendingValue, instruction_offset, position

_PROBE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # as in co_filename: not absolute
_STDLIB = tuple({sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib")})
_TYPED_IN = ("<string>", "<stdin>", "<ipython")  # user code that is in no file
_BACKWARD = ("backward", "grad", "_engine_run_backward")
_GENERATOR = 0x20 | 0x80 | 0x100 | 0x200  # CO_GENERATOR, _COROUTINE, _ITERABLE_COROUTINE, _ASYNC_
_OPTIMIZED = 0x1  # CO_OPTIMIZED: the variables of a function, not those of a module or class body
_LIVE_LOCALS = sys.version_info >= (3, 13)  # PEP 667: f_locals writes through
_MARKABLE = sys.version_info >= (3, 10)  # before, a frame with f_trace reports stale line numbers


class CannotRestore(Exception):  # noqa: N818 (a refusal, not an error)
    """A savepoint cannot be taken or restored; the text is one sentence for people."""


class _Mark:
    """Identifies one call of a function. Stored in `f_trace`, which only debuggers use."""

    __slots__ = ("__weakref__",)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        return None


class FrameLocation(NamedTuple):
    """One frame between the module and the optimizer step."""

    code: CodeType
    offset: int  # of the instruction that is being executed
    mark: Optional["weakref.ref[_Mark]"]  # dead once the frame has returned


def is_library(filename: str) -> bool:
    """Whether a code object's file belongs to an installed package or to Python itself."""
    if filename.startswith("<"):
        return not filename.startswith(_TYPED_IN)
    path = filename.replace("\\", "/")
    if "/site-packages/" in path or "/dist-packages/" in path:
        return True
    return filename.startswith(_STDLIB) or filename.startswith(_PROBE)


def job_frames(torch: ModuleType) -> List[FrameType]:
    """Return the running frames without torch's step and the probe, outermost (the module) first.

    Raises:
        CannotRestore: there are none, or the step is made inside backward.
    """
    home = os.path.dirname(str(torch.__file__)) + os.sep
    frame: Optional[FrameType] = sys._getframe(1)
    frames: List[FrameType] = []
    while frame is not None:
        code = frame.f_code
        if code.co_name in _BACKWARD and code.co_filename.startswith(home + "autograd"):
            raise CannotRestore("the step is made inside backward, which cannot be undone")
        inner = not frames and code.co_filename.startswith(home)
        if not inner and not code.co_filename.startswith(_PROBE):
            frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    if not frames:
        raise CannotRestore("no code of the job is running")
    return frames


def frame_locations(frames: List[FrameType]) -> List[FrameLocation]:
    """Mark the frames and return where each of them is."""
    steps = []
    for frame in frames:
        if _MARKABLE and frame.f_trace is None:
            frame.f_trace = _Mark()
        mark = frame.f_trace
        offset = instruction_offset(frame.f_code, frame.f_lasti)
        reference = weakref.ref(mark) if isinstance(mark, _Mark) else None
        steps.append(FrameLocation(frame.f_code, offset, reference))
    return steps


def driving_frame(before: List[FrameLocation], now: List[FrameLocation]) -> int:
    """Return the index of the frame that drives the loop: the innermost that is in both.

    -1 when calls cannot be distinguished (Python 3.9, a debugger): then each frame is checked.
    """
    same = 0
    for old, new in zip(before, now):
        mark = old.mark() if old.mark is not None else None
        if mark is None or new.mark is None or mark is not new.mark():
            break
        same += 1
    return same - 1


def require_same_location(
    before: List[FrameLocation], now: List[FrameLocation], frames: List[FrameType]
) -> None:
    """Raise CannotRestore unless the job stands where `before` was recorded."""
    found = driving_frame(before, now)
    start = max(found, 0)
    for i in range(start, max(len(before), len(now))):
        there, here = before[i : i + 1], now[i : i + 1]
        if [(a.code, a.offset) for a in there] != [(b.code, b.offset) for b in here]:
            place = _where(frames[min(i, len(frames) - 1)])
            raise CannotRestore(
                f"the savepoint was taken at another place of the program than {place}"
            )
    reason = restore_obstacle(frames, start, known=found >= 0)
    if reason is not None:
        raise CannotRestore(reason)


def restore_obstacle(frames: List[FrameType], start: int, known: bool) -> Optional[str]:
    """Return why the frames from index `start` inward can never be restored; None when they can.

    Args:
        known: whether `start` is known to be the frame that drives the loop.
    """
    if threading.current_thread() is not threading.main_thread():
        return (
            f"{_where(frames[-1])} makes the step in the thread "
            f"{threading.current_thread().name!r}; only the main thread can be rolled back"
        )
    for i, frame in enumerate(frames[start:], start):
        library = is_library(frame.f_code.co_filename)
        place = position(frame.f_code, frame.f_lasti)
        if frame.f_code.co_flags & _GENERATOR:
            name = frame.f_code.co_name
            return f"{_where(frame)} makes the step inside the generator or coroutine {name!r}"
        if not place.reachable:
            return f"{_where(frame)} makes the step inside an exception handler"
        if place.for_line is not None and not library:
            file = os.path.basename(frame.f_code.co_filename)
            return (
                f"{file}:{place.for_line} drives the step from a for statement, whose iterator "
                f"cannot be rewound"
            )
        if library and (place.in_loop or (known and i == start)):
            return (
                f"{_where(frame)} belongs to a library, whose loop cannot be rolled back; "
                "relaunch resumes from a checkpoint of its own"
            )
        if known and start == i < len(frames) - 1 and not place.in_loop:
            return f"{_where(frame)} is repeated by a built-in such as map()"
        if library:
            continue
        if place.pending and not _is_constant(frame, place.pending):
            return (
                f"{_where(frame)} makes the step in the middle of an expression, whose first "
                f"half cannot be recomputed"
            )
        if not is_readable(frame):
            return (
                f"{_where(frame)} calls locals(), so its variables cannot be read without "
                f"changing what it sees"
            )
    return None


def is_readable(frame: FrameType) -> bool:
    """Whether the job cannot notice that its variables are read.

    Before Python 3.13 `frame.f_locals` refreshes the very dict that an earlier `locals()` returned.
    """
    code = frame.f_code
    return (
        _LIVE_LOCALS
        or not code.co_flags & _OPTIMIZED
        or not {"locals", "vars"} & set(code.co_names)
    )


def is_module_level(frame: FrameType) -> bool:
    """Whether the frame's variables are the globals of its module."""
    return not frame.f_code.co_flags & _OPTIMIZED and frame.f_locals is frame.f_globals


def read_variables(frame: FrameType) -> Mapping[str, Any]:
    """Return the variables by name; a module's own dict, a copy for a function."""
    variables = frame.f_locals
    if not frame.f_code.co_flags & _OPTIMIZED:
        return variables
    copy = dict(variables)
    if not _LIVE_LOCALS:
        variables.clear()  # the frame keeps this dict, which would keep the job's objects alive
    return copy


def write_variables(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Set variables of a running frame, closure cells included."""
    if not values:
        return
    variables = frame.f_locals
    for name, value in values.items():
        variables[name] = value
    if frame.f_code.co_flags & _OPTIMIZED and not _LIVE_LOCALS:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        variables.clear()


def _is_constant(frame: FrameType, pending: Tuple[PendingValue, ...]) -> bool:
    """Whether the values on the stack are the same at every visit: constants and functions."""
    scope: Dict[str, Any] = {}
    builtins = frame.f_builtins
    for item in pending:
        if item.opname.startswith("LOAD_CONST") or item.opname in ("PUSH_NULL", "LOAD_SMALL_INT"):
            continue
        name = item.method_of or item.name
        if name is None or not item.opname.startswith("LOAD_"):
            return False
        if not scope and is_readable(frame):
            scope = {**builtins, **frame.f_globals, **read_variables(frame)}
        value = scope.get(name)
        if item.method_of is not None:
            if not isinstance(value, ModuleType):
                return False
        elif not isinstance(value, (FunctionType, type, type(len))):
            return False
    return True


def _where(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
