"""Hold: stop acting and wait for a person, with the evidence that the steps before it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action


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
