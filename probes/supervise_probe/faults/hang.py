"""The job hangs in a step, as in a collective whose partner died. Signals are handled."""

from __future__ import annotations

import time
from typing import ClassVar

from . import Fault, Params


class Hang(Fault):
    """Sleeps, once."""

    MEANING = "stand still inside the step"
    PARAMS: ClassVar[Params] = {"seconds": (0.0, "how long; 0 means for ever")}

    def block(self) -> None:
        seconds = float(self.params["seconds"])
        end = time.monotonic() + seconds
        while not seconds or time.monotonic() < end:
            time.sleep(0.05)
