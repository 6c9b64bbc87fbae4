"""Actions that look at the job and change nothing: evidence for people, and for the next steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.model.action import Action, Job, PlanContext
from ..core.model.payload import Json, Outcome, Payload, WeightsArgs
from ..core.model.values import Steps
from ..errors import ActionError


@dataclass(frozen=True)
class Snapshot(Action):
    """Write the evidence bundle of the incident into the run directory.

    The bundle holds the metric window, the last batches' fingerprints, the shards of the steps up
    to the breach, stacks of all threads, log tails, environment (secrets replaced), git state, host
    facts and RNG state. It works on a hung job too, with what can be had from outside, and says
    what is missing. It is not model state: that is a savepoint.

    Example:
        - snapshot

    Undo: none needed; it touches nothing.
    Source: Robusta runs its enrichers before its actions: evidence first, always.
    """

    touches_job: ClassVar[bool] = False
    deadline_s: ClassVar[float] = 60.0

    def plan(self, context: PlanContext) -> Payload:
        return Payload({"incident": context.incident})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.snapshot(str(args["incident"]), key=key, deadline_s=self.deadline_s)
        if not answer.get("bytes") or not answer.get("sha256"):
            raise ActionError(f"the evidence bundle is empty: {answer}", retryable=True)
        return answer


LONGEST_TRACE = 20


@dataclass(frozen=True)
class Profile(Action):
    """Trace the next `steps` steps with torch.profiler, on every rank.

    Each rank writes `incidents/<id>/profile-<step>-rank-<n>.json` in the run directory when the
    steps are over, for https://ui.perfetto.dev or chrome://tracing, and a notice says so. No number
    changes, but the steps are slower, and writing holds the job for a moment. It is refused while
    the job runs a profiler of its own, and ends when the job starts one.

    Example:
        - profile: {steps: 5}

    Undo: none needed; it ends by itself.
    Source: torch.profiler.profile, export_chrome_trace. At most 20 steps: a trace grows by
        megabytes with each step of a large model.
    """

    touches_job: ClassVar[bool] = False  # evidence
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    steps: Steps = 5

    def find_errors(self) -> list[tuple[str, str]]:
        if not 1 <= self.steps <= LONGEST_TRACE:
            return [("steps", f"must be between 1 and {LONGEST_TRACE}, not {self.steps}")]
        return []

    def plan(self, context: PlanContext) -> Payload:
        return Payload({"incident": context.incident, "steps": self.steps})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("profile", args, key=key, deadline_s=self.deadline_s)
        if not isinstance(answer.get("path"), str):
            raise ActionError(f"the probe did not say where it writes the trace: {answer}")
        return answer


Set = Literal["attention", "activations", "routing", "routers", "weights", "gradients", "checksums"]


@dataclass(frozen=True)
class RaiseSampling(Action):
    """Sample attention, activations, routers, weights, gradients and checksums every `every` steps.

    For `for` steps; then each set goes back to its own interval by itself. `sets` names some of
    them, else all that are on. During an incident samples are twice as dense anyway; this is for
    when that is not enough, and its cost is accepted: no set is switched off for it.

    Example:
        - raise_sampling: {every: 5, for: 200}

    Undo: raise_sampling with lift.
    Source: project default. 5 is a tenth of the usual interval, and 200 steps outlast the
        verification of a runbook; on the example model it costs a few percent of a step.
    """

    touches_job: ClassVar[bool] = False  # it only looks
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    every: Steps = 5
    for_: Steps = 200
    sets: tuple[Set, ...] = ()
    lift: bool = False

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        if self.every < 1:
            wrong.append(("every", f"must be at least 1 step, not {self.every}"))
        if not 1 <= self.for_ <= 10_000:
            wrong.append(("for", f"must be between 1 and 10000 steps, not {self.for_}"))
        return wrong

    def plan(self, context: PlanContext) -> Payload:
        if self.lift:
            return Payload({"lift": True})
        return Payload({"every": self.every, "steps": self.for_, "sets": list(self.sets) or None})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("raise_sampling", args, key=key, deadline_s=self.deadline_s)
        if not isinstance(answer.get("sampling"), Mapping):
            raise ActionError(f"the probe did not say how often it samples now: {answer}")
        return answer

    def undo(self) -> Action | None:
        return None if self.lift else RaiseSampling(lift=True)


@dataclass(frozen=True)
class CheckWeights(Action):
    """Withdraw the runbook where the probe batch has the loss that it had before the first breach.

    One forward of its two rows, at the next step boundary. Within `within` times the lower one of
    its losses at the newest two savepoints from before the breach the weights are good: batches
    were bad, and no rollback mends those. Of several ranks the one that is farthest off counts.
    Evidence is collected and nothing else is done. From `again` steps later on the runbook is
    started anew where the losses rise, jump or fall no further while they are out of their band, or
    the inputs were one token: another loss of the probe batch alone is no evidence, since the model
    may have learned other data. Where token statistics stepped and the loss falls by itself, it
    has: then the probe keeps another batch. Without tokens, losses of twice the usual while the
    probe batch has lost half as much at most, in logs, are of other data; so are losses that fall
    while it rises. Beyond it, and where nobody knows (no
    `job.probe_batch`, several ranks that are not in one DistributedDataParallel, no savepoint yet,
    no answer in time), the runbook goes on: with `unknown: wait` after a quarter of `again` steps,
    if the losses are out of their band then. It is asked only when a rule about the size of the
    loss wants the runbook, or all that was not finite was skipped: what else is SEV0 needs no
    second opinion.

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

    def find_errors(self) -> list[tuple[str, str]]:
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
        was, now = outcome.loss_before(order.before_step), outcome.loss
        if now is None or not now <= order.within * was:  # or it is NaN
            return ""
        return (
            f"the weights show no damage: the probe batch has a loss of {now:.4g}, and had "
            f"{was:.4g} before step {order.before_step}"
        )
