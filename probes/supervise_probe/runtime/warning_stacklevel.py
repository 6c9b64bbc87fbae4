"""Keeps the frames of the probe's own functions out of `warnings.warn(..., stacklevel=n)`.

Whoever warns counts the frames up to the line that is to blame, and one of ours in between would
put the blame on this package: under another name, and once more than without the probe. Python does
not count frames whose file is named as that of the import system is, and this is the one sign that
it takes.

Source: `is_internal_filename` in Python/_warnings.c, `_is_internal_frame` in warnings.py.
"""

from __future__ import annotations

from types import CodeType
from typing import Any, Callable, Dict, TypeVar

NAME = " (not importlib._bootstrap)"  # behind the file's own, in tracebacks too

Function = TypeVar("Function", bound=Callable[..., Any])

_codes: Dict[CodeType, CodeType] = {}  # one for all functions of one `def`


def uncounted(function: Function) -> Function:
    """Have `function`, which stands around something of the job's or of torch's, not counted."""
    code: CodeType = function.__code__
    if code not in _codes:
        _codes[code] = code.replace(co_filename=code.co_filename + NAME)
    function.__code__ = _codes[code]
    return function
