"""How a runbook failed, and what of it is still to be taken back; see `runbooks/runner`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..model.action import Action


@dataclass(slots=True)
class RunbookFailure:
    """What becomes of a runbook that cannot go on.

    Attributes:
        why: it failed, while it is being compensated; None: it has not.
        undoing: compensations still to do.
        useless: it did not help: what is undone, and then the next rung.
        exhausted: nothing else may be tried: no budget, or an undo failed.
        refused: the job refused its step, and nothing was touched.
        withdrawn: its reason was gone before it acted: nothing is tried instead.
        unpaused: why the job is not paused any more, though this runbook relies on it.
    """

    why: str | None = None
    undoing: list[Action] = field(default_factory=list)
    useless: bool = False
    exhausted: bool = False
    refused: bool = False
    withdrawn: bool = False
    unpaused: str = ""
