"""Interface of an action, and the job as an action sees it.

An action is planned in the engine (`plan`, pure), performed by an edge (`perform`), and judged by
the frames that follow (`explain_missing_effect`, pure). It is a frozen dataclass (see
`interfaces`).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from .checkpoint_registry import Checkpoint
from .payload import NOTHING, Continuity, Json, Payload
from .values import Steps


@dataclass(frozen=True, slots=True)
class EffectCheck:
    """The first frame that can show the effect of an action, and what the action was.

    Attributes:
        args: what `plan` returned.
        result: what `perform` returned (`ack_step` is the step at whose end the probe carried it
            out).
        frame: the metrics of the frame. step, attempt: where it is.
    """

    args: Payload
    result: Payload
    frame: Mapping[str, float | None]
    step: int
    attempt: int


BUSY_SHARE = 0.1  # of a core; a process that waits uses next to nothing
BUSY_BYTES = 65536  # moved per second by reads and writes
BUSY_DEVICE = 0.05  # of the time, of the device that is used most


def is_busy(used: Mapping[str, float], within_s: float) -> bool:
    """Return whether a job works: what `Job.work` saw in `within_s` seconds is more than waiting.

    Source: project defaults; a Python process that sleeps uses under 1 % of a core.
    """
    works = used["cpu_s"] > BUSY_SHARE * within_s or used["bytes"] > BUSY_BYTES * within_s
    return works or used.get("device", 0.0) > BUSY_DEVICE


def describe_usage(used: Mapping[str, float], within_s: float) -> str:
    """Return what `Job.work` saw in `within_s` seconds, in words."""
    device = used.get("device", 0.0)
    devices = f", a device {device:.0%} in use" if device else ""
    return (
        f"{used['cpu_s']:.1f} s of CPU and {used['bytes']:.0f} bytes{devices} in {within_s:.0f} s"
    )


class Refused(Exception):  # noqa: N818, it is an answer and not a fault
    """An action that cannot work here and now; nothing was touched."""


@dataclass(frozen=True, slots=True)
class PlanContext:
    """What an action may know when its absolute arguments are worked out, inside the engine."""

    incident: str
    step: int  # newest step seen
    breach_step: int  # first breach of the incident
    attempt: int
    world_size: int
    severity: str
    unavailable: Mapping[str, str] = field(default_factory=dict)  # verb -> why it cannot be here
    good: tuple[Checkpoint, ...] = ()  # verified and free of suspicion, oldest first
    suspects: tuple[str, ...] = ()  # shards that are to blame, by more than one spike
    shards: int = 0  # how many were seen in all
    batches: tuple[int, ...] = ()  # fingerprints, from 5 steps before the breach on
    operator: str = ""  # who asked for it, when no rule did
    sound: bool = False  # the weights of before the first breach's step gave it a loss in its band
    data_event: str = ""  # how it is known that other data are being learned since then
    rate: float | None = None  # the greatest one in use up to the first breach
    rate_limit: float | None = None  # the most of it that is good, where it was tested as the cause
    rate_cleared: bool = False  # it is not the cause: the run had it before, and did well


class Job(Protocol):
    """The running job, as `perform` may use it. Calls block the performer, never the run."""

    @property
    def world_size(self) -> int: ...

    def command(
        self, verb: str, args: Payload, *, key: str, deadline_s: float
    ) -> Mapping[str, Json]:
        """Send `verb` to every rank; return what rank 0 observed, plus `ranks` and `ack_step`.

        `ack_step` is the step at whose end the probe carried it out.

        `key` makes it idempotent: a probe that has applied it answers with the same ack again.

        Raises:
            ActionError: a rank refused (`retryable=False`) or did not answer within `deadline_s`.
        """
        ...

    def snapshot(self, incident: str, *, key: str, deadline_s: float) -> Mapping[str, Json]:
        """Collect the evidence bundle; return `{"path", "sha256", "bytes", "files"}`."""
        ...

    def quarantine(self, args: Payload, *, key: str, deadline_s: float) -> Mapping[str, Json]:
        """Write the next generation of the quarantine and see that every rank's loader knows it.

        Args:
            args: `add`, `[{"kind": "shard" | "batch", "name"}]`, with `most`, how many shards may
                be in it at once; or `release`, a list of names or `{"incident"}`. And for the
                record `step`, `attempt`, `incident`, `by` and `why`.

        Returns:
            `generation`, `entries`, `takes_effect` (now, from the next pass over the data on, or at
            the next launch, then with `why`), and `ranks` that answered.

        Raises:
            ActionError: it would change nothing or too much, or a rank did not take it.
        """
        ...

    def work(self, within_s: float) -> dict[str, float]:
        """Watch the job for `within_s` seconds; return `cpu_s` used and `bytes` moved by it, and
        `device`, the largest share of the time that one of its devices was in use."""
        ...

    def stop(self, *, grace_s: float, term_s: float, exit_code: int) -> Mapping[str, Json]:
        """Ask at a step boundary, then TERM, then KILL the whole tree; return how it ended.

        `exit_code` is what the supervisor will exit with (75 requeue, 78 human needed).
        """
        ...

    def relaunch(self, args: Payload, *, key: str, deadline_s: float) -> Mapping[str, Json]:
        """Stop the gang, put a checkpoint in its place, and start the job again from it.

        Returns:
            `pid`, `attempt`, `checkpoint` and `step` of the new launch, `how` the old one ended,
            `moved` (newer checkpoints that were set aside), `failed` (what was passed over, and
            why).
        """
        ...


@dataclass(frozen=True)
class Action(ABC):  # noqa: B024, every part has a default that fits some action
    """One step of a runbook, as written in YAML.

    Class attributes:
        destructive: changes the job's training state in a way that cannot be taken back.
        ends_job: ends its processes; withdrawn when what it answers is over (see `withdrawal`).
        touches_job: False for evidence and notification; "zero actions" counts these out.
        changes_training: with several ranks all carry it out at one step, or none does.
        engine_step: True for `hold`, `notify`, `undo` and `verify`: the engine carries them out.
        budget: the budget class it is counted in besides `all`; None is not counted at all.
        deadline_s: how long `perform` may take, unless `limit_s` says otherwise.
    """

    destructive: ClassVar[bool] = False
    ends_job: ClassVar[bool] = False
    touches_job: ClassVar[bool] = True
    changes_training: ClassVar[bool] = False
    engine_step: ClassVar[bool] = False
    budget: ClassVar[str | None] = None
    deadline_s: ClassVar[float] = 60.0

    def find_errors(self) -> list[tuple[str, str]]:
        """Return `(field, message)` for every value that cannot work."""
        return []

    def limit_s(self, args: Payload) -> float:
        """Return how long `perform` may take with these arguments, in seconds. Pure."""
        return self.deadline_s

    def is_due(self, context: PlanContext) -> bool:
        """Return whether there is a reason for it; else the runbook goes on without it. Pure."""
        return True

    @property
    def budget_class(self) -> str | None:
        """The budget that this one is counted in besides `all`; None is not counted at all."""
        return self.budget

    def before(self, breach_step: int) -> int | None:
        """Return the step before which its checkpoint must have been saved; None: it needs none."""
        return None

    @property
    def is_dispensable(self) -> bool:
        """Whether the runbook goes on where the job refuses it."""
        return False

    def plan(self, context: PlanContext) -> Payload:
        """Return the absolute, JSON-ready arguments for this incident. Pure.

        Raises:
            Refused: it cannot work here; the sentence says why.
        """
        return NOTHING

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        """Do it, with the arguments that `plan` returned; return what was observed.

        Raises:
            ActionError: it did not do its job.
        """
        raise AssertionError(f"{type(self).__name__} is carried out by the engine")

    def explain_missing_effect(self, check: EffectCheck) -> str | None:
        """Look for the effect in the first frame after the action. Pure.

        Returns:
            None when the effect shows, else what is missing, in a few words with the numbers.
        """
        return None

    def objection(self, args: Payload, result: Payload) -> str:
        """Say why what it has found speaks against the rest of the runbook, "" when nothing does.

        Pure. `args` and `result` are what `plan` and `perform` returned.
        """
        return ""

    def tolerates(self, continuity: Continuity) -> bool:
        """Return whether a job that goes on otherwise than before may do so after this. Pure."""
        return True

    def undo(self) -> Action | None:
        """Return the action that takes this one back, or None."""
        return None


@dataclass(frozen=True)
class Verification(Action):
    """Steps within which the trouble must be gone, and for how many; see `actions.Verify`."""

    touches_job: ClassVar[bool] = False
    engine_step: ClassVar[bool] = True

    within: Steps = 100
    clear_for: Steps = 20
