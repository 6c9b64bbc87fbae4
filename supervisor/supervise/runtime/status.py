"""Status of a run, as `state.json` holds it: remedies, progress of the training, and the verdict.

Console, `supervise status`, the page and their JSON read it here, so that they agree. A remedy that
is not available has the reason and the change needed. The verdict is one line: matters that need a
person come first. The progress has loss, speed, planned length and a curve of fixed size over the
whole run; a frame costs a microsecond. The supervisor never reads the status back: the journal is
authoritative.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, zip_longest
from shlex import quote
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct

from ..checkpoints import registry
from ..core import checkpoint_wait, rule_scope
from ..core.incident import Incident
from ..core.model import formats, state_machine
from ..core.model.checkpoint_registry import WEIGHTS_ONLY
from ..core.model.decisions import ACTING_MODES, Decision, decode_numbers
from ..core.model.events import Announced, Curve, Event, Frame, LossCurve
from ..core.model.failure import exit_code_text
from ..core.model.payload import Payload
from ..core.model.policy import Policy
from ..core.run_state import ApprovalRequest, State
from ..errors import StoreError, reading_recorded_data
from ..notifiers.delivery import Backlog
from ..notifiers.heartbeat import Health
from ..store.recorder import Shortage
from ..store.run_directory import RunDir
from ..store.run_records import ASKED, GRAVE, RunOutcome
from .segment_reader import ProbeStatus, RankView

FILE = "state.json"
DERIVED = "the file is only a cache of the records; use `supervise why RUN`"


class OpenIncident(Struct, frozen=True, kw_only=True):
    """The incident that is open. acked: by whom it was acknowledged."""

    id: str = ""
    severity: str = ""
    phase: str = ""
    rules: Sequence[str] = ()
    headline: str = ""
    runbook: str | None = None
    acked: str = ""

    @property
    def text(self) -> str:
        """Its id, severity, phase and headline."""
        return f"{self.id} {self.severity} {self.phase}: {self.headline}"


class Incidents(Struct, frozen=True):
    """How many incidents the run had, and the open one."""

    opened: int = 0
    open: OpenIncident | None = None


class RequestedStep(Struct, frozen=True):
    """An action that waits for approval."""

    verb: str
    args: Payload


class Request(Struct, frozen=True, kw_only=True):
    """A request for approval. left_s: until `on_timeout` counts as the answer."""

    id: str
    incident: str = ""
    runbook: str = ""
    steps: Sequence[RequestedStep] = ()
    args_sha256: str = ""
    left_s: int = 0
    on_timeout: str = ""


class LastDecision(Struct, frozen=True):
    """The newest decision of the engine."""

    kind: str
    reason: str


class EndCause(Struct, frozen=True, rename={"cls": "class"}):
    """What ended the job. means: what that class of failure is, in words."""

    text: str
    cls: str = ""
    means: str = ""


class UndeliveredMessages(Struct, frozen=True):
    """What a channel could not deliver."""

    undelivered: int
    since_wall: str
    error: str


class Training(Struct, frozen=True, kw_only=True):
    """The progress of the training; what nobody knows is None.

    Attributes:
        steps_per_s: None before two steps. tokens_per_s: None for a job without tokens.
        tokens_of: `job`, or `rank` for those of the leading one.
        eta_s: None without a planned length. lag: steps that each rank is behind the first.
    """

    loss: float | None = None
    loss_metric: str | None = None
    loss_rank: int | None = None
    steps_per_s: float | None = None
    tokens_per_s: float | None = None
    tokens_of: str | None = None
    last_step_s: float | None = None
    planned_steps: int | None = None
    planned_by: str | None = None
    eta_s: int | None = None
    lag: Mapping[str, int] = {}
    curve: LossCurve = LossCurve()


class RankStatus(ProbeStatus, frozen=True, kw_only=True):
    """A rank: its process, and what its probe says of itself.

    Attributes:
        silent_s: since its last sign of life. overhead: the probe's share of a step.
        steps: how steps are counted where not by the optimizer.
        collectors: of each one `on`, or why it is off.
        thinned: what is measured less often than it should be for its cost, and every how many
            steps.
        unseen: metric -> why the batches do not show it. sources: their shares of the newest steps.
    """

    pid: int | None = None
    phase: str | None = None
    silent_s: float = 0.0
    overhead: float | None = None
    steps: str = ""
    quarantine: Any = None
    collectors: Mapping[str, str] = {}
    thinned: Mapping[str, int] = {}
    unseen: Mapping[str, str] = {}
    sources: Mapping[str, float] = {}


class Status(Struct, frozen=True, kw_only=True):
    """The newest status of a run, as `state.json` holds it.

    Attributes:
        silenced: rule -> by whom. muted: rule that fires -> what keeps it from being an incident.
        budgets: name -> "spent/maximum". rules: rule -> its state.
        ranks: see `RankStatus`; with all that the probe said. can: what can be done, and how.
        cpu_wait: percentage of the time that others had the job's CPUs.
        waits_for: what a relaunch waits for. trouble: why decisions cannot be recorded.
        channels: those that do not deliver. space: what must become free on a full disk.
        failed_views: what could not be made for people -> why. protection_off: the error of ours
            that ended the supervision. restarts: a crash leads to a relaunch; None: not on record.
    """

    state: str
    mode: str = ""
    policy: str = ""
    tier: str = ""
    step: int = -1
    attempt: int = 0
    world_size: int = 1
    incidents: Incidents = Incidents()
    approvals: Sequence[Request] = ()
    silenced: Mapping[str, str] = {}
    muted: Mapping[str, str] = {}
    checkpoints_good: Sequence[str] = ()
    budgets: Mapping[str, str] = {}
    rules: Mapping[str, str] = {}
    ranks: Mapping[str, Payload] = {}
    last_decision: LastDecision | None = None
    cpu_wait: float = 0.0
    updated_wall: str = ""
    failures: Sequence[str] | None = None
    ended_by: EndCause | None = None
    waits_for: str | None = None
    trouble: str | None = None
    channels: Mapping[str, UndeliveredMessages] | None = None
    can: Mapping[str, str] = {}
    space: Shortage | None = None
    training: Training = Training()
    messages_to: Sequence[str] = ()
    messages_waiting: Mapping[str, Backlog] = {}
    heartbeat: Health | None = None
    failed_views: Mapping[str, str] | None = None
    protection_off: str | None = None
    restarts: bool | None = None

    @classmethod
    def read(cls, run: RunDir) -> Status | None:
        """Return the status of a run, None before there is one.

        Raises:
            StoreError: the file cannot be read, or understood.
        """
        if not (run.path / FILE).exists():
            return None
        document = decode_numbers(run.read_json(FILE))
        with reading_recorded_data(f"the status in {run.path / FILE}", DERIVED):
            return msgspec.convert(document, cls, dec_hook=lambda form, value: form(value))

    def document(self) -> Payload:
        """Return it as JSON; what is not there is left out."""
        fields = msgspec.to_builtins(self, enc_hook=dict)
        return Payload({k: v for k, v in fields.items() if v is not None or k == "last_decision"})

    def rank_states(self) -> dict[str, RankStatus]:
        """Return what can be understood of each rank."""
        return {rank: fields.read(RankStatus) for rank, fields in self.ranks.items()}


def end_protection(run: RunDir, lost_to: str) -> None:
    """Say in the newest status that nothing comes after it. Raises StoreError."""
    newest = Status.read(run) or Status(state=state_machine.LAUNCHING)
    ended = msgspec.structs.replace(newest, protection_off=lost_to, can={})
    run.write_json(FILE, ended.document())


def read_last_status(run: RunDir, segments: Iterator[Sequence[Event]]) -> Status | None:
    """Return the newest status of a run whose supervisor died, brought to its journal's end.

    Args:
        segments: names and frames of the journal, see `read_segments_back`.

    Raises:
        StoreError: the status cannot be read, or understood.
    """
    status = Status.read(run)
    if status is None:
        return None
    names: dict[int, Sequence[str]] = {}
    progress = TrainingProgress(before=status.training)
    start = newest = (status.attempt, status.step)
    with suppress(StoreError):  # `replay` and `export` report a damaged journal
        for event in next(segments, ()):
            if isinstance(event, Announced):
                names[event.rank] = event.names
            elif isinstance(event, Frame) and (event.attempt, event.step) > start:
                progress.add_frame(names.get(event.rank, ()), event)
                newest = max(newest, (event.attempt, event.step))
    training = progress.add_newest_loss(status.training)
    return msgspec.structs.replace(status, attempt=newest[0], step=newest[1], training=training)


class Life(Struct, frozen=True, kw_only=True):
    """Whether anybody watches a run, and what became of its job.

    Attributes:
        supervisor: `running` or `gone`; the rest is known without one only.
        job: `running`, `ended`, `lost` or `unknown`. signal: that ended it.
        over: the run ended with the job. relaunching: the job was about to be started again.
    """

    supervisor: str = "gone"
    job: str = "unknown"
    exit_code: int | None = None
    job_pid: int | None = None
    signal: str | None = None
    over: bool = False
    relaunching: bool = False


INIT = "supervise init -- COMMAND"  # writes a policy with it


def list_capabilities(
    policy: Policy, state: State, probe: ProbeStatus, channels: Sequence[str]
) -> dict[str, str]:
    """Return what can be done -> how, or why not.

    Args:
        probe: the status of the leading rank's probe, empty where it has none.
        channels: names of the channels that people are told on.
    """
    availability = {}
    if policy.mode not in ACTING_MODES:
        availability["actions"] = f"none in mode {policy.mode} (--mode enforce)"
    else:
        availability["rollback"] = _rollback(policy, state, probe)
        availability["relaunch"] = _relaunch(policy, state, probe)
        for name, reason in probe.unavailable.items():
            if name not in ("rollback", "checkpoint"):  # safeguards
                availability[name] = f"no ({reason})"
        if policy.job.preempt is not None:
            availability["preempt"] = _preempt(state, probe)
    availability["ranks"] = str(state.job.world_size)
    availability["messages"] = ", ".join(channels) if channels[1:] else "console only"
    return availability


def format_capabilities(availability: Mapping[str, str]) -> str:
    """Return them as one line."""
    return " · ".join(f"{remedy}: {state}" for remedy, state in availability.items())


def is_rollback_known(policy: Policy, state: State, probe: ProbeStatus) -> bool:
    """Return whether the job has shown what a rollback can do in it."""
    if policy.mode not in ACTING_MODES:
        return True
    # Three show how far apart they are.
    enough = 3 if policy.savepoints is None else min(3, policy.savepoints.keep)
    is_decided = "rollback" in {*state.job.unavailable, *probe.unavailable}
    return is_decided or len(probe.savepoints) >= enough


def _rollback(policy: Policy, state: State, probe: ProbeStatus) -> str:
    missing = state.job.unavailable
    if not _has(policy, "rollback"):
        return f"no (policy {policy.name} never runs it)"
    if "fence" in missing:
        return f"no ({missing['fence']})"
    if reason := probe.unavailable.get("rollback") or missing.get("rollback"):
        return f"no ({reason})"
    if not probe.savepoints:
        every = "?" if policy.savepoints is None else policy.savepoints.every
        return f"not yet (savepoints are taken every {every} steps at most)"
    return "yes" + _lateness(policy, state, probe.savepoints)


def _lateness(policy: Policy, state: State, steps: Sequence[int]) -> str:
    """Say how far savepoints are apart where that is more than the policy wants, else ""."""
    every = 1 if policy.savepoints is None else policy.savepoints.every
    ends = [*steps[-2:], state.step]
    apart = max(b - a for a, b in itertools.pairwise(ends))
    # Twice: a pause, or a step that was not finite, makes one late, too.
    return f", savepoints {apart} steps apart for their cost" if apart > 2 * every else ""


def _relaunch(policy: Policy, state: State, probe: ProbeStatus) -> str:
    reason = state.job.unavailable.get("relaunch")
    if policy.job.relaunch is None:
        library = probe.trained_by
        return f"not configured ({f'{library} recognised: ' if library else ''}{INIT})"
    if reason:
        return f"no ({reason})"
    if not _has(policy, "relaunch"):
        return f"only by command (policy {policy.name} never runs it)"
    good = state.checkpoints.good()
    if not good:
        patterns = ", ".join(policy.job.checkpoints.glob)
        named = f", job.checkpoints.glob is {patterns}" if patterns else ""
        return f"not yet (no checkpoint is verified{named})"
    resumable = [checkpoint for checkpoint in good if checkpoint.resumable != WEIGHTS_ONLY]
    if not resumable:
        return f"weights only, from {good[-1].id} (no checkpoint holds an optimizer)"
    return f"yes, from {resumable[-1].id}"


def _preempt(state: State, probe: ProbeStatus) -> str:
    if state.job.world_size > 1:
        return f"no ({state.job.world_size} ranks would have to save at the same step)"
    reason = probe.unavailable.get("checkpoint")
    return f"not yet ({reason})" if reason else "yes, a checkpoint before the end"


def _has(policy: Policy, verb: str) -> bool:
    """Return whether any rule, or a crash, can lead to this action."""
    names = [rule.runbook for rule in policy.rules]
    return _leads_to(policy, [*names, policy.job.on_crash, *policy.ladder.levels], verb)


def _leads_to(policy: Policy, names: list[str | None], verb: str) -> bool:
    visited: set[str] = set()
    while names:
        book = policy.runbooks.get(names.pop() or "")
        if book is None or book.name in visited:
            continue
        if verb in book.verbs:
            return True
        visited.add(book.name)
        names += (book.if_it_fails, book.if_refused)
    return False


STALE_S = 15.0  # without a new status, written once a second; project default
SLOW_S, SLOW_STEPS = 30.0, 8  # without a step: as `heartbeat_missing`
_PHASES = {
    state_machine.LAUNCHING: "starting: no step yet",
    state_machine.WARMING: "warming up: the baselines are not complete yet",
    state_machine.HALTED: "ended",
}


def judge_status(status: Status | None, age_s: float | None = None) -> str:
    """Return `healthy`, or what is wrong or under way in a run with a supervisor, gravest first.

    Args:
        age_s: of the status, None where it is unknown.
    """
    return next(_reasons(status, age_s))


def _reasons(status: Status | None, age_s: float | None) -> Iterator[str]:
    if status is not None and status.protection_off:
        yield f"protection is off: {status.protection_off}; to go on: supervise checkpoints RUN"
    if status is None:
        yield "unknown: no status was written yet"
        return
    if age_s is not None and age_s > STALE_S:
        yield f"unknown: the supervisor has written no status for {formats.format_seconds(age_s)}"
    if status.trouble:
        yield f"no action is possible: {status.trouble}"
    elif space := status.space:
        needed, remaining = space.need_bytes / 1e6, space.reserve_bytes / 1e6
        free = f"free {needed:.1f} MB on {space.mount}"
        yield f"the disk is full: {free}; {remaining:.1f} MB in reserve"
    incident = status.incidents.open
    about = "no incident" if incident is None else f"{incident.id} {incident.severity}"
    for request in status.approvals:
        command = f"supervise approve RUN {quote(request.id)}"
        yield f"waits for a person: {command} ({request.runbook}, {about})"
    if status.state == state_machine.HOLDING:
        yield f"automatic actions are off, a person is needed: supervise release RUN ({about})"
    if status.waits_for:
        yield f"a relaunch waits for {status.waits_for}"
    if status.state == state_machine.ACTING:
        runbook = incident.runbook if incident is not None else None
        yield f"acting: {runbook or 'a runbook'} runs ({about})"
    if any(rank.paused for rank in status.rank_states().values()):
        yield f"paused: supervise resume RUN ({about})"
    if incident is not None:
        if status.state == state_machine.PROBATION:
            yield f"recovered so far, on probation ({about})"
        yield f"incident open: {about}: {incident.headline}"
    yield from _watching(status)
    yield _PHASES.get(status.state, "healthy")


# Kinds of facts about an end.
FINISHED, NOT_FINITE, DAMAGED, UNSETTLED = "finished", "not_finite", "damaged", "unsettled"
FAILED, KILLED, STOPPED, UNSUPERVISED, LOST = "failed", "killed", "stopped", "unsupervised", "lost"
SIGNALS = range(129, 193)  # exit codes of what a signal ended


class EndFact(Struct, frozen=True):
    """A fact about the end of a run."""

    kind: str
    text: str


class GoodCheckpoint(Struct, frozen=True):
    """The checkpoint that a relaunch would begin from: verified, and not suspect."""

    id: str
    step: int
    path: str


class Ending(Struct, frozen=True, kw_only=True):
    """How a run ended, or what became of it without its supervisor.

    Attributes:
        kind: of the gravest fact. text: all of them, and who must act.
        facts: the gravest first. command: of who must act, "" where nobody must.
        stopped_by: who ordered the stop that ended it, "" where nobody did.
        suspect: why newer verified checkpoints are passed over, "" for none.
    """

    kind: str
    text: str
    facts: Sequence[EndFact]
    command: str = ""
    checkpoint: GoodCheckpoint | None = None
    suspect: str = ""
    stopped_by: str = ""


def judge_ending(
    life: Life,
    status: Status | None,
    outcome: RunOutcome,
    checkpoints: Sequence[registry.Entry] = (),
    run: str = "RUN",
) -> Ending:
    """Return how a run ended that has no supervisor.

    Args:
        outcome: what its records say. checkpoints: its register. run: its name in commands.
    """
    saved = [e for e in checkpoints if e.state in registry.JUDGED and (e.present or e.pinned)]
    good = registry.find_good_checkpoint(saved, outcome)
    passed_over = registry.describe_passed_over(saved, outcome, good)
    if not life.over:
        return _left_alone(life, status, saved, good, run, passed_over)
    code, worst = life.exit_code, outcome.worst
    stop = outcome.stop if code in ASKED else None
    ended = outcome.stop_text if stop else _describe_end(life, status, outcome)
    kind = STOPPED if code in ASKED else KILLED if code in SIGNALS else FAILED
    end = EndFact(kind, ended) if code else EndFact(FINISHED, FINISHED)
    problems = list(_end_problems(status, outcome, saved, finished=code == 0))
    is_bad = end.kind in (FAILED, KILLED)
    facts = [end, *problems] if is_bad else [*problems, end]
    command = ""
    if not is_bad and {problem.kind for problem in problems} == {DAMAGED}:
        command = f"supervise checkpoints {run}"
    elif problems or is_bad:
        command = f"supervise why {run}{f' {quote(worst.id)}' if worst else ''}"
    then = [f"a person is needed: {command}"] if command else []
    return Ending(
        kind=facts[0].kind,
        text="; ".join([", ".join([end.text, *(p.text for p in problems)]), *then]),
        facts=facts,
        command=command,
        checkpoint=_checkpoint(good),
        suspect=passed_over,
        stopped_by="" if stop is None else stop.by,
    )


def _describe_end(life: Life, status: Status | None, outcome: RunOutcome) -> str:
    """Return how the job ended, and what `supervise` returned where that differs."""
    returned = None if outcome.end is None else outcome.end.exit_code
    cause = None if status is None else status.ended_by
    end = exit_code_text(life.exit_code, is_signal=bool(life.signal))
    end = f"{end}: {cause.text}" if cause else end
    return end if returned in (life.exit_code, None) else f"{end}; supervise returned {returned}"


def _end_problems(
    status: Status | None,
    outcome: RunOutcome,
    checkpoints: Sequence[registry.Entry],
    *,
    finished: bool,
) -> Iterator[EndFact]:
    """Yield what is wrong with what a run leaves, the gravest first."""
    loss = None if status is None else status.training.loss
    if loss is not None and not math.isfinite(loss):
        yield EndFact(NOT_FINITE, f"loss is {'NaN' if math.isnan(loss) else 'infinite'}")
    newest = registry.find_newest_checkpoint(checkpoints)
    if newest is not None and newest.state == registry.BAD:
        yield EndFact(DAMAGED, f"newest checkpoint {newest.id} is damaged")
    for incident in outcome.gravest if finished else ():
        if incident.unsettled and incident.severity in GRAVE:
            asked = f", {incident.unanswered} unanswered" if incident.unanswered else ""
            text = f"{incident.id} {incident.severity} unresolved at the end{asked}"
            yield EndFact(UNSETTLED, text)


def _checkpoint(good: registry.Entry | None) -> GoodCheckpoint | None:
    return None if good is None else GoodCheckpoint(good.id, good.step, good.path)


def _left_alone(
    life: Life,
    status: Status | None,
    checkpoints: Sequence[registry.Entry],
    good: registry.Entry | None,
    run: str,
    passed_over: str,
) -> Ending:
    """Return what became of a run that its supervisor left, and what adopting it gets."""
    adopt, then = f"supervise adopt {run}", ""
    fact = EndFact(LOST, "its supervisor died, and the job has ended")
    if life.job == "running":
        fact = EndFact(UNSUPERVISED, "not supervised: its supervisor died")
    elif life.job == "unknown":
        adopt, fact = "", EndFact(LOST, "its supervisor died, and no start of the job is on record")
    else:
        restarts = None if status is None else status.restarts
        lacks = ["no relaunch is configured"] if restarts is False else []
        if good is None:
            lacks.append("no checkpoint is good" if checkpoints else "no checkpoint was saved")
        then = " records how it ended"
        if lacks:
            then += f", and resumes nothing: {', '.join(lacks)}"
        elif restarts and good is not None:
            then += f", and starts it again from {good.label} if it crashed"
    return Ending(
        kind=fact.kind,
        text="; ".join([fact.text, *([adopt + then] if adopt else [])]),
        facts=[fact],
        command=adopt,
        checkpoint=_checkpoint(good),
        suspect=passed_over,
    )


def _watching(status: Status) -> Iterator[str]:
    """Yield what is no incident, and yet keeps a run from being known to be healthy."""
    last_s, speed = status.training.last_step_s, status.training.steps_per_s
    if last_s is not None and speed and last_s > max(SLOW_S, SLOW_STEPS / speed):
        yield f"no step for {formats.format_seconds(last_s)}"
    states, muted = status.rules.items(), status.muted
    firing = [rule for rule, code in states if code in ("firing", "flapping") and rule not in muted]
    if firing and status.incidents.open is None:
        yield f"no incident, firing: {', '.join(firing[:3])}"
    blind = [rule for rule, code in states if code == "blind"]
    if blind:
        yield f"partly blind: {', '.join(blind[:3])}"
    if status.tier == "T0":
        yield "no probe: only exit and signals are watched"


# The first that has a value counts: of all ranks together, else of one.
LOSSES = ("job_loss", "train_loss", "train_loss_raw")
JOB_TOKENS, RANK_TOKENS = "job_tokens", "tokens_per_update"
SPEED_FRAMES = 64  # that the speed is the mean of; project default
PAUSE_STEPS = 20  # times the median step: longer than a checkpoint mostly is; project default
# Options of training scripts that give the optimizer steps of the whole run: Trainer, Lightning,
# nanoGPT, Megatron-LM, torchtitan, diffusers, and this project's example.
DIGITS = 15  # of a count of steps, at most: Python refuses to read thousands
PLANNED = (
    *("max_steps", "max_iters", "steps", "num_steps", "total_steps", "train_iters", "max_step"),
    *("num_iterations", "max_train_steps", "training_steps", "training.steps"),
)


class TrainingProgress:
    """What the frames of a run show of its progress.

    Args:
        argv: the job's command, where the planned length may be.
        before: the progress so far, which later frames go on from.
    """

    def __init__(self, argv: Sequence[str] = (), before: Training | None = None) -> None:
        self._given = planned_steps_in(argv)
        self._columns: dict[int, tuple[Sequence[str], tuple[int, int], list[int]]] = {}
        self._steps: dict[int, int] = {}  # rank -> newest step
        self._attempt = -1
        self._recent: deque[tuple[int, int]] = deque(maxlen=SPEED_FRAMES)  # of the leader: ns, step
        self._loss: tuple[int, str, float] | None = None  # rank, metric, value
        self._tokens: tuple[float, str] | None = None  # of an update, and of what
        self._curve = Curve()
        if before is not None and before.loss is not None:
            self._loss = before.loss_rank or 0, before.loss_metric or "", before.loss
            self._curve.steps = list(before.curve.steps)
            self._curve.losses = list(before.curve.loss)

    def add_frame(self, names: Sequence[str], frame: Frame) -> None:
        """Take a frame and the names of its values."""
        if frame.attempt < self._attempt:
            return
        if frame.attempt > self._attempt:
            self._attempt = frame.attempt
            self._steps.clear()
            self._recent.clear()
        rank, values = frame.rank, frame.values
        self._steps[rank] = frame.step
        columns = self._columns.get(rank)
        if columns is None or columns[0] is not names:
            columns = self._columns[rank] = _columns(names)
        if rank == min(self._steps):
            if self._recent and frame.step <= self._recent[-1][1]:
                self._recent.clear()
            self._recent.append((frame.at_ns, frame.step))
            self._tokens = _tokens(values, columns[1])
        if self._loss is None or rank <= self._loss[0]:
            self._take_loss(names, frame, columns[2])

    def _take_loss(self, names: Sequence[str], frame: Frame, columns: Sequence[int]) -> None:
        for column in columns:
            loss = _value(frame.values, column)
            if loss is not None:
                self._loss = frame.rank, names[column], loss
                self._curve.add(frame.step, loss)
                return
            if self._loss is not None and self._loss[1] == names[column]:
                return  # absent in this step: another metric would bend the curve

    def add_newest_loss(self, before: Training) -> Training:
        """Return the progress so far with the newest loss and curve."""
        rank, metric, loss = self._loss or (None, None, None)
        curve = LossCurve(self._curve.steps, self._curve.losses)
        return msgspec.structs.replace(
            before, loss=loss, loss_metric=metric, loss_rank=rank, curve=curve
        )

    def status(
        self, planned: int | None, now_ns: int, probe: ProbeStatus | None = None
    ) -> Training:
        """Return loss, speed, time left, the curve, and how far each rank lags.

        Args:
            planned: optimizer steps of a whole run, from the policy (`job.steps`).
            probe: the status of a rank, in which a library may say the same; before the command.
        """
        total, origin = (planned, "job.steps") if planned else self._given
        reported = None if probe is None else probe.planned_steps
        if not planned and probe is not None and reported is not None and reported > 0:
            total, origin = reported, probe.trained_by
        speed = self._speed()
        step = max(self._steps.values(), default=-1)
        remaining = None if total is None else max(0, total - 1 - step)
        rank, metric, loss = self._loss or (None, None, None)
        tokens, of_what = self._tokens or (None, None)
        return Training(
            loss=loss,
            loss_metric=metric,
            loss_rank=rank,
            steps_per_s=speed,
            tokens_per_s=speed * tokens if speed and tokens else None,
            tokens_of=of_what,
            last_step_s=round((now_ns - self._recent[-1][0]) / 1e9, 1) if self._recent else None,
            planned_steps=total,
            planned_by=origin if total is not None else None,
            eta_s=round(remaining / speed) if remaining is not None and speed else None,
            lag={str(r): step - rank_step for r, rank_step in sorted(self._steps.items())},
            curve=LossCurve(self._curve.steps, self._curve.losses),
        )

    def _speed(self) -> float | None:
        """Return the steps per second; what took as long as many steps was a pause."""
        spans = [(b - a, to - since) for (a, since), (b, to) in pairwise(self._recent)]
        typical = median(ns / steps for ns, steps in spans) if spans else 0.0
        regular = [(ns, steps) for ns, steps in spans if ns / steps <= PAUSE_STEPS * typical]
        took_ns = sum(ns for ns, _ in regular)
        return sum(steps for _, steps in regular) / (took_ns / 1e9) if took_ns > 0 else None


def planned_steps_in(argv: Sequence[str]) -> tuple[int | None, str]:
    """Return the planned steps in a job's command, and the option that says so.

    Two options that disagree are none.
    """
    planned: dict[str, int] = {}
    for this, following in zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, value = this.partition("=")
        text = value if equals else following
        option = name.lstrip("-").replace("-", "_").lower()
        is_count = text.isdecimal() and len(text) <= DIGITS
        if option in PLANNED and (equals or name.startswith("--")) and is_count:
            planned[f"{name}={text}" if equals else f"{name} {text}"] = int(text)
    if len(set(planned.values())) != 1:
        return None, ""
    origin, total = next(iter(planned.items()))
    return (total, origin) if total > 0 else (None, "")


def _columns(names: Sequence[str]) -> tuple[Sequence[str], tuple[int, int], list[int]]:
    places = {name: i for i, name in enumerate(names)}
    tokens = places.get(JOB_TOKENS, -1), places.get(RANK_TOKENS, -1)
    return names, tokens, [places[name] for name in LOSSES if name in places]


def _tokens(values: Sequence[float | None], columns: tuple[int, int]) -> tuple[float, str] | None:
    for column, of_what in zip(columns, ("job", "rank"), strict=True):
        tokens = _value(values, column)
        if tokens is not None:
            return tokens, of_what
    return None


def _value(values: Sequence[float | None], column: int) -> float | None:
    return values[column] if 0 <= column < len(values) else None


FAILURES = 8  # shown of them


def build_status(
    policy: Policy,
    state: State,
    ranks: Mapping[int, RankView],
    *,
    wall: str,
    now_ns: int,
    tier: str,
    last: Decision | None,
    trouble: str | None,
) -> Status:
    """Return the status as far as the engine knows it.

    Args:
        trouble: why decisions cannot be recorded, None if they can.
    """
    pending, cause = state.approvals.pending, state.job.cause
    failures = [failure.text for failure in state.job.failures_by_cause[:FAILURES]]
    return Status(
        state=state.machine,
        mode=policy.mode,
        policy=policy.name,
        tier=tier,
        step=state.step,
        attempt=state.attempt,
        world_size=state.job.world_size,
        incidents=Incidents(state.history.opened, _open(state.incident)),
        approvals=[] if pending is None else [_request(pending, now_ns)],
        silenced={rule: text for rule in state.rules.silenced if (text := state.silence(rule))},
        muted={rule: str(cause) for rule, cause in state.rules.muted.items()},
        checkpoints_good=[checkpoint.id for checkpoint in state.checkpoints.good()][-3:],
        budgets=state.ledger.usage(policy.budgets, state.frame_count, state.at_ns),
        rules=rule_scope.rule_states(policy, state),
        ranks={
            str(rank): Payload(
                {
                    "pid": view.pid,
                    "phase": view.phase,
                    "silent_s": round((now_ns - view.seen_ns) / 1e9, 1),
                    "overhead": probe_overhead(state, rank),
                    **view.document,
                }
            )
            for rank, view in sorted(ranks.items())
        },
        last_decision=None if last is None else LastDecision(last.kind, last.reason),
        cpu_wait=cpu_wait(state),
        updated_wall=wall,
        failures=failures or None,
        ended_by=None if cause is None else EndCause(cause.text, cause.cls, cause.title),
        waits_for=_awaited(policy, state) or None,
        trouble=trouble,
        restarts=policy.mode in ACTING_MODES
        and policy.job.relaunch is not None
        and _leads_to(policy, [policy.job.on_crash], "relaunch"),
    )


def cpu_wait(state: State) -> float:
    """Return the percentage of the time that the job lately waited for CPUs that others had."""
    return max((m.value("host_cpu_wait") or 0.0 for m in state.monitors.values()), default=0.0)


def probe_overhead(state: State, rank: int | None = None) -> float | None:
    """Return the share of a step that the probe of a rank, else the leading one, took lately."""
    leader = state.leader() if rank is None else rank
    monitor = None if leader is None else state.monitors.get(leader)
    return None if monitor is None else monitor.value("probe_overhead_frac")


def _open(incident: Incident | None) -> OpenIncident | None:
    """Return the summary of the open incident."""
    if incident is None:
        return None
    return OpenIncident(
        id=incident.id,
        severity=incident.severity,
        phase=incident.phase,
        rules=incident.rules,
        headline=incident.headline,
        runbook=incident.run.runbook.name if incident.run is not None else None,
        acked=incident.acknowledged_by,
    )


def _awaited(policy: Policy, state: State) -> str:
    before_step = checkpoint_wait.awaited_checkpoint_bound(policy, state)
    awaited = checkpoint_wait.awaited_checkpoint(policy, state)
    if before_step is None or awaited is None:
        return ""
    for_s = (state.at_ns - awaited.since_ns) / 1e9
    remaining = "" if awaited.candidates is None else f", {awaited.candidates} to verify"
    return f"a verified checkpoint from before step {before_step} (for {for_s:.0f} s{remaining})"


def _request(pending: ApprovalRequest, now_ns: int) -> Request:
    """Return an approval request and its remaining time in seconds."""
    return Request(
        id=pending.id,
        incident=pending.incident,
        runbook=pending.runbook,
        steps=[RequestedStep(step.verb, step.args) for step in pending.plan],
        args_sha256=pending.sha,
        left_s=round(max(0.0, (pending.deadline_ns - now_ns) / 1e9)),
        on_timeout=pending.on_timeout,
    )


def explain_missing_probe(marks: Collection[str], reason: str | None) -> str | None:
    """Return why no step was seen, from the probe's marks; None: the probe has reported it.

    Args:
        marks: names of the probe's marks (`boot`, `armed`, `off`).
        reason: why no step was expected, None if one was.
    """
    if "off" in marks:
        return None
    if reason is not None:
        cause = reason
    elif "armed" in marks:
        cause = "the job imported torch, but made no optimizer step"
    elif "boot" in marks:
        cause = "the job runs Python, but has not imported torch"
    else:
        cause = "the probe was not loaded: no Python with our PYTHONPATH was started"
    return f"no step was seen: {cause}; only exit and signals are watched"
