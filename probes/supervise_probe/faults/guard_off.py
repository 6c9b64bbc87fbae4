"""The job's own clip of its gradients is off, as after a setting that a restart has lost.

A clip by torch's functions is not made while it acts: the call returns the norm, where it returns
one, and leaves the gradients as they are. The probe sees no clip then, as where there is none: a
call that goes on and clips nothing, as on a list without parameters, is no such fault. Neither are
FSDP1's own method nor the clips of engines that hold the optimizer. The norm of sharded gradients
is a collective, so there all ranks have to be without the clip, or none.
"""

from __future__ import annotations

from typing import Any, ClassVar, List

from . import CannotActError, Fault, Params


class GuardOff(Fault):
    """Turns the job's clips into measurements of the norm."""

    MEANING = "let the job's clips of its gradients do nothing"
    MOVES = "guard_active"
    PARAMS: ClassVar[Params] = {"steps": (0, "for so many steps; 0: for the rest of the run")}

    _called = False

    def clips(self) -> bool:
        self._called = True
        return False

    def before_update(self, params: List[Any]) -> None:
        if not self._called:
            raise CannotActError("the job clips no gradients by torch.nn.utils before its step")
