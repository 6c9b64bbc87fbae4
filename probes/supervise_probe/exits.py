"""With which code the job asks to end: at exit Python has forgotten it, and nobody else may know.

A supervisor that took over from a dead one is not the job's parent, and cannot ask the kernel. What
is heard is `sys.exit`; a script that raises `SystemExit` itself counts as one that ran to its end.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any, NoReturn

_asked = [0]


def install() -> None:
    """Listen to `sys.exit`. To be called once."""
    original = sys.exit

    @functools.wraps(original)
    def heard(*args: Any) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            _asked[0] = _code(args[0] if args else None)
        original(*args)

    vars(sys)["exit"] = heard


def code() -> int:
    """Return the exit code that was asked for last, 0 when nobody has asked."""
    return _asked[0]


def _code(status: Any) -> int:
    """Return the exit code that Python makes of what `sys.exit` was given."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1
