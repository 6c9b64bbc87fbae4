"""Why a runbook starts, fails or is withdrawn, why automatic actions are off, and the fitness of a
host: the clauses that records and messages have of it; see `notices`.

A field that is a clause itself is the reason behind a reason.
"""

from __future__ import annotations

from enum import StrEnum

from .frames import BrokenForward
from .notices import Cause, Clause, describe_job_end, describe_session_end

UNANSWERED = "no answer in time"


class Reported(Clause, frozen=True, kw_only=True):
    """As the job, its probe or an action has it."""

    TEXT = "{report}"
    report: str


# ── a runbook is wanted ───────────────────────────────────────────────────────────────────────────


class RequestedBy(Clause, frozen=True, kw_only=True):
    TEXT = "{runbook} requested by {operator}"
    runbook: str
    operator: str


class ApprovedBy(Clause, frozen=True, kw_only=True):
    TEXT = "{cause}; approved by {operator}"
    cause: Cause
    operator: str


class CheckpointAvailable(Clause, frozen=True, kw_only=True):
    TEXT = "{cause}; a good checkpoint is now available"
    cause: Cause


class AlreadyTried(Clause, frozen=True, kw_only=True):
    """`is_cooling`: in the cooldown of the rule, else on probation."""

    TEXT = "{rule} {when}, and {runbook} was tried"
    rule: str
    runbook: str
    is_cooling: bool

    @property
    def when(self) -> str:
        return "is in its cooldown" if self.is_cooling else "fired on probation"


class RelapseOnProbation(Clause, frozen=True, kw_only=True):
    TEXT = "{rule} is in breach again on probation"
    rule: str


class IncidentTrouble(Clause, frozen=True, kw_only=True):
    """What an incident is about, behind new evidence on the weights, "" for none."""

    TEXT = "{evidence}; {rule}: {headline}"
    rule: str
    headline: str
    evidence: str = ""


class StartsAgain(Clause, frozen=True, kw_only=True):
    """What a relaunch is about to do; `idle_s`: for how long nothing may move before, None: it may.

    Attributes:
        command: what the job is started with.
    """

    TEXT = (
        "the job is started again from {checkpoint} of step {step}, or a newer one that is "
        "verified meanwhile, with {command}[, if nothing moves for {idle_s:g} s]"
    )
    checkpoint: str
    step: int
    command: str
    idle_s: float | None = None


# ── a step of it failed ───────────────────────────────────────────────────────────────────────────


class StepRefused(Clause, frozen=True, kw_only=True):
    TEXT = "{verb} refused: {refusal}"
    verb: str
    refusal: str


class StepUnapproved(Clause, frozen=True, kw_only=True):
    """`order`: the verb with its arguments."""

    TEXT = "{order} is not what was approved"
    order: str


class StepFailed(Clause, frozen=True, kw_only=True):
    TEXT = "the {verb} failed: {error}"
    verb: str
    error: str


class StepUnanswered(Clause, frozen=True, kw_only=True):
    TEXT = "no answer to the {verb}: it may or may not have happened"
    verb: str


class BudgetSpent(Clause, frozen=True, kw_only=True):
    TEXT = "budget {budget} is spent ({used} of {most})"
    budget: str
    used: int
    most: int


# ── it did not help ───────────────────────────────────────────────────────────────────────────────


class Lack(StrEnum):
    """Why nothing is verified yet."""

    NO_EFFECT_SHOWN = "no frame shows the effect yet"
    NOT_CLEAR = "not clear for long enough"
    WEIGHTS_UNJUDGED = "it is not known yet whether the weights are good"


class Breach(StrEnum):
    """How a rule is, after an action."""

    NOW = "is in breach"
    AGAIN = "is in breach again"
    STILL = "is in breach still"
    UNJUDGED = "cannot be judged"


class DidNotHelp(Clause, frozen=True, kw_only=True):
    TEXT = "{runbook} did not help: {trouble}"
    runbook: str
    trouble: Cause


class HelpUnknown(DidNotHelp, frozen=True, kw_only=True):
    TEXT = "whether {runbook} helped is not known: {trouble}"


class NoFrames(Clause, frozen=True, kw_only=True):
    TEXT = "{runbook}: no frame for {seconds:.0f} s to verify it by"
    runbook: str
    seconds: float


