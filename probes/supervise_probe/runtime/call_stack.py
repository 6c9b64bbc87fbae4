"""The job's own frames: which code of the job is running, and its variables.

Rule: reading a frame's variables leaves nothing behind in the frame.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType, ModuleType
from typing import Any, Mapping, Optional

_PROBE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # as in co_filename: not absolute
_STDLIB = tuple({sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib")})
_TYPED_IN = ("<string>", "<stdin>", "<ipython")  # user code that is in no file
_BACKWARD = ("backward", "grad", "_engine_run_backward")
_OPTIMIZED = 0x1  # CO_OPTIMIZED: the variables of a function, not those of a module or class body
_LIVE_LOCALS = sys.version_info >= (3, 13)  # PEP 667: f_locals writes through


class CannotRestore(Exception):  # noqa: N818 (a refusal, not an error)
    """A savepoint cannot be taken or restored; the text is one sentence for people."""


def is_library(filename: str) -> bool:
    """Whether a code object's file belongs to an installed package or to Python itself."""
    if filename.startswith("<"):
        return not filename.startswith(_TYPED_IN)
    path = filename.replace("\\", "/")
    if "/site-packages/" in path or "/dist-packages/" in path:
        return True
    return filename.startswith(_STDLIB) or filename.startswith(_PROBE)


def job_line() -> str:
    """Return the innermost line of the job that runs, as `train.py:41`; "" for none."""
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def job_frames(torch: ModuleType) -> list[FrameType]:
    """Return the running frames without torch's step and the probe, outermost (the module) first.

    Raises:
        CannotRestore: there are none, or the step is made inside backward.
    """
    home = os.path.dirname(str(torch.__file__)) + os.sep
    frame: Optional[FrameType] = sys._getframe(1)
    frames: list[FrameType] = []
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
