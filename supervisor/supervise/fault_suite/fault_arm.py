"""One run of a drill suite: its series, the alarms of its rules, and the actions on the job."""

from __future__ import annotations

from dataclasses import dataclass

from ..canary.arms import Arm

PAGES = ("SEV0", "SEV1")


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule fired for a frame, and nothing muted it. `step`: of that frame, 0-based."""

    rule: str
    severity: str
    step: int


@dataclass(frozen=True, slots=True)
class Act:
    """An action on the job, ordered after step `step`; `done`: it was carried out."""

    verb: str
    step: int
    done: bool


@dataclass(frozen=True, slots=True)
class FaultArm:
    """A run with a fault, or a healthy one.

    Attributes:
        arm: its series; of a step made again, the newest values.
        repeated: steps that were made more than once.
        injected: the first step with the fault; None: it did not come.
        refused: why the fault cannot act on this job, "" if it can.
        alarms: oldest first, one of a rule and step. acts: likewise.
    """

    arm: Arm
    repeated: int = 0
    injected: int | None = None
    refused: str = ""
    alarms: tuple[Alarm, ...] = ()
    acts: tuple[Act, ...] = ()
