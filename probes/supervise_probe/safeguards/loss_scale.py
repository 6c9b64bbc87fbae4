"""The command `loss_scale`: the job's GradScaler restarts from a scale."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Dict

from ..errors import Refused

if TYPE_CHECKING:
    from ..torch_state.registry import Registry


class LossScale:
    """Writes into the scalers of the job, in place: no device is waited for.

    Source: torch/amp/grad_scaler.py; `_growth_tracker` counts steps since the scale last changed.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def do_loss_scale(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """Set the scale of every enabled scaler to `scale`, or None: to its initial one.

        The step boundary comes before the job's own `scaler.update()`: after an overflow, the next
        step has `backoff` times this scale.
        """
        scalers = [each for each in self._registry.scalers if each.is_enabled()]
        if not scalers:
            raise Refused("the job has no GradScaler that is enabled")
        asked = args.get("scale")
        if asked is not None and not 0.0 < float(asked) < inf:
            raise Refused(f"a loss scale must be finite and above 0, not {asked}")
        for scaler in scalers:
            value = float(scaler._init_scale if asked is None else asked)
            if scaler._scale is None:  # made at its first use
                scaler._init_scale = value
                continue
            scaler._scale.fill_(value)
            scaler._growth_tracker.fill_(0)
        return {"loss_scale": value, "backoff": float(scalers[-1].get_backoff_factor())}
