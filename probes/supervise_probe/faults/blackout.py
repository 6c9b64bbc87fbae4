"""The probe publishes nothing while the job trains, as when telemetry breaks."""

from __future__ import annotations

from typing import ClassVar

from . import Fault, Params


class Blackout(Fault):
    """No frame is published."""

    MEANING = "publish no frames for some steps"
    PARAMS: ClassVar[Params] = {"steps": (100, "for so many steps")}
    silent = True
