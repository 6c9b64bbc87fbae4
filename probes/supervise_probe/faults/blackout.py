"""The probe publishes nothing while the job trains, as when telemetry breaks."""

from __future__ import annotations

from typing import ClassVar, Mapping, Tuple

from . import Fault, Value


class Blackout(Fault):
    """No frame is published."""

    MEANING = "publish no frames for some steps"
    PARAMS: ClassVar[Mapping[str, Tuple[Value, str]]] = {"steps": (100, "for so many steps")}
    silent = True


FAULT = Blackout
