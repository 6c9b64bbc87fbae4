"""What was done about an incident, how far it went back, and what is not to be trusted.

Kept by `compensation`, and by `incidents/opening` (tainted).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..model.action import Action


@dataclass(slots=True)
class Recovery:
    """The way back from a trouble.

    Attributes:
        standing: (number of the runbook, what takes an action of it back), oldest first.
        back: the attempt that the job was last taken back to; what older frames tell is over.
        beyond, settled: it went back: the first breach, a step that a recovery must have passed,
            and the step before which its probation does not end. A crash has neither: it may lie
            far ahead, and the count of crashes judges it.
        crashed: the first breach, if that is the end of the process.
        tainted: attempt -> step from which checkpoints of it are suspect because of this.
    """

    standing: list[tuple[int, Action]] = field(default_factory=list)
    back: int = 0
    beyond: int = -1
    settled: int = -1
    crashed: int = -1
    tainted: dict[int, int] = field(default_factory=dict)
