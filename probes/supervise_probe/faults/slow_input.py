"""Every batch comes late, as from slow storage; on one rank it makes a straggler."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from . import Args, Call, Fault, Kwargs, Params


class SlowInput(Fault):
    """Sleeps before each forward."""

    MEANING = "wait in front of each forward for some steps"
    MOVES = "step_time"
    PARAMS: ClassVar[Params] = {
        "seconds": (0.1, "in front of each"),
        "steps": (100, "for so many steps"),
    }

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        time.sleep(float(self.params["seconds"]))
        return args, kwargs