class NoEffect(Clause, frozen=True, kw_only=True):
    TEXT = "{verb} had no effect: {missing}"
    verb: str
    missing: str


class RollbackUndone(Clause, frozen=True, kw_only=True):
    """`ratio`: the size of the first update behind it against the usual one."""

    TEXT = (
        "the rollback did not hold: the first update was {ratio:.3g} times the usual one, as if "
        "other weights had been written back"
    )
    ratio: float


class OnsetAgain(RollbackUndone, frozen=True, kw_only=True):
    """The updates of the onset were as large. `step`: its first one."""

    TEXT = (
        "the rollback did not hold: the first update was {ratio:.3g} times the usual one, as large "
        "as those from step {step} on: what changed there is still so, or other weights were "
        "written back"
    )
    step: int


class RuleInBreach(Clause, frozen=True, kw_only=True):
    TEXT = "{rule} {breach} at step {step} on rank {rank}"
    rule: str
    breach: Breach
    step: int
    rank: int


class LossAbove(Clause, frozen=True, kw_only=True):
    TEXT = "loss {loss:.4g} at step {step} is not under {bound:.4g}"
    loss: float
    step: int
    bound: float


class LossOutOfRange(Clause, frozen=True, kw_only=True):
    """`loss`: the median of the newest ones, `steps` after the action."""

    TEXT = "{steps} steps after it the loss is {loss:.3g}, and its normal range ends at {bound:.3g}"
    steps: int
    loss: float
    bound: float


class OnsetAhead(Clause, frozen=True, kw_only=True):
    TEXT = "step {step}, where the incident started, has not been passed"
    step: int


class LossOffTrend(Clause, frozen=True, kw_only=True):
    """`residual`: of the median of `count` losses from the trend before the incident."""

    TEXT = "the median of {count} losses is {residual:+.3g} from the trend, band {width:.3g}"
    count: int
    residual: float
    width: float


class UpdateLarge(Clause, frozen=True, kw_only=True):
    TEXT = "{metric} is {ratio:.3g} times its value before the incident"
    metric: str
    ratio: float


class StepsUncompared(Clause, frozen=True, kw_only=True):
    TEXT = "{count} of {total} repeated steps were compared"
    count: int
    total: int


class Helped(Clause, frozen=True, kw_only=True):
    """A runbook helped; `loss_before`: the healthy one just before the incident.

    Attributes:
        differs: what the job does otherwise since its restart.
    """

    TEXT = "no rule fired for {steps} steps after {runbook}{losses}; but {differs}"
    steps: int
    runbook: str
    loss: float | None = None
    loss_before: float | None = None
    differs: str = ""

    @property
    def losses(self) -> str:
        if self.loss is None:
            return ""
        before = self.loss_before
        past = "" if before is None else f" ({before:.3g} before the incident)"
        return f", loss {self.loss:.3g}{past}"


class RestoredTo(Clause, frozen=True, kw_only=True):
    """`is_loop_kept`: only the weights went back."""

    TEXT = "{where} step {step}; {cause}"
    step: int
    is_loop_kept: bool
    cause: Cause

    @property
    def where(self) -> str:
        return "with the weights of" if self.is_loop_kept else "back at"


class RunbookDone(Clause, frozen=True, kw_only=True):
    TEXT = "{runbook} is done[ for {operator}]"
    runbook: str
    operator: str = ""


class ChangesNothing(Clause, frozen=True, kw_only=True):
    TEXT = "{runbook} is done, which changes nothing"
    runbook: str


class SessionEnded(Clause, frozen=True, kw_only=True):
    """`step`: the last one of the training, None where that is not known."""

    TEXT = "{end}"
    step: int | None

    @property
    def end(self) -> str:
        return describe_session_end(self.step)


class SessionOver(SessionEnded, frozen=True, kw_only=True):
    TEXT = "over: {end}"


# ── what speaks for the weights, or against them ──────────────────────────────────────────────────


class DataChanged(Clause, frozen=True, kw_only=True):
    """`change`: of the tokens."""

    TEXT = "the data changed at step {step}: {change}"
    step: int
    change: str


class DataLearned(DataChanged, frozen=True, kw_only=True):
    """`first`, `newer`: losses since."""

    TEXT = (
        "the data changed at step {step}: {change}; the loss fell by itself, from {first:.4g} to "
        "{newer:.4g}"
    )
    first: float
    newer: float


