"""A forward that takes longer, as on a device that throttles; on one rank it makes a straggler."""

from __future__ import annotations

import time
from typing import Any, ClassVar, List, Mapping

from . import Args, Call, Fault, Kwargs, Params, Value


class SlowCompute(Fault):
    """Sleeps inside each forward of the outermost module."""

    MEANING = "let each forward take longer for some steps"
    MOVES = "step_time"
    PARAMS: ClassVar[Params] = {
        "seconds": (0.05, "longer"),
        "steps": (100, "for so many steps"),
    }

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        super().__init__(torch, params)
        self._handles: List[Any] = []

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        if not self._handles:
            self._handles.append(root.register_forward_pre_hook(self._sleep))
        return args, kwargs

    def end(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _sleep(self, module: Any, args: Any) -> None:
        time.sleep(float(self.params["seconds"]))
