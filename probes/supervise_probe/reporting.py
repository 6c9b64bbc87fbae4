"""Numbers that the job reports itself; they join the frame of the step under way.

What is no number is left out, and a report can never fail in the job. Values on an accelerator are
not waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    from .probe import Probe


def take(probe: Probe, values: Mapping[str, Any]) -> None:
    """Keep `values` for the next frame, as many as a frame has room for."""
    if not probe.adapted:
        probe.adapted = True
        probe.status_changed()
    pending = probe.boundary.reported
    for name, value in values.items():
        if len(pending) >= probe.config.capacity and name not in pending:
            return
        if isinstance(value, probe.torch.Tensor) and value.numel() == 1:
            pending[name] = probe.scalars.value(value)
        elif isinstance(value, (int, float)):
            pending[name] = float(value)
        elif hasattr(value, "item"):
            pending[name] = float(value.item())


def shard(probe: Probe, name: Any, offset: Any) -> None:
    """The next batch comes from there; one of an evaluation is no step's."""
    if probe.torch.is_grad_enabled() and not probe.off_duty():
        probe.collectors["shards"].shards.tell(name, offset)


def is_quarantined(probe: Probe, name: Any) -> bool:
    """Whether a shard of this name is in quarantine."""
    held: bool = probe.collectors["quarantine"].asks(name)
    return held


def tell_rest(probe: Probe) -> None:
    """The process ends: what was reported for a frame that never came is told in words."""
    rest = {k: v for k, v in probe.boundary.reported.items() if isinstance(v, float)}
    if rest:
        told = ", ".join(f"{name} {value:.6g}" for name, value in rest.items())
        probe.notice("note", f"after the last step: {told}", rest)