class OtherDataLearned(Clause, frozen=True, kw_only=True):
    """`usual`: the loss that the trend had led to. `probe`, `probe_before`: of the probe batch."""

    TEXT = (
        "the model has learned other data: their loss is {newer:.4g}, {usual:.4g} was expected; "
        "that of the probe batch rose from {probe_before:.4g} to {probe:.4g}"
    )
    newer: float
    usual: float
    probe_before: float
    probe: float


class OldDataHeld(OtherDataLearned, frozen=True, kw_only=True):
    """What comes in is not learned yet, and the weights are good for the data of before."""

    TEXT = (
        "other data come in: their loss is {newer:.4g}, {usual:.4g} was expected; that of the "
        "probe batch is {probe:.4g}, and was {probe_before:.4g}"
    )


class JumpsAlone(Clause, frozen=True, kw_only=True):
    """`probe`, `probe_before`: of the probe batch, by `step` and now."""

    TEXT = (
        "the loss jumped again since step {step}, and that of the probe batch did not: it is "
        "{probe:.4g}, and was {probe_before:.4g}"
    )
    step: int
    probe_before: float
    probe: float


class WeightsUndamaged(Clause, frozen=True, kw_only=True):
    """`step`: by when they were good."""

    TEXT = (
        "the weights show no damage: the probe batch has a loss of {probe:.4g}, and had "
        "{probe_before:.4g} when they were good, by step {step}"
    )
    probe: float
    probe_before: float
    step: int


class NothingNew(Clause, frozen=True, kw_only=True):
    TEXT = "nothing new speaks against the weights since step {step}"
    step: int


class Judged(StrEnum):
    """What was known of the weights when a rollback was withdrawn."""

    GOOD = "the weights were good"
    OTHER_DATA = "the data had changed"
    UNDECIDED = "the data may have changed"
    UNJUDGED = "nothing could judge the weights"


class NewEvidence(Clause, frozen=True, kw_only=True):
    """What speaks for a rollback that was withdrawn at `step`."""

    TEXT = (
        "{evidence}; at step {step} {judged}; the probe batch has a loss of {probe:.4g}"
        "[, {probe_before:.4g} then]"
    )
    evidence: str
    step: int
    judged: Judged
    probe: float | None = None
    probe_before: float | None = None


class LossJumpedAgain(Clause, frozen=True, kw_only=True):
    TEXT = "the loss jumped again, by {jump:.4g}, since step {step}"
    jump: float
    step: int


class LossRisesAgain(Clause, frozen=True, kw_only=True):
    TEXT = "the loss rises again, from {older:.4g} to {newer:.4g}"
    older: float
    newer: float


class LossStays(Clause, frozen=True, kw_only=True):
    TEXT = "the loss stays at {newer:.4g} since step {step} and falls no further"
    newer: float
    step: int


# ── automatic actions are off, or the job is given up ─────────────────────────────────────────────


class StallsAgain(Clause, frozen=True, kw_only=True):
    TEXT = "it was restarted {times} times and stalls again without going past step {farthest}"
    times: int
    farthest: int


class NothingHelped(Clause, frozen=True, kw_only=True):
    TEXT = "nothing helped, for {steps} steps"
    steps: int


class NoGoodCheckpoint(Clause, frozen=True, kw_only=True):
    TEXT = "no checkpoint from before step {before_step} is good"
    before_step: int


class LadderExhausted(Clause, frozen=True, kw_only=True):
    """`spike`: the class of the incident."""

    TEXT = "{spike}, and the escalation ladder is exhausted"
    spike: str


class RequestDenied(Clause, frozen=True, kw_only=True):
    """`operator`: who denied it, "" where it was not answered in time."""

    TEXT = "{runbook} does not run: {request}: {answer}"
    runbook: str
    request: str
    operator: str = ""

    @property
    def answer(self) -> str:
        return f"denied by {self.operator}" if self.operator else UNANSWERED


# ── a request is over ──────────────────────────────────────────────────────────


class Settled(StrEnum):
    """Why a request that waits is void."""

    RELOADED = "the policy was reloaded"
    CHANGED = "the action's arguments have changed"
    END_REQUESTED = "a request to end the job came first"


