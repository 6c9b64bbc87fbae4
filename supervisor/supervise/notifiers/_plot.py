"""A picture of the loss around an incident, where matplotlib (extra `plots`) is installed."""

from __future__ import annotations

import io
from collections.abc import Sequence

from ..core.model.interfaces import LossCurve

WIDTH, HEIGHT, DPI = 7.0, 2.6, 110  # inches; 770 x 286 pixels, as wide as a thread on a phone needs
SHOWN, ABANDONED, OPENED = "#2b6cb0", "#b8c4d0", "#c53030"


def png(curve: LossCurve) -> bytes | None:
    """Return a PNG of the loss by step, undone steps paler; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    newest = max(curve.attempts, default=0)
    for attempt in sorted(set(curve.attempts)):
        steps = _of(attempt, curve, curve.steps)
        values = _of(attempt, curve, curve.values)
        axes.plot(steps, values, color=SHOWN if attempt == newest else ABANDONED, linewidth=1.4)
    axes.axvline(curve.opened_at, color=OPENED, linewidth=1.0, linestyle="--")
    axes.set_xlabel("step")
    axes.set_ylabel(curve.metric)
    axes.spines[["top", "right"]].set_visible(False)
    found = io.BytesIO()
    figure.savefig(found, format="png")
    return found.getvalue()


def _of(attempt: int, curve: LossCurve, values: Sequence[float]) -> list[float]:
    return [v for v, of in zip(values, curve.attempts, strict=True) if of == attempt]
