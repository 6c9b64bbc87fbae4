"""When the trouble of an incident began, and with which data; see `incidents/data_suspicion`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Onset:
    """The newest begin of a trouble that its shards were blamed for, and what came of it.

    Attributes:
        attempt, breach: where it began, -1 before any. advisory: only rules of SEV2 told of it.
        last: newest step of it whose batch is known to be part of the trouble.
        frame_count, step: of the newest frame in which a rule of the incident was in breach.
        lull: the last step in breach before `QUIET_STEPS` without, when there were as many since.
        batches: fingerprints of the steps up to it, and of those in breach.
    """

    attempt: int = -1
    breach: int = -1
    advisory: bool = False
    last: int = -1
    frame_count: int = 0
    step: int = -1
    lull: int | None = None
    batches: tuple[int, ...] = ()
