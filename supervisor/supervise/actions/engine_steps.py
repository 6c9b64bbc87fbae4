"""Steps of a runbook that the engine carries out, without a command to the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action, Verification


@dataclass(frozen=True)
class Notify(Action):
    """Send the incident as it stands to every notifier whose least severity it reaches.

    The engine decides it and the outbox delivers it: a notifier that is slow or fails never holds
    up the runbook.

    Example:
        - notify

    Undo: none.
    Source: the outbox pattern: the intent is on disk before the message is sent, so that neither a
        crash nor a dead receiver loses it.
    """

    touches_job: ClassVar[bool] = False
    engine_step: ClassVar[bool] = True


@dataclass(frozen=True)
class Hold(Action):
    """Turn automatic actions off until `supervise release RUN`; the job keeps training.

    For what no action can mend, such as a wrong configuration: later rules are told, and answered
    by nothing. It is the last step, and a runbook that ends so only takes evidence and tells. When
    the evidence cannot be had, it holds all the same. The engine carries it out.

    Example:
        - hold

    Undo: none; a person releases it.
    Source: an andon stop: what the line cannot mend by itself is left to a person, with what was
        seen; here without a stop of the line.
    """

    touches_job: ClassVar[bool] = False
    engine_step: ClassVar[bool] = True


@dataclass(frozen=True)
class Undo(Action):
    """Take back, newest first, what earlier runbooks of this incident did and is in force.

    What a runbook did that was not verified is taken back by itself, before the next rung. So this
    is for one that begins while an earlier one is still being verified, or on its probation. The
    engine carries it out as intents of its own; actions without an `undo` stay.

    Example:
        - undo

    Undo: none needed; what it takes back can be done again.
    Source: sagas (Garcia-Molina and Salem, SIGMOD 1987): compensations run in reverse order.
    """

    engine_step: ClassVar[bool] = True


@dataclass(frozen=True)
class Verify(Verification):
    """Within `within` steps the trouble must have been gone for `clear_for` steps in a row.

    Gone means: every action showed its effect in the next frame (the rate really lower, the step
    really back), no rule of the incident is in breach or cannot be judged, and the loss is back
    under the band it had before the first breach. After a rollback or a relaunch the step of the
    first breach must have been passed too, and the median of these losses be in the band; quiet
    steps up to there are not counted in `within`. The engine watches it. When it does not come
    true, the runbook has failed and the ladder climbs. Every runbook that touches the job ends so.

    Example:
        - verify: {within: 100, clear_for: 20}

    Undo: none needed; it touches nothing.
    Source: an incident that resolved is one whose signal stayed away for a while, as Prometheus'
        keep_firing_for learnt; 20 steps outlast the single good step inside a divergence.
    """

    def find_errors(self) -> list[tuple[str, str]]:
        if self.clear_for < 1:
            return [("clear_for", f"must be at least 1 step, not {self.clear_for}")]
        if self.within < self.clear_for:
            text = f"must be at least clear_for ({self.clear_for} steps), not {self.within}"
            return [("within", text)]
        return []
