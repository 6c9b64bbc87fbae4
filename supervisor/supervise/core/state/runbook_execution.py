"""A runbook in progress: why it was started, what it is doing, how it failed, whether it helped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..model.action import Action
from ..model.decisions import PlannedStep
from ..model.payload import NOTHING, Payload
from ..model.policy import Runbook


@dataclass(slots=True)
class Intent:
    """What is being performed, or was last.

    Attributes:
        action_id: id of the action whose outcome is awaited, None when none is.
        action: the action itself. verb, args: its name, and its absolute arguments.
        deadline_ns: when the outcome is in doubt.
    """

    action_id: str | None = None
    action: Action | None = None
    verb: str = ""
    args: Payload = NOTHING
    deadline_ns: int = 0

    def awaits(self, verb: str) -> bool:
        """Return whether the outcome of such an action is awaited."""
        return self.action_id is not None and self.verb == verb


@dataclass(slots=True)
class OperatorRequest:
    """Who asked for it, and from where it goes on.

    Attributes:
        operator: "" when a rule asked for it. held: the incident was held when it was asked.
        before: the step that the operator goes back to before.
    """

    operator: str = ""
    held: bool = False
    before: int | None = None


@dataclass(slots=True)
class RunbookFailure:
    """What becomes of a runbook that cannot go on.

    Attributes:
        reason: why it failed, while it is being compensated; None: it has not.
        pending_undos: compensations still to do.
        ineffective: it did not help: what is undone, and then the next level.
        exhausted: nothing else may be tried: no budget, or an undo failed.
        refused: the job refused its step, and nothing was touched.
        withdrawn: its reason was gone before it acted: nothing is tried instead.
        pause_ended: why the job is not paused any more, though this runbook relies on it.
        ranks_differ: some ranks did a step and others did not: no other command may follow.
    """

    reason: str | None = None
    pending_undos: list[Action] = field(default_factory=list)
    ineffective: bool = False
    exhausted: bool = False
    refused: bool = False
    withdrawn: bool = False
    pause_ended: str = ""
    ranks_differ: bool = False


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a runbook was started, as far as that can go away (see `withdrawal`).

    Attributes:
        rules: ids of the rules that asked for it.
        frames: for a standstill, rank -> frames that it had sent by then; None for other reasons.
    """

    rules: tuple[str, ...]
    frames: dict[int, int] | None = None


@dataclass(slots=True)
class StartTerms:
    """How a runbook came to be started.

    Attributes:
        reason: None: a person's order, or nothing that can go away.
        escalated: it was not asked for: what is below it on the ladder was tried.
        substitute: it stands in for one that could not work here.
        entry_level: the incident's level before it was started.
        reduced_reason: why only evidence is taken and people are told.
        repeated: that was known before, and told.
        approved: verbs and arguments that were allowed.
        waits: it only pauses the job while a checkpoint is verified.
    """

    reason: Reason | None = None
    escalated: bool = False
    substitute: bool = False
    entry_level: int = -1
    reduced_reason: str = ""
    repeated: bool = False
    approved: list[PlannedStep] | None = None
    waits: bool = False


class AwaitedEffect(NamedTuple):
    """An action that was done, whose effect no frame has shown yet.

    Attributes:
        place: of its step in the runbook. seen_attempt: attempt of the frames before it.
    """

    place: int
    verb: str
    args: Payload
    result: Payload
    seen_attempt: int


@dataclass(slots=True)
class VerificationProgress:
    """What the frames after a runbook have shown.

    Attributes:
        deadline_frame: frame count at which it has failed, None before it is verified.
        frame_ns: when the newest frame to verify by came.
        effects: actions that have shown none so far.
        clear_steps: frames in a row without trouble. last_trouble: what stood against it.
        seen_clear: (rule of SEV0, rank) that was clear meanwhile.
        rejected: what the job says against it: it does not go on as it should.
    """

    deadline_frame: int | None = None
    frame_ns: int = 0
    effects: list[AwaitedEffect] = field(default_factory=list)
    clear_steps: int = 0
    last_trouble: str = ""
    seen_clear: set[tuple[str, int]] = field(default_factory=set)
    rejected: str = ""


@dataclass(slots=True)
class RunbookExecution:
    """A runbook in progress.

    Attributes:
        number: of the runbooks of its incident, from 1. severity: of that when it was started.
        index: the step that waits, is performed, or is verified.
        done: indices of steps that were committed.
        standstill: why the job stands still, as its evidence says; "" where it does not.
        intent, requested, terms, verification, failure: see their classes.
    """

    number: int
    runbook: Runbook
    severity: str
    index: int = 0
    done: list[int] = field(default_factory=list)
    standstill: str = ""
    intent: Intent = field(default_factory=Intent)
    requested: OperatorRequest = field(default_factory=OperatorRequest)
    terms: StartTerms = field(default_factory=StartTerms)
    verification: VerificationProgress = field(default_factory=VerificationProgress)
    failure: RunbookFailure = field(default_factory=RunbookFailure)

    def is_busy(self) -> bool:
        """Return whether a step is being performed, or taken back."""
        return self.intent.action_id is not None or self.failure.reason is not None
