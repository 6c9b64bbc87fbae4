"""Check weights: ask the probe batch whether the weights are bad, or the batch was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.model.action import Action, Job, PlanContext
from ..core.model.payload import Json, Outcome, Payload, WeightsArgs
from ..core.model.values import Steps
from ..errors import ActionError


@dataclass(frozen=True)
class CheckWeights(Action):
    """Withdraw the runbook where the probe batch has the loss that it had before the first breach.

    One forward of its two rows, at the next step boundary. Within `within` times the lower one of
    its losses at the newest two savepoints from before the breach the weights are good: batches
    were bad, and no rollback mends those. Evidence is collected and nothing else is done. From
    `again` steps later on the runbook is started anew where the losses rise, jump or fall no
    further while they are out of their band, or the inputs were one token: another loss of the
    probe batch alone is no evidence, since the model may have learned other data. Where token
    statistics stepped and the loss falls by itself, it has: then the probe keeps another batch.
    Beyond it, and where nobody knows (no `job.probe_batch`, several ranks that are not in one
    DistributedDataParallel, no savepoint yet, no answer in time), the runbook goes on: with
    `unknown: wait` after a quarter of `again` steps, if the losses are out of their band then. It
    is asked only when a rule about the size of the loss wants the runbook: what is not finite, or
    SEV0 otherwise, needs no second opinion.

    Example:
        - check_weights: {within: 1.1, again: 20}

    Undo: none needed; it touches nothing.
    Source: project defaults, measured on the programs of benchmarks/proving: a rollback for bad
        batches was worse than nothing on each, and the best remedy for damaged weights. 20 steps
        are those that a verification looks at.
    """

    touches_job: ClassVar[bool] = False  # it only looks
    deadline_s: ClassVar[float] = 5.0  # a job between two boundaries for longer goes on as asked

    within: float = 1.1
    again: Steps = 20
    unknown: Literal["wait", "proceed"] = "wait"

    def check(self) -> list[tuple[str, str]]:
        wrong = []
        if not 1.0 < self.within <= 10.0:
            wrong.append(("within", f"must be above 1 and at most 10, not {self.within:g}"))
        if self.again < 1:
            wrong.append(("again", f"must be at least 1 step, not {self.again}"))
        return wrong

    def plan(self, context: PlanContext) -> Payload:
        args = Payload({"before_step": context.breach_step, "within": self.within})
        args = args.extended(again=self.again)
        if self.unknown == "wait":
            args = args.extended(waits=True)
        if context.data_event:
            args = args.extended(data_event=context.data_event, renew=True)
        return args

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        try:
            return job.command("check_weights", args, key=key, deadline_s=self.deadline_s)
        except ActionError as error:  # then nobody knows, and the runbook goes on
            return {"why": str(error)}

    def objection(self, args: Payload, result: Payload) -> str:
        order, outcome = args.parse(WeightsArgs), result.read(Outcome)
        earlier_losses = [loss for step, loss in outcome.was if step < order.before_step]
        # Two: the newest one may be from between the damage and its first breach.
        was, now = min(earlier_losses[-2:], default=0.0), outcome.loss
        if now is None or not now <= order.within * was:  # or it is NaN
            return ""
        return (
            f"the weights are good: the probe batch has a loss of {now:.4g}, and had {was:.4g} "
            f"before step {order.before_step}"
        )
