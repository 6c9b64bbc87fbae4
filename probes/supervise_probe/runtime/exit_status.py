"""With which code the job asks to end: at exit Python has forgotten it.

A supervisor that took over from a dead one is not the job's parent, and cannot ask the kernel. What
is seen is `sys.exit`, to which the way in listens (`inject/sitecustomize.py`); a script that raises
`SystemExit` itself counts as one that ran to its end.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, Dict, Sequence, Tuple

from . import failure

MESSAGE_CHARS = 200
# thread -> status, frames
_asked: Dict[int, Tuple[Any, Sequence[Any]]] = {}


def install() -> None:
    """Listen to `sys.exit`. To be called once."""
    global _asked
    _asked = getattr(sys.exit, "asked", _asked)


def requested_exit() -> Tuple[Any, Sequence[Any]]:
    """Return what this thread gave to `sys.exit` last, and the frames that called it."""
    return _asked.get(get_ident(), (None, ()))


def last_words() -> Tuple[int, str]:
    """Return the exit code and, where an error ends the process, what it is.

    The code is the one that was asked for last, 0 where none was.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        status, _ = requested_exit()
        return _code(status), (status if isinstance(status, str) else "")
    return (-2 if isinstance(error, KeyboardInterrupt) else 1), _line(error)


def _line(error: BaseException) -> str:
    """Return an error in one line, with the innermost place of the job's own code."""
    headline = (str(error).strip().splitlines() or [""])[0][:MESSAGE_CHARS]
    location = failure.place_of(error)
    text = f"{type(error).__name__}: {headline}" if headline else type(error).__name__
    return f"{text} ({location})" if location else text


def _code(status: Any) -> int:
    """Return the exit code that Python makes of what `sys.exit` was given."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1
