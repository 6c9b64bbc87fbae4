"""Limits of a probe's data: everything else is refused before it becomes an event.

Checksums tell damage by chance. What has a good checksum and no sense comes from a broken probe, or
from somebody who writes into the segment: numbers that no training has, and letters of another
shape. The engine and the journal never see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from supervise_probe import wire

MAX_RANKS = 1 << 24
MAX_PID = 1 << 31
MAX_NS = 1 << 61  # 73 years since the machine was started
MAX_STEP = 1 << 53
MAX_ATTEMPT = 1 << 31
MAX_NAMES = 4096
AHEAD_NS = 3600 * 10**9  # a frame's time is that of this machine's own clock
MAX_INT = 1 << 63
MAX_DEPTH = 16
MAX_CODE = 1 << 31

ACK = {"ack": str, "verb": str, "step": int, "ok": bool, "result": dict, "error": str | None}
# `frame`: how many frames were published before it.
NOTICE = {"notice": str, "message": str, "step": int | None, "frame": int, "data": dict}

# Kinds of notices that only the supervisor itself may give.
OWN = frozenset(
    (
        "checkpoint",
        "checkpoint-choice",
        "checkpoint-search",
        "no-probe",
        "preempt",
        "probe-off",
        "segment-fault",
        "signal",
        "suspended",
    )
)
_NUMBER = int | float | None
_WAS = {"was": _NUMBER, "is": _NUMBER}
_STAMP = dict.fromkeys(("size", "mtime_ns", "inode", "device"), int)
# What the supervisor reads of a notice's data, by its kind; each key may be missing. A mapping
# stands for an object of that shape, of which the first key decides whether it is there.
_TOLD = {
    "step": int,
    "ok": bool,
    "loss": _WAS,
    "lr": _WAS,
    "fingerprint": str,
    "probe_batch": {"verdict": str},
}
DATA: dict[str, dict[str, Any]] = {
    "continuity": _TOLD,
    "resume-refused": _TOLD,
    "measurement-changed": {"metrics": list},
    "weights-restored": {"attempt": int, "to": int},
    "training-ended": {"done": int, "total": int, "stopped": bool},
    "checkpoint-saved": {
        "path": str,
        "file": _STAMP,
        "seconds": _NUMBER,
        "attempt": int,
        "how": str,
        "ranks": int,
        "python": str | None,
        "probe_batch": dict | None,
        "counters": dict,
    },
}
# What is reckoned with of an ack's result, and what an ack of a verb that was done must hold.
RESULT = {
    **dict.fromkeys(("attempt", "step", "seen_attempt", "ack_step"), int),
    **dict.fromkeys(("loss_scale", "backoff"), int | float),
    **dict.fromkeys(("clip_bound", "rate_limit"), _NUMBER),
}
NEEDED = {"rollback": ("attempt", "step"), "loss_scale": ("loss_scale",), "clip": ("clip_bound",)}


def header(found: wire.Header) -> str | None:
    """Return what of a segment's header cannot be, None when it is sound."""
    limits = {
        "rank": MAX_RANKS,
        "world_size": MAX_RANKS + 1,
        "pid": MAX_PID,
        "start_ticks": MAX_NS,
        "created_ns": MAX_NS,
    }
    for name, limit in limits.items():
        value = getattr(found, name)
        if value >= limit:
            return f"has a header that is out of range: {name} {value}"
    return None


def slot(found: wire.Slot, now_ns: int) -> str | None:
    """Return what of a frame cannot be, None when it is sound."""
    limits = {"step": MAX_STEP, "attempt": MAX_ATTEMPT, "at_ns": now_ns + AHEAD_NS}
    for name, limit in limits.items():
        value = getattr(found, name)
        if value >= limit:
            return f"{name} {value}"
    return None


def names(found: Any) -> TypeGuard[list[str]]:
    """Return whether that is a table of metric names."""
    return (
        isinstance(found, list)
        and len(found) <= MAX_NAMES
        and all(isinstance(name, str) and _encodes(name) for name in found)
    )


def returncode(found: Any) -> int | None:
    """Return the returncode that a job has told, None where it is none."""
    return found if type(found) is int and -MAX_CODE < found < MAX_CODE else None


def letter(found: Any, shape: Mapping[str, Any]) -> TypeGuard[dict[str, Any]]:
    """Return whether a letter has that shape, `ACK` or `NOTICE`, and can be kept and shown."""
    if not isinstance(found, dict) or found.keys() != shape.keys():
        return False
    if not all(_is(found[key], kind) for key, kind in shape.items()) or not bounded(found):
        return False
    if found["step"] is not None and not -1 <= found["step"] < MAX_STEP:
        return False
    if shape is ACK:
        return _answers(found)
    if not 0 <= found["frame"] < MAX_STEP:
        return False
    kind = found["notice"]
    return kind not in OWN and _told(found["data"], DATA.get(kind, {}))


def bounded(value: Any) -> bool:
    """Return whether JSON is no deeper, and its numbers and texts are no odder, than ours are."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, str):
                if not _encodes(each):
                    return False
            elif isinstance(each, int) and not -MAX_INT <= each < MAX_INT:
                return False
        if not inner:
            return True
        level = inner
    return False


def _encodes(text: str) -> bool:
    """Whether a text is Unicode: JSON can hold half of a surrogate pair, which nobody can print."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind; a boolean is no number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind)


def _told(data: Mapping[str, Any], shape: Mapping[str, Any]) -> bool:
    for key, kind in shape.items():
        if key not in data:
            continue
        value = data[key]
        if not isinstance(kind, Mapping):
            if not _is(value, kind):
                return False
        elif value is not None and value != {}:
            whole = kind is not _STAMP or (isinstance(value, dict) and kind.keys() <= value.keys())
            if not whole or not isinstance(value, dict) or not _told(value, kind):
                return False
    return True


def _answers(ack: Mapping[str, Any]) -> bool:
    """Whether the numbers of an ack that the engine reckons with are there, and are numbers."""
    result = ack["result"]
    if not all(_is(result[key], kind) for key, kind in RESULT.items() if key in result):
        return False
    needed = NEEDED.get(ack["verb"], ()) if ack["ok"] else ()
    return all(key in result for key in needed)
