"""Effects of the safeguards on the current step, for the collectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Optional

if TYPE_CHECKING:
    from .scalars import Number


class InForce:
    """Written by the safeguards; read by the step tracker and the collector `limits`.

    Attributes:
        acting: whether any safeguard may have something to do around a step. Whoever puts something
            in force sets it; it is taken back at the end of a step when all of them are idle.
        clip_bound: what the gradient norm is limited to; None: nothing is limited.
        zeroed: whether `zero_nonfinite` fired in this step; None where it is not armed.
        clipped: whether an update of this step was shortened; None where none was judged.
        outlier: whether `skip_outliers` skipped this step's update; None where it is not ordered.
        guards: by name, whether what the policy orders against outliers is in place.
    """

    __slots__ = ("acting", "clip_bound", "clipped", "guards", "outlier", "zeroed")

    def __init__(self) -> None:
        self.acting = True
        self.clip_bound: Optional[float] = None
        self.zeroed: Optional[Number] = None
        self.clipped: Optional[Number] = None
        self.outlier: Optional[float] = None
        self.guards: Dict[str, bool] = {}
