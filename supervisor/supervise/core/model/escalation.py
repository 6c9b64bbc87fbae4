"""The escalation ladder: which runbook an incident gets, and what comes after one that failed."""

from __future__ import annotations

from .policy import HOLD, Ladder, Policy


def entry_level(ladder: Ladder, runbook: str, minimum: int) -> tuple[str, int]:
    """Return `(runbook, level)` for a rule that wants `runbook`, never below level `minimum`.

    A runbook outside the ladder (level -1) is returned as it is: what was tried before is no reason
    to answer a hang with a rollback.
    """
    if runbook not in ladder.levels:
        return runbook, -1
    level = ladder.levels.index(runbook)
    return (runbook, level) if level >= minimum else level_at(ladder, minimum)


def minimum_level(ladder: Ladder, last_level: tuple[int, int] | None, frame_count: int) -> int:
    """Return the level that the last incident came to, unless that was long enough ago.

    Args:
        last_level: (level, frame_count) of it, None when none acted.
    """
    return (
        last_level[0]
        if last_level is not None and frame_count - last_level[1] < ladder.reset_after_steps
        else -1
    )


def next_level(ladder: Ladder, level: int) -> tuple[str, int]:
    """Return the level above `level`; past the last one there is only `hold`.

    A runbook from outside the ladder (level -1) failed: there is no next level for it, hold.
    """
    return (HOLD, len(ladder.levels)) if level < 0 else level_at(ladder, level + 1)


def level_at(ladder: Ladder, level: int) -> tuple[str, int]:
    """Return `(runbook, level)`, `hold` past the end."""
    return (
        (ladder.levels[level], level) if level < len(ladder.levels) else (HOLD, len(ladder.levels))
    )


def level_of(ladder: Ladder, name: str, otherwise: int) -> int:
    """Return the level of a runbook, `otherwise` when it is on none."""
    return ladder.levels.index(name) if name in ladder.levels else otherwise


def relaunching(policy: Policy) -> tuple[str, int]:
    """Return `(runbook, level)` of the first one that relaunches the job, `hold` without one."""
    relaunching_names = [name for name, book in policy.runbooks.items() if "relaunch" in book.verbs]
    names = [
        name for name in (*policy.ladder.levels, *relaunching_names) if name in relaunching_names
    ]
    return (names[0], level_of(policy.ladder, names[0], -1)) if names else (HOLD, -1)