class Answered(Clause, frozen=True, kw_only=True):
    """`operator`: who answered, "" where nobody did."""

    TEXT = "{answer}"
    operator: str = ""

    @property
    def answer(self) -> str:
        return f"by {self.operator}" if self.operator else UNANSWERED


class ReplacedBy(Clause, frozen=True, kw_only=True):
    TEXT = "replaced by a request for {runbook}"
    runbook: str


class IncidentHeldFirst(Clause, frozen=True, kw_only=True):
    TEXT = "{incident} is held"
    incident: str


class AckLapsed(Clause, frozen=True, kw_only=True):
    """An incident became more severe than it was when somebody acknowledged it."""

    TEXT = "{operator} acknowledged it as {acked} only"
    operator: str
    acked: str


class IncidentOver(Clause, frozen=True, kw_only=True):
    TEXT = "{incident} is over"
    incident: str


class JobOver(Clause, frozen=True, kw_only=True):
    TEXT = "{end}"
    returncode: int | None

    @property
    def end(self) -> str:
        return describe_job_end(self.returncode)


class RunbookMissing(Clause, frozen=True, kw_only=True):
    TEXT = "runbook {runbook} no longer exists"
    runbook: str


class NoLongerPossible(Clause, frozen=True, kw_only=True):
    TEXT = "it is no longer possible: {refusal}"
    refusal: str


# ── the course of the run ─────────────────────────────────────────────────────────────────────────


class Preempted(Clause, frozen=True, kw_only=True):
    """An end that was asked for; `cause`: the request."""

    TEXT = "{cause}, {result}"
    cause: str
    is_saved: bool

    @property
    def result(self) -> str:
        return "with a checkpoint" if self.is_saved else "without a checkpoint"


class TookOver(Clause, frozen=True, kw_only=True):
    """Another supervisor goes on; `seconds`: for how long nobody watched."""

    TEXT = (
        "process {pid} took over from a supervisor that died, after {seconds:.0f} s without "
        "monitoring; {job}"
    )
    pid: int
    seconds: float
    alive: bool

    @property
    def job(self) -> str:
        return "the job runs" if self.alive else "the job ended meanwhile"


class StepsWithoutFrame(Clause, frozen=True, kw_only=True):
    TEXT = "rank {rank}: {span} no frame"
    rank: int
    first_step: int
    last_step: int

    @property
    def span(self) -> str:
        if self.first_step == self.last_step:
            return f"step {self.first_step} has"
        return f"steps {self.first_step} to {self.last_step} have"


class StepsMade(Clause, frozen=True, kw_only=True):
    TEXT = "{count} of {total} steps"
    count: int
    total: int


class CheckpointUnloaded(Clause, frozen=True, kw_only=True):
    """`bound`: what the first loss is under where the weights are those of the checkpoint."""

    TEXT = "{report}; it did not load all of its checkpoint, whose loss is below {bound:.4g}"
    report: str
    bound: float


# ── what the numbers of a rule are explained by ───────────────────────────────────────────────────


class Growth(Clause, frozen=True, kw_only=True):
    """A notice came again and again, and each time it was worse."""

    TEXT = "{times} times within {steps} steps, each time further off than before"
    times: int
    steps: int


class LossUnmoved(Clause, frozen=True, kw_only=True):
    """`first`, `newer`: medians of the losses at the start, and of the newest."""

    TEXT = "the loss has not moved from its start ({first:.3g}, now {newer:.3g})"
    first: float
    newer: float


# ── a host ────────────────────────────────────────────────────────────────────────────────────────


class HostState(StrEnum):
    FIT = "this host is fit to start the job on"
    UNEXAMINED = "not looked at"


class HostUnfit(Clause, frozen=True, kw_only=True):
    TEXT = "this host is not fit to start the job on: {trouble}"
    trouble: str


class HostUnclear(HostUnfit, frozen=True, kw_only=True):
    TEXT = "the health of this host could not be checked in full: {trouble}"


class CheckAnswer(Clause, frozen=True, kw_only=True):
    TEXT = "{check}: {answer}"
    check: str
    answer: Cause


class Causes(Clause, frozen=True, kw_only=True):
    TEXT = "{line}"
    causes: tuple[Cause, ...]

    @property
    def line(self) -> str:
        return ", ".join(map(str, self.causes))


