"""The job's own frames: where the step was called from, and whether that place can be gone back to.

Rule 1: a frame is never held; only its code object and a weakly referenced mark outlive a call.
Rule 2: a place that cannot be proven equal is refused with one sentence, never guessed.
Rule 3: reading a frame's variables leaves nothing behind in the frame.

A rollback rewinds what happened between two visits of one program point. The frames that were
entered before and are still running (same mark) have not moved, except the innermost of them: it
drives the loop. Only from there inward must a frame be able to go back: no `for` (its iterator
cannot be rewound), no half-computed expression, no generator. This file knows bytecode positions
and frames; it knows no tensor and no torch.
"""

import ctypes
import os
import sys
import sysconfig
import threading
import weakref
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from .bytecode import Waiting, instruction_offset, position

_PROBE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # as in co_filename: not made absolute
_STDLIB = tuple({sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib")})
_TYPED_IN = ("<string>", "<stdin>", "<ipython")  # code of the user's that never was in a file
_BACKWARD = ("backward", "grad", "_engine_run_backward")
_GENERATOR = 0x20 | 0x80 | 0x100 | 0x200  # CO_GENERATOR, _COROUTINE, _ITERABLE_COROUTINE, _ASYNC_
_OPTIMIZED = 0x1  # CO_OPTIMIZED: the variables of a function, not those of a module or class body
_LIVE_LOCALS = sys.version_info >= (3, 13)  # PEP 667: f_locals writes through
_MARKABLE = sys.version_info >= (3, 10)  # before, a frame with f_trace reports stale line numbers


class CannotRestore(Exception):  # noqa: N818 (a refusal, not an error)
    """A savepoint cannot be taken or gone back to; the text is one sentence for people."""


class _Mark:
    """Tells one call of a function from the next. Sits in `f_trace`, unused without a debugger."""

    __slots__ = ("__weakref__",)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        return None


class Step(NamedTuple):
    """One frame on the way from the module to the optimizer step."""

    code: CodeType
    offset: int  # of the instruction that is being executed
    mark: Optional["weakref.ref[_Mark]"]  # dead once the frame is gone


def is_library(filename: str) -> bool:
    """Whether a code object's file belongs to an installed package or to Python itself."""
    if filename.startswith("<"):
        return not filename.startswith(_TYPED_IN)
    path = filename.replace("\\", "/")
    if "/site-packages/" in path or "/dist-packages/" in path:
        return True
    return filename.startswith(_STDLIB) or filename.startswith(_PROBE)


def job_frames(torch: ModuleType) -> List[FrameType]:
    """The running frames without torch's step and the probe, outermost (the module) first.

    Raises:
        CannotRestore: there are none, or the step is made inside backward.
    """
    home = os.path.dirname(str(torch.__file__)) + os.sep
    frame: Optional[FrameType] = sys._getframe(1)
    frames: List[FrameType] = []
    while frame is not None:
        code = frame.f_code
        if code.co_name in _BACKWARD and code.co_filename.startswith(home + "autograd"):
            raise CannotRestore("the step is made inside backward, whose rest cannot be undone")
        inner = not frames and code.co_filename.startswith(home)
        if not inner and not code.co_filename.startswith(_PROBE):
            frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    if not frames:
        raise CannotRestore("no code of the job is running")
    return frames


def itinerary(frames: List[FrameType]) -> List[Step]:
    """Mark the frames and say where each of them is."""
    steps = []
    for frame in frames:
        if _MARKABLE and frame.f_trace is None:
            frame.f_trace = _Mark()
        mark = frame.f_trace
        offset = instruction_offset(frame.f_code, frame.f_lasti)
        reference = weakref.ref(mark) if isinstance(mark, _Mark) else None
        steps.append(Step(frame.f_code, offset, reference))
    return steps


def driver(before: List[Step], now: List[Step]) -> int:
    """Index of the frame that went on between two itineraries: the innermost that is in both.

    -1 when frames cannot be told apart (Python 3.9, a debugger): then each has to prove itself.
    """
    same = 0
    for old, new in zip(before, now):
        mark = old.mark() if old.mark is not None else None
        if mark is None or new.mark is None or mark is not new.mark():
            break
        same += 1
    return same - 1


def require_same_place(before: List[Step], now: List[Step], frames: List[FrameType]) -> None:
    """Raise CannotRestore unless the job stands again where `before` was recorded."""
    found = driver(before, now)
    start = max(found, 0)
    for i in range(start, max(len(before), len(now))):
        there, here = before[i : i + 1], now[i : i + 1]
        if [(a.code, a.offset) for a in there] != [(b.code, b.offset) for b in here]:
            place = _where(frames[min(i, len(frames) - 1)])
            raise CannotRestore(
                f"the savepoint was taken at another place of the program than {place}"
            )
    reason = why_stuck(frames, start, known=found >= 0)
    if reason is not None:
        raise CannotRestore(reason)


def why_stuck(frames: List[FrameType], start: int, known: bool) -> Optional[str]:
    """Why the frames from index `start` inward can never be moved back; None when they can.

    Args:
        known: whether `start` is the frame that drives the loop, or only a first guess.
    """
    if threading.current_thread() is not threading.main_thread():
        return (
            f"{_where(frames[-1])} makes the step in the thread "
            f"{threading.current_thread().name!r}; only the main thread can be moved back"
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
                f"{_where(frame)} belongs to a library, whose loop cannot be moved back; "
                "relaunch goes back to a checkpoint of its own"
            )
        if known and start == i < len(frames) - 1 and not place.in_loop:
            return f"{_where(frame)} is repeated by a built-in such as map(), which goes on"
        if library:
            continue
        if place.waiting and not _harmless(frame, place.waiting):
            return (
                f"{_where(frame)} makes the step in the middle of an expression, whose first "
                f"half cannot be computed again"
            )
        if not is_readable(frame):
            return (
                f"{_where(frame)} calls locals(), so its variables cannot be read without "
                f"changing what it sees"
            )
    return None


def is_readable(frame: FrameType) -> bool:
    """Whether reading the variables goes unnoticed by the job.

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
    """The frame's variables by name; a module's own dict, a copy for a function."""
    variables = frame.f_locals
    if not frame.f_code.co_flags & _OPTIMIZED:
        return variables
    copy = dict(variables)
    if not _LIVE_LOCALS:
        variables.clear()  # the frame keeps this dict; it would keep the job's objects alive
    return copy


def write_variables(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Give variables of a running frame new values, closure cells included."""
    if not values:
        return
    variables = frame.f_locals
    for name, value in values.items():
        variables[name] = value
    if frame.f_code.co_flags & _OPTIMIZED and not _LIVE_LOCALS:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        variables.clear()


def _harmless(frame: FrameType, waiting: Tuple[Waiting, ...]) -> bool:
    """Whether the values on the stack are the same at every visit: constants and functions."""
    scope: Dict[str, Any] = {}
    builtins = frame.f_builtins
    for item in waiting:
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
