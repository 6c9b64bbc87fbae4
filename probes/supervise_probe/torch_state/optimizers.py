"""The optimizers that have stepped, in order of first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List

if TYPE_CHECKING:
    from .records import OptimizerInfo


class Optimizers:
    """Those of one process.

    Attributes:
        known: what stays the same of each, by its id. Some may be gone.
    """

    def __init__(self) -> None:
        self.known: Dict[int, OptimizerInfo] = {}

    def living(self) -> List[Any]:
        """Return those that the job still holds."""
        return [o for known in self.known.values() if (o := known.reference()) is not None]

    def parameters(self) -> List[Any]:
        """Return all parameters of the living ones, one in two of them twice."""
        return [p for o in self.living() for group in o.param_groups for p in group["params"]]