class CheckGap(StrEnum):
    """Why a question about a host has no answer."""

    MEMORY_UNKNOWN = "the system does not say how much is available"
    NO_NVIDIA = "no NVIDIA device"
    NO_DEVICE = "no device; job.health.matmul asks the CPU"
    MATMUL_OFF = "job.health.matmul is 0"
    PYTHON_UNKNOWN = "the job's Python is not known"
    NO_TIME = "there was no time left to ask"


class CheckTimeout(Clause, frozen=True, kw_only=True):
    TEXT = "no answer within {seconds:.0f} s"
    seconds: float


class CheckUnavailable(Clause, frozen=True, kw_only=True):
    TEXT = "{command} cannot be started: {error}"
    command: str
    error: str


class CheckExit(Clause, frozen=True, kw_only=True):
    TEXT = "it ended with code {returncode}"
    returncode: int


class MemoryFree(Clause, frozen=True, kw_only=True):
    """`need_gb`: by the policy. `peak_gb`: of the job."""

    TEXT = (
        "{free_gb:.1f} GB available[, and job.health.memory_gb is {need_gb:g}]"
        "[, and the job took up to {peak_gb:.1f} GB]"
    )
    free_gb: float
    need_gb: float | None = None
    peak_gb: float | None = None


class MemoryNeedUnknown(MemoryFree, frozen=True, kw_only=True):
    TEXT = "{free_gb:.1f} GB available; how much the job takes was not measured"


class DiskUnknown(Clause, frozen=True, kw_only=True):
    TEXT = "the file system of {folder} does not say what is free"
    folder: str


class DiskFree(Clause, frozen=True, kw_only=True):
    """`need_gb`: by the policy. `size_gb`: of a checkpoint."""

    TEXT = (
        "{free_gb:.1f} GB free in {folder}[, and a checkpoint has {size_gb:.1f} GB]"
        "[, and job.health.disk_gb is {need_gb:g}]"
    )
    free_gb: float
    folder: str
    need_gb: float | None = None
    size_gb: float | None = None


class DevicesGood(Clause, frozen=True, kw_only=True):
    TEXT = "{count} without a fault"
    count: int


class DevicesMissing(Clause, frozen=True, kw_only=True):
    TEXT = "{count} devices, of {total} when the run began"
    count: int
    total: int


class MemoryRows(StrEnum):
    """Of a device, that are faulty."""

    LOST = "more rows of its memory are faulty than it can remap"
    TO_REMAP = "rows of its memory are remapped at the next reset"


class DeviceFault(Clause, frozen=True, kw_only=True):
    TEXT = "{device}: {fault}"
    device: str
    fault: Cause


class MemoryErrors(Clause, frozen=True, kw_only=True):
    TEXT = "{device}: {count} uncorrected memory errors since its driver was loaded"
    device: str
    count: int


class ProductsWrong(Clause, frozen=True, kw_only=True):
    TEXT = "{device}: {count} of {total} products are wrong"
    device: str
    count: int
    total: int


class ProductsRight(Clause, frozen=True, kw_only=True):
    """`device`: or how many."""

    TEXT = "{total} products on {device} are right, in {seconds:g} s"
    total: int
    device: str
    seconds: float


class DeviceFull(Clause, frozen=True, kw_only=True):
    TEXT = (
        "{device}: no memory for matrices of 0.2 GB, {used_gb:.1f} of {total_gb:.1f} GB are in use"
    )
    device: str
    used_gb: float
    total_gb: float


class DeviceBusy(DeviceFull, frozen=True, kw_only=True):
    TEXT = (
        "{device}: not asked, as {used_gb:.1f} of {total_gb:.1f} GB are in use by other processes"
    )


def describe_forward(forward: BrokenForward | None) -> str:
    """Return which forward pass broke running statistics, as a noun; "" for none."""
    if forward is None:
        return ""
    if forward.step is None:
        return f"a forward pass by step {forward.counted}"
    return f"the forward pass of step {forward.step}"


class NewestDamaged(Clause, frozen=True, kw_only=True):
    TEXT = "the newest checkpoint, {checkpoint} in {path}, is damaged: {damage}"
    checkpoint: str
    path: str
    damage: str
