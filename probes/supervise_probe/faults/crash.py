"""The process dies in the middle of a step, as of a segmentation fault or for want of memory."""

from __future__ import annotations

import os
from typing import ClassVar, Mapping, Tuple

from . import Fault, Value


class Crash(Fault):
    """Sends the own process a signal; with several ranks the others meet a partner that is gone."""

    MEANING = "die inside the step"
    PARAMS: ClassVar[Mapping[str, Tuple[Value, str]]] = {"signal": (9, "its number")}

    def block(self) -> None:
        os.kill(os.getpid(), int(self.params["signal"]))


FAULT = Crash
