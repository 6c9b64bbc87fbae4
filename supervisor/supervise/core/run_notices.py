"""Messages about the run rather than an incident: the wiring of the job, its course and its end,
the record, the policy, and the channels. See `notices`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, TypeVar

from msgspec import ValidationError, convert

from . import reasons  # noqa: F401, its classes are clauses too
from .model import formats
from .model.decisions import MessageText
from .model.interfaces import FINISHED, WATCHER, Advice, AdviceSteps, Step, sentences
from .notices import Clause, Notice, Template

CHECKPOINTS = (Step("good checkpoints", "supervise checkpoints RUN"),)
UNMONITORED = {  # kind of an event -> what it means
    "no-probe": "no rule on steps, loss or hangs works: only the exit code and signals are watched",
    "probe-off": "no metrics of this process from here on; the job keeps training",
    "segment-fault": "no metrics of this rank from here on; the job keeps training",
}
LOOK_AGAIN = Step("to look again", "supervise doctor --health -- COMMAND")
OPTIMIZER_MADE = "the optimizer is made at {made}"
COMES_BACK = (
    Step("protection comes back with the next start of the job"),
    Step("to go on from", "supervise checkpoints RUN"),
)


# ── the job ───────────────────────────────────────────────────────────────────────────────────────


class Difference(Clause, frozen=True, kw_only=True):
    """A number of a restarted job that is not as before: `value` where it was `before`.

    Attributes:
        THING: what is another one. REMEDY: what a person can do.
        MATTERS: it is more than a loader that is shuffled.
    """

    THING: ClassVar[str] = ""
    REMEDY: ClassVar[str] = ""
    MATTERS: ClassVar[bool] = True


class RateDiffers(Difference, frozen=True, kw_only=True):
    TEXT = "learning rate {value:.3g} at step {step}, {before:.3g} before the restart; {schedule}"
    THING = "another learning rate"
    REMEDY = "save and load the scheduler's state_dict from now on"
    step: int
    value: float
    before: float
    is_from_start: bool
    behind: int = 0  # by how many steps its schedule is, 0 where that is not known

    @property
    def schedule(self) -> str:
        return f"the schedule {'started over' if self.is_from_start else 'is not where it was'}"

    @property
    def shift(self) -> str:
        """How the schedule is off, in short."""
        if self.behind > 0:
            return f"the schedule is {self.behind} steps behind"
        rates = f"rate {self.value:.3g} at step {self.step} where it was {self.before:.3g}"
        return f"{rates}: {self.schedule}"


class UpdateDiffers(Difference, frozen=True, kw_only=True):
    """`value`, `before`: the size of an update per learning rate."""

    TEXT = (
        "update {ratio:.2g} times as large per learning rate as before, at step {step} "
        "({value:.3g} for {before:.3g}); the optimizer's moments are new"
    )
    THING = "new optimizer moments"
    REMEDY = "let the job save and load its optimizer's state_dict"
    step: int
    value: float
    before: float

    @property
    def ratio(self) -> float:
        return self.value / self.before


class BatchesRepeat(Difference, frozen=True, kw_only=True):
    TEXT = "batches {step}.. are those of steps {earlier}.."
    THING = "other positions in its data"
    REMEDY = "save the position in the data and go on there, or skip what was used"
    step: int
    earlier: int


class BatchesDiffer(Difference, frozen=True, kw_only=True):
    TEXT = "other batches than before from step {step} on"
    THING = "other batches"
    REMEDY = "seed the loader and save its state to repeat them"
    MATTERS = False
    step: int


class GradientDiffers(Difference, frozen=True, kw_only=True):
    TEXT = "gradient norm {value:.3g} where it was {before:.3g} on the same batch"
    THING = "another gradient norm"
    REMEDY = "compare accumulation, ranks and precision"
    value: float
    before: float


class TokensDiffer(Difference, frozen=True, kw_only=True):
    TEXT = "{value:g} tokens per update where there were {before:g}"
    THING = "other numbers of tokens per update"
    REMEDY = "compare batch size, accumulation and ranks"
    value: float
    before: float


class EvaluationDiffers(Difference, frozen=True, kw_only=True):
    TEXT = "evaluation loss {value:.4g} where it was {before:.4g} at step {step} before"
    THING = "another evaluation loss"
    REMEDY = "compare the evaluation's data, and what is loaded"
    step: int
    value: float
    before: float


class GoesOnOtherwise(Notice, frozen=True, kw_only=True):
    TITLE = "since its restart the job has {things}"
    WHAT = "{differences}; {consequence}"
    things: str
    differences: str
    matters: bool

    @property
    def consequence(self) -> str:
        return "nothing corrects it by itself" if self.matters else "the training goes on"


class OfWiring(Notice, frozen=True, kw_only=True):
    """How the job is put together: told once, and no incident; `made`: the job's line to look at.

    Attributes:
        names: of a few tensors or layers, and how many more there are.
    """

    KIND = WATCHER
    WHY = "rule {rule}[: {expression}]"
    rule: str
    expression: str = ""
    names: str = ""
    made: str = ""


class WithoutGradient(OfWiring, frozen=True, kw_only=True):
    TITLE = "[{count} of {total} ]tensors of the optimizer never had a gradient[: {names}]"
    WHAT = "these weights stay as they began, while the others train"
    NEXT = sentences(
        "look between them and the loss for detach(), no_grad(), .data, or a reentrant checkpoint "
        "whose input needs no gradient (use_reentrant=False mends that)",
        OPTIMIZER_MADE,
    )
    count: int
    total: int


class LossCutOff(OfWiring, frozen=True, kw_only=True):
    TITLE = "no tensor of the optimizer ever had a gradient[: {names}]"
    WHAT = "all weights stay as they began: the job runs and learns nothing"
    NEXT = sentences(
        "check that backward() is called, and that the loss has its graph: no item(), detach() or "
        "new tensor in between",
        OPTIMIZER_MADE,
    )


class WithoutOptimizer(OfWiring, frozen=True, kw_only=True):
    TITLE = "tensors of the model have gradients and are in no optimizer[ ({count})][: {names}]"
    WHAT = "these weights stay as they began, while the others train"
    NEXT = sentences(
        "give them to the optimizer, and make it when the model is complete, or freeze them by "
        "requires_grad_(False)",
        "it is made at {made}",
    )
    count: int


class OptimizerOfOthers(OfWiring, frozen=True, kw_only=True):
    TITLE = (
        "the optimizer holds tensors of another model; those of the one that trains are in none"
        "[: {names}]"
    )
    WHAT = "the model stays as it began: [{count} ]tensors have gradients and never change"
    NEXT = sentences(
        "make the optimizer after the model is made, loaded, copied or wrapped",
        "it is made at {made}",
    )
    count: int


class ModelInEval(OfWiring, frozen=True, kw_only=True):
    TITLE = "the model is in eval mode in the training steps[: {names}]"
    WHAT = "dropout does nothing there, and normalization goes by old statistics"
    NEXT = sentences("call model.train() before the first step, and again after each evaluation")


class GradientsAddUp(OfWiring, frozen=True, kw_only=True):
    TITLE = "nothing clears the gradients between two updates[: {names}]"
    WHAT = "each update goes by the sum of all gradients so far, and not by those of its batch"
    NEXT = sentences(
        "call optimizer.zero_grad() once for each optimizer.step(), not once for each epoch",
        OPTIMIZER_MADE,
    )


class StreamNotSplit(OfWiring, frozen=True, kw_only=True):
    TITLE = "each of the loader's {copies:.0f} workers reads the whole stream"
    WHAT = "every batch comes {copies:.0f} times in a row, and an epoch takes as many times as long"
    NEXT = sentences(
        "let the dataset's __iter__ read a part for each worker (torch.utils.data.get_worker_info),"
        " or set num_workers to 1"
    )
    copies: float


class RoundedAway(OfWiring, frozen=True, kw_only=True):
    TITLE = "{share:.0f} % of the 16-bit weights do not move[: {names}]"
    WHAT = "their updates are below half the spacing of the type, and are rounded away"
    NEXT = sentences(
        "keep the weights in float32 and compute under torch.autocast, or keep a master copy"
    )
    share: float


class NormsAlone(OfWiring, frozen=True, kw_only=True):
    TITLE = "each rank's BatchNorm normalizes over {rows:.0f} rows of its own"
    WHAT = "its statistics are noisy, and those that are saved are of one rank"
    NEXT = sentences(
        "before DistributedDataParallel: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or "
        "GroupNorm"
    )
    rows: float


class ReplicasDiffer(OfWiring, frozen=True, kw_only=True):
    """`equal`: the newest step in which they were the same, None if never."""

    TITLE = "the ranks hold different weights[; at step {equal} they were the same]"
    WHAT = "each trains a model of its own on its part of the data, and only one is saved"
    NEXT = (
        Step(
            "call the DistributedDataParallel model itself, not its .module, where the loss comes "
            "from"
        ),
        Step("change weights on all ranks alike"),
        Step("if each is meant to train for itself", "supervise silence RUN wiring.ranks"),
    )
    equal: int | None = None


class AlwaysClipped(OfWiring, frozen=True, kw_only=True):
    TITLE = "the gradients are clipped in {share:.0f} % of the steps, by {ratio:.0e}; {course}"
    WHAT = "updates are that many times smaller than the gradients ask for"
    NEXT = sentences(
        "they are clipped while still multiplied by the loss scale {scale}: call "
        "scaler.unscale_(optimizer) first",
        "the clip is at {made}",
        "{otherwise}",
    )
    share: float
    ratio: float
    course: str = ""
    scale: str = ""
    otherwise: str = ""


class WeightsStandStill(OfWiring, frozen=True, kw_only=True):
    TITLE = "a step moves the weights by {ratio:.0e} of their size; {course}"
    WHAT = "at this size they take {steps} steps to change"
    NEXT = sentences("check the learning rate[ ({rate:.3g})], the scale of the loss, and the clip")
    ratio: float
    rate: float | None = None
    course: str = ""

    @property
    def steps(self) -> str:
        return f"{1.0 / self.ratio:,.0f}" if self.ratio > 0.0 else "endless"


class ScheduleOver(OfWiring, frozen=True, kw_only=True):
    TITLE = "the learning rate is 0[ from step {since} on], and the loop goes on"
    WHAT = "no weight moves any more: these steps learn nothing"
    NEXT = sentences(
        "compare the length of the schedule with the number of updates: it is over too soon where "
        "scheduler.step() is called in each micro-batch or by each process"
    )
    since: int | None = None


class UpdatesTooLarge(OfWiring, frozen=True, kw_only=True):
    TITLE = "each step moves the weights by {ratio:.2g} times their size"
    WHAT = "nothing that they learned outlives a step"
    NEXT = (
        Step("lower the learning rate", "supervise lr RUN 0.1"),
        Step("then check its schedule"),
    )
    ratio: float


class EpochsSkipped(Notice, frozen=True, kw_only=True):
    KIND = WATCHER
    TITLE = (
        "the restart skipped {skipped:.1f} epochs: step {step} is in {epoch:.2f}, and "
        "{expected:.2f} was expected"
    )
    WHAT = "the job trains on, and the data between is not trained on"
    NEXT = (
        Step(
            "let the loader save where it is (a StatefulDataLoader), or resume from the end of an "
            "epoch",
            "supervise checkpoints RUN",
        ),
    )
    step: int
    epoch: float
    expected: float
    skipped: float


class AsReported(Notice, frozen=True, kw_only=True):
    """What the probe or the supervisor has noticed, as they say it."""

    TITLE = "{text}"
    text: str


class StartNotResumed(AsReported, frozen=True, kw_only=True):
    """A start that did not go on from its checkpoint."""

    NEXT = (
        Step("if that is not meant", "supervise stop RUN"),
        Step("to go on from", "supervise checkpoints RUN"),
    )


class PreemptSaved(AsReported, frozen=True, kw_only=True):
    """The checkpoint that a request to end asked for was written; `signals`: what waited for it."""

    KIND = WATCHER
    WHAT = "{signals} is passed on"
    path: str = ""
    signals: str = ""

    @property
    def verdict(self) -> str:
        return super().verdict or "the job is ended with exit code 75"

    @property
    def then(self) -> Advice:
        return Advice(None, sentences(f"resume from {self.path}") if self.path else CHECKPOINTS)


class PreemptFailed(AsReported, frozen=True, kw_only=True):
    """It was not written; `checkpoint`: the newest good one, "" for none, of `checkpoint_step`."""

    KIND = WATCHER
    NEXT = CHECKPOINTS
    step: int
    checkpoint: str = ""
    checkpoint_step: int = -1

    @property
    def verdict(self) -> str:
        if self.step < 0:
            return "no step was made, so none is lost"
        if not self.checkpoint:
            return f"no checkpoint is verified: an end at step {self.step} may lose every step"
        newest = f"{self.checkpoint} (step {self.checkpoint_step})"
        return f"an end at step {self.step} loses the steps since {newest}"


class PreemptUnavailable(AsReported, frozen=True, kw_only=True):
    KIND = WATCHER
    WHAT = "signals are passed on at once, and no checkpoint is requested before the end"


class RollbackLost(Notice, frozen=True, kw_only=True):
    KIND = WATCHER
    TITLE = "no rollback is possible from here on"
    WHY = "{cause}"
    cause: str


class HostDoubted(AsReported, frozen=True, kw_only=True):
    KIND = WATCHER
    WHAT = "the job is started all the same"
    NEXT = (LOOK_AGAIN,)


class JobSuspended(AsReported, frozen=True, kw_only=True):
    KIND = WATCHER
    WHAT = "no action is taken"


class StartSlow(AsReported, frozen=True, kw_only=True):
    KIND = WATCHER
    WHAT = "it is not stopped for this"
    NEXT = (Step("if it should have started", "supervise stop RUN"),)


class ProgramChanged(AsReported, frozen=True, kw_only=True):
    KIND = WATCHER
    WHAT = "steps before and after it are of different programs; no action is taken"
    NEXT = (Step("if that is not intended", "supervise stop RUN"),)


class OrphansFound(AsReported, frozen=True, kw_only=True):
    KIND = WATCHER
    WHAT = "{consequence}"
    NEXT = (Step("to end them", "{command}"),)
    consequence: str
    command: str = ""


class Unmonitored(AsReported, frozen=True, kw_only=True):
    KIND = WATCHER
    WHAT = "{meaning}"
    NEXT = (Step("what a probe finds here", "supervise doctor -- COMMAND"),)
    event: str

    @property
    def meaning(self) -> str:
        return UNMONITORED[self.event]


class MetricsMissing(AsReported, frozen=True, kw_only=True):
    KIND = WATCHER
    WHAT = "rules that read these metrics are not evaluated"


class OptimizersTakeTurns(AsReported, frozen=True, kw_only=True):
    KIND = WATCHER
    WHAT = "from now on a spike of loss, gradient norm or update is recorded, and not acted upon"


class UpdatesDiscarded(AsReported, frozen=True, kw_only=True):
    KIND = WATCHER
    WHAT = "the job runs and learns nothing, and no action inside it comes about"
    NEXT = (
        Step(command="supervise stop RUN"),
        Step("to go on from", "supervise checkpoints RUN"),
    )


class LogFailure(Notice, frozen=True, kw_only=True):
    KIND = WATCHER
    TITLE = "a line in a log of the job: {meaning}: {text}"
    WHAT = "no action is taken for a line of a log"
    meaning: str
    text: str


class ThreadFailure(Notice, frozen=True, kw_only=True):
    KIND = WATCHER
    TITLE = "a thread of the job ended with an error: {text}"
    WHAT = "the job goes on without it"
    NEXT = (Step("to see whether steps are still made", "supervise status RUN"),)
    text: str


class MonitoredAgain(Notice, frozen=True, kw_only=True):
    KIND = WATCHER
    TITLE = "the run is monitored again"
    WHAT = "{text}"
    text: str


class StepsUnseen(AsReported, frozen=True, kw_only=True):
    KIND = WATCHER
    WHAT = "these steps were not evaluated"


# ── the record, and the watching itself ──────────────────────────────────────────────────────────


class SpaceNotice(Notice, frozen=True, kw_only=True):
    """About the disk; `mount`, `need_bytes`, `runs`: what is to be freed, and where runs are."""

    KIND = WATCHER
    WHY = "{text}"
    GRAVEST: ClassVar[str] = "SEV1"
    text: str
    acts: bool
    mount: str = ""
    need_bytes: int | None = None
    runs: str = ""
    reserve_bytes: int = 0
    seconds: float | None = None

    @property
    def to_free(self) -> AdviceSteps:
        need = f" {formats.format_bytes(self.need_bytes)}" if self.need_bytes else " space"
        steps = [Step(f"free{need}{f' on {self.mount}' if self.mount else ''}")]
        if self.mount:
            steps.append(Step("what fills it", f"du -xm {self.mount} | sort -n | tail"))
        old = Step("old runs", f"supervise gc --older-than 1d {self.runs}".rstrip())
        return (*steps, old)


class RecordSpaceShort(SpaceNotice, frozen=True, kw_only=True):
    """The reserve is in use, for about `seconds`."""

    TITLE = "no space is left for the record of this run"

    @property
    def verdict(self) -> str:
        text = f"it is written from a reserve of {formats.format_bytes(self.reserve_bytes)}"
        if self.seconds is not None:
            text += f", about {formats.format_seconds(self.seconds)} at this rate"
        if self.acts:
            text += ", and actions go on; when it is used up, nothing is acted on any more"
        return text

    @property
    def then(self) -> Advice:
        return Advice(None, self.to_free)


class RecordSpaceEnough(SpaceNotice, frozen=True, kw_only=True):
    GRAVEST = "SEV2"
    TITLE = "there is space for the record of this run again"
    WHAT = "its reserve is whole again, and it has no gap"


class RecordEnded(SpaceNotice, frozen=True, kw_only=True):
    TITLE = "the record of this run has ended, and nothing more of it is kept"
    WHAT = "the job goes on, and what its rules find is reported"

    @property
    def news(self) -> str:
        return Unprotected.TITLE if self.acts else self.TITLE

    @property
    def then(self) -> Advice:
        is_space = self.need_bytes is not None
        return Advice(None, (*self.to_free, *COMES_BACK) if is_space else COMES_BACK)


class Unwatched(Notice, frozen=True, kw_only=True):
    """An error of ours has ended the supervision."""

    KIND = WATCHER
    TITLE = "this run is not watched any more"
    WHAT = "the job goes on; nothing that goes wrong in it is reported, and no command is taken"
    WHY = "{error}; its traceback is in RUN/supervisor.log"
    NEXT = (
        Step(
            "to go on protected now, unless a container or a batch job ends with process {pid}",
            "kill -KILL {pid} && supervise adopt RUN",
        ),
        *COMES_BACK,
    )
    error: str
    pid: int | None = None


class Unprotected(Unwatched, frozen=True, kw_only=True):
    """As before, of a run that counted on actions."""

    TITLE = "this run is not protected any more: nothing is acted on"


# ── the end of the job ────────────────────────────────────────────────────────────────────────────


KILLED = "killed, by what is unknown"
NO_ON_CRASH = "it is not started again by itself: the policy has no job.on_crash"


def describe_end_step(step: int) -> str:
    """Return where a job ended."""
    return f"at step {step}" if step >= 0 else "before its first step"


class EndAt(Clause, frozen=True, kw_only=True):
    """An end; `step`: the newest one then, -1 before the first."""

    step: int

    @property
    def where(self) -> str:
        return describe_end_step(self.step)


class JobEnd(EndAt, frozen=True, kw_only=True):
    TEXT = "the job {end} {where}"
    end: str


class FinishedAt(EndAt, frozen=True, kw_only=True):
    TEXT = "finished {where}"


class Interrupted(EndAt, frozen=True, kw_only=True):
    TEXT = "interrupted {where}"


class StoppedBy(EndAt, frozen=True, kw_only=True):
    TEXT = "stopped by {operator} {where}"
    operator: str


class EndedAfter(EndAt, frozen=True, kw_only=True):
    TEXT = "ended {where} after {request}"
    request: str


class OthersEnded(Clause, frozen=True, kw_only=True):
    TEXT = "{count} other processes of the job ended after it"
    count: int


class AlsoRecorded(Clause, frozen=True, kw_only=True):
    TEXT = "also recorded: {failure}[, and {more} more]"
    failure: str
    more: int | None = None


class HeldBefore(Clause, frozen=True, kw_only=True):
    TEXT = "{incident} was held"
    incident: str


class EndedThereBefore(Clause, frozen=True, kw_only=True):
    TEXT = "it already ended at step {step} before, without progress since"
    step: int


class EndedTooOften(Clause, frozen=True, kw_only=True):
    TEXT = "it ended {times} times without going past step {farthest}"
    times: int
    farthest: int


class EndsTheSameWay(Clause, frozen=True, kw_only=True):
    """`cls`: the class of the failure."""

    TEXT = "{failure}: every start would end the same way ({cls})"
    failure: str
    cls: str


class EndsSoAgain(EndsTheSameWay, frozen=True, kw_only=True):
    TEXT = "{failure}, again after a restart ({cls})"


class EndMeant(Notice, frozen=True, kw_only=True):
    """An end that was asked for."""

    KIND = FINISHED
    TITLE = "{end}"
    WHAT = "the job {outcome}"
    end: str
    outcome: str


class EndAsked(Notice, frozen=True, kw_only=True):
    """A signal ended the job as it asked."""

    KIND = FINISHED
    TITLE = "the job was ended by {signal}, as asked, {where}"
    WHAT = "the job {outcome}, and is not started again"
    signal: str
    step: int
    outcome: str

    @property
    def where(self) -> str:
        return describe_end_step(self.step)


class JobFinished(Notice, frozen=True, kw_only=True):
    KIND = FINISHED
    TITLE = "finished[ at step {step}]"
    step: int


class FinishedNonfinite(Notice, frozen=True, kw_only=True):
    """`since`: the first step of those whose losses are no numbers, up to the last one."""

    KIND = FINISHED
    TITLE = "finished at step {step}, and its loss is NaN or Inf from step {since} on"
    WHAT = "it reports success; what it saved since then is of no use[; {damage}]"
    step: int
    since: int
    damage: str = ""  # of the newest checkpoint


class JobEndedEarly(Notice, frozen=True, kw_only=True):
    KIND = FINISHED
    TITLE = (
        "the job ended with code 0 after {shortfall}[, its loss NaN or Inf from step {since} on]"
    )
    WHAT = "it reports success and is not complete; nothing asked it to stop[; {damage}]"
    NEXT = sentences("read the end of the job's output, then its data and its stop condition")
    shortfall: str
    since: int | None = None  # as in `FinishedNonfinite`, None where the losses are numbers
    damage: str = ""  # of the newest checkpoint


class JobStopped(Notice, frozen=True, kw_only=True):
    KIND = FINISHED
    TITLE = "the job is DOWN: supervise stopped it[ at step {step}], as the policy says"
    WHAT = "the job {end}[; {damage}]"
    step: int
    end: str
    damage: str = ""  # of the newest checkpoint


class JobStoppedIn(JobStopped, frozen=True, kw_only=True):
    """As before, about an incident."""

    WHAT = "{headline}; the job {end}, and is not started again by itself[; {damage}]"
    headline: str


class JobFailed(Notice, frozen=True, kw_only=True):
    """It ended by itself; `meaning`: of the failure that ended it, `others`: what else ended."""

    KIND = FINISHED
    TITLE = "the job is DOWN: it {end} {where}"
    WHAT = "{failure}; {meaning}; {others}; {cause}"
    end: str
    step: int
    failure: str = ""
    cause: str = ""
    meaning: str = ""
    others: str = ""

    @property
    def where(self) -> str:
        return describe_end_step(self.step)


class RestartFailed(Notice, frozen=True, kw_only=True):
    KIND = FINISHED
    TITLE = "the job is DOWN: its restart {end} before its first step"
    WHAT = "{failure}; {cause}"
    WHY = "it was started with {command}"
    end: str
    cause: str
    command: str
    failure: str = ""


class HostUnfit(Notice, frozen=True, kw_only=True):
    KIND = FINISHED
    TITLE = "the job is DOWN: it {end} {where}, and cannot run on this host"
    WHAT = "{failure}; {cause}"
    NEXT = (
        Step("repair or free what is named, or start the job on another host"),
        LOOK_AGAIN,
    )
    end: str
    step: int
    cause: str
    failure: str = ""

    @property
    def where(self) -> str:
        return describe_end_step(self.step)


class CheckpointDamaged(Notice, frozen=True, kw_only=True):
    KIND = FINISHED
    TITLE = "{end}, and the newest checkpoint is damaged"
    WHAT = "{checkpoint} in {path} cannot be used"
    WHY = "{damage}"
    end: str
    checkpoint: str
    path: str
    damage: str
    good: str = ""
    good_step: int = -1

    @property
    def then(self) -> Advice:
        text = "no checkpoint of this run is good"
        if self.good:
            text = f"use {self.good} of step {self.good_step} instead"
        return Advice(None, (Step(text, "supervise checkpoints RUN"),))


class PolicyNotReloaded(Notice, frozen=True, kw_only=True):
    KIND = WATCHER
    TITLE = "the policy was not reloaded"
    WHAT = "{refusal}"
    NEXT = sentences("the previous policy stays in force")
    refusal: str


class PolicyInForce(Notice, frozen=True, kw_only=True):
    KIND = WATCHER
    TITLE = "policy {name} ({mode}) was reloaded"
    WHAT = "{changes}"
    name: str
    mode: str
    changes: str


class AckAnswer(Clause, frozen=True, kw_only=True):
    TEXT = "{incident} acknowledged; reminders stopped"
    incident: str


class SilenceAnswer(Clause, frozen=True, kw_only=True):
    TEXT = "{rule} silenced for {steps} steps: no action, no notification; it is still recorded"
    rule: str
    steps: int


class SilenceOver(Clause, frozen=True, kw_only=True):
    TEXT = "silence on {rule} removed"
    rule: str


# ── channels ──────────────────────────────────────────────────────────────────────────────────────


class ChannelFailed(Notice, frozen=True, kw_only=True):
    """To the other channels; `silent_s`: for how long it has delivered nothing, None: not long."""

    KIND = WATCHER
    TITLE = "{channel}: {messages} not delivered"
    WHAT = "no message was delivered for {silent_s:.0f} s; last error: {error}"
    WHY = "notifications are not reaching this channel; the run itself goes on as before"
    NEXT = (
        Step("check the settings and the service of {channel}"),
        Step("state of the channels", "supervise status RUN"),
    )
    channel: str
    messages: str
    error: str
    silent_s: float | None = None


class ChannelRecovered(Notice, frozen=True, kw_only=True):
    """`lost`: messages that were given up."""

    KIND = WATCHER
    TITLE = "{channel} works again"
    WHAT = "the waiting messages are being delivered"
    channel: str
    lost: int = 0

    @property
    def verdict(self) -> str:
        return f"{formats.count_messages(self.lost)} lost" if self.lost else super().verdict

    @property
    def then(self) -> Advice:
        return Advice(
            None, (Step("read them with", "supervise audit show RUN"),) if self.lost else ()
        )


class Digest(Notice, frozen=True, kw_only=True):
    """Of messages that were held back; `titles`: of the first ones."""

    KIND = WATCHER
    TITLE = "digest of {messages}"
    WHAT = "{titles}"
    WHY = "they waited for the end of quiet hours, or were too many in an hour"
    NEXT = (Step("list all of them with", "supervise audit show RUN"),)
    messages: str
    titles: str


F = TypeVar("F", bound=Template)


def _kinds(form: type[F]) -> Iterator[type[F]]:
    if getattr(form, "TITLE", "") or getattr(form, "TEXT", ""):
        yield form
    for derived in form.__subclasses__():
        yield from _kinds(derived)


NOTICES: Mapping[str, type[Notice]] = {form.__name__: form for form in _kinds(Notice)}
CLAUSES: Mapping[str, type[Clause]] = {form.__name__: form for form in _kinds(Clause)}


def news_of(text: MessageText) -> str:
    """Return the title of the newest notice in a message, without the incident in front."""
    try:
        notice = convert({**text.facts, "severity": text.severity}, NOTICES[text.form])
    except (KeyError, ValidationError):  # of another version
        return text.title
    return notice.news
