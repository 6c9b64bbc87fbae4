"""The process dies in the middle of a step, as from a segmentation fault or without memory."""

from __future__ import annotations

import os
from typing import ClassVar

from . import Fault, Params


class Crash(Fault):
    """Sends its own process a signal; other ranks lose a partner."""

    MEANING = "die inside the step"
    PARAMS: ClassVar[Params] = {"signal": (9, "its number")}

    def block(self) -> None:
        os.kill(os.getpid(), int(self.params["signal"]))
