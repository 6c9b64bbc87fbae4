"""Rungs of rising force: which runbook an incident gets, and what comes after one that failed."""

from __future__ import annotations

from .policy import HOLD, Ladder


def entry(ladder: Ladder, wanted: str, floor: int) -> tuple[str, int]:
    """Return `(runbook, rung)` for a rule that wants `wanted`, never below rung `floor`.

    A runbook on no rung (rung -1) is taken as it is: what was tried before is no reason to answer a
    hang with a rollback.
    """
    if wanted not in ladder.rungs:
        return wanted, -1
    rung = ladder.rungs.index(wanted)
    return (wanted, rung) if rung >= floor else at(ladder, floor)


def floor(ladder: Ladder, last: tuple[int, int] | None, pace: int) -> int:
    """Return the rung that the last incident came to, unless that was long enough ago.

    Args:
        last: (rung, pace) of it, None when none acted.
    """
    return last[0] if last is not None and pace - last[1] < ladder.reset_after_steps else -1


def climb(ladder: Ladder, rung: int) -> tuple[str, int]:
    """Return the rung above `rung`; past the last one there is only `hold`.

    A runbook from outside the ladder (rung -1) failed: there is no next rung for it, hold.
    """
    return (HOLD, len(ladder.rungs)) if rung < 0 else at(ladder, rung + 1)


def at(ladder: Ladder, rung: int) -> tuple[str, int]:
    """Return `(runbook, rung)`, `hold` past the end."""
    return (ladder.rungs[rung], rung) if rung < len(ladder.rungs) else (HOLD, len(ladder.rungs))


def place(ladder: Ladder, name: str, otherwise: int) -> int:
    """Return the rung of a runbook, `otherwise` when it is on none."""
    return ladder.rungs.index(name) if name in ladder.rungs else otherwise
