"""What was done about an incident, how far it went back, and what is not to be trusted.

Kept by `compensation`, and by `incidents/opening` (suspect_from).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..model.action import Action


@dataclass(slots=True)
class Recovery:
    """The way back from a failure.

    Attributes:
        undos: (number of the runbook, the action that reverses one of its actions), oldest first.
        rolled_back_to: the attempt that the job was last rolled back to; older frames are stale.
        must_pass, probation_step: after a rollback: the first breach, a step that a recovery must
            have passed, and the step before which its probation does not end. A crash has neither:
            it may lie far ahead, and the count of crashes judges it.
        crashed: the first breach, if that is the end of the process.
        suspect_from: attempt -> step from which its checkpoints are suspect because of this.
    """

    undos: list[tuple[int, Action]] = field(default_factory=list)
    rolled_back_to: int = 0
    must_pass: int = -1
    probation_step: int = -1
    crashed: int = -1
    suspect_from: dict[int, int] = field(default_factory=dict)
