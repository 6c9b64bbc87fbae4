"""With which code the job asks to end: at exit Python has forgotten it.

A supervisor that took over from a dead one is not the job's parent, and cannot ask the kernel. What
is seen is `sys.exit`; a script that raises `SystemExit` itself counts as one that ran to its end.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any, NoReturn, Tuple

from .guard import describe

_asked = [0]


def install() -> None:
    """Listen to `sys.exit`. To be called once."""
    original = sys.exit

    @functools.wraps(original)
    def exit_(*args: Any) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            _asked[0] = _code(args[0] if args else None)
        original(*args)

    vars(sys)["exit"] = exit_


def last_words() -> Tuple[int, str]:
    """Return the exit code and, where an error ends the process, what it is.

    The code is the one that was asked for last, 0 where none was.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        return _asked[0], ""
    return (-2 if isinstance(error, KeyboardInterrupt) else 1), describe(error)


def _code(status: Any) -> int:
    """Return the exit code that Python makes of what `sys.exit` was given."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1
