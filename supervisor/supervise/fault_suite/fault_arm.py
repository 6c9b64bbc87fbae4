"""One run of a drill suite: its series, what its rules detections, what was done to the job."""

from __future__ import annotations

from dataclasses import dataclass

from ..canary.arms import Arm

PAGES = ("SEV0", "SEV1")


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule fired for a frame. `step`: of that frame, 0-based."""

    rule: str
    severity: str
    step: int


@dataclass(frozen=True, slots=True)
class Act:
    """An action on the job was ordered after step `step`; `done`: it was carried out."""

    verb: str
    step: int
    done: bool


@dataclass(frozen=True, slots=True)
class FaultArm:
    """A run with a fault, or a healthy one.

    Attributes:
        arm: its series; of a step made again, the newest values.
        made: steps that were made, those made again included.
        injected: the first step with the fault; None: it did not come.
        refused: why the fault cannot act on this job, "" if it can.
        alarms: from the fault on; of a healthy run all. Oldest first.
        acts: likewise.
    """

    arm: Arm
    made: int
    injected: int | None = None
    refused: str = ""
    alarms: tuple[Alarm, ...] = ()
    acts: tuple[Act, ...] = ()

    @property
    def repeated(self) -> int:
        """How many steps were made more than once."""
        return self.made - len(self.arm.steps)
