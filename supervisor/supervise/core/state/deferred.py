"""What waits until that which is under way about an incident has come to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..model.events import Told


@dataclass(slots=True)
class Deferred:
    """What is done later.

    Attributes:
        waiting: ids of rules to be answered then; see `handlers/rule_fired`.
        wanted: words of operators; see `handlers/operator_commands`.
        anew: the runbook that is asked for again, its rung, why, climbed; see `runbooks/runner`.
        lacked: number of the newest run, when it was refused for want of a good checkpoint: its
            runbook, why it was to run, climbed; see `runbooks/checkpoint_choice`.
        over: the training of the incident is, why: it is closed; see `handlers/session_change`.
    """

    waiting: list[str] = field(default_factory=list)
    wanted: list[Told] = field(default_factory=list)
    anew: tuple[str, int, str, bool] | None = None
    lacked: tuple[int, str, str, bool] | None = None
    over: str = ""
