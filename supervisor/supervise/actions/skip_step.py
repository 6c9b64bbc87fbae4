"""Skip step: let updates pass without applying them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action, Job, PlanContext
from ..core.model.payload import Json, Payload
from ..core.model.values import Steps
from ..errors import ActionError


@dataclass(frozen=True)
class SkipStep(Action):
    """Do not apply the next `count` optimizer steps; the job's loop and data go on as usual.

    Weights and optimizer state stay bit-identical over a skipped step. It is how a known bad batch
    is passed over. For non-finite gradients use the safeguard `skip_nonfinite`: a command
    from outside comes a step too late. No more than `most` updates are skipped so in any 128
    steps; the probe counts them and refuses the rest. To pass over a longer stretch of data, `most`
    has to be raised by hand.

    Example:
        - skip_step: {count: 1}

    Undo: none; what a skipped batch would have taught is lost.
    Source: torch.amp.GradScaler skips steps in the same way; PaLM, arXiv:2204.02311, section 5.1,
        passed over 200 to 500 batches after a spike. 3 in 128 steps is the most that we hold for
        safe unattended, as for the safeguard.
    """

    destructive: ClassVar[bool] = True
    changes_training: ClassVar[bool] = True
    budget: ClassVar[str | None] = "skip_step"
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    count: Steps = 1
    most: Steps = 3

    def check(self) -> list[tuple[str, str]]:
        wrong = []
        if not 1 <= self.most <= 1000:
            wrong.append(("most", f"must be between 1 and 1000, not {self.most}"))
        if not 1 <= self.count <= self.most:
            wrong.append(("count", f"must be between 1 and most, {self.most}, not {self.count}"))
        return wrong

    def plan(self, context: PlanContext) -> Payload:
        return Payload({"count": self.count, "most": self.most})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("skip_step", args, key=key, deadline_s=self.deadline_s)
        if answer.get("will_skip") != args["count"]:
            raise ActionError(f"asked to skip {args['count']} steps, the probe answered {answer}")
        return answer
