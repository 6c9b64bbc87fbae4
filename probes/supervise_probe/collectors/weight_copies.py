"""What follows from copies of the routers' matrices; see sampling/snapshots.py for how."""

from __future__ import annotations

from ..sampling.sample_sets import DEFAULTS
from ..spec import MetricSpec
from . import Collector as Base

COST = "on a sampled step, a copy of at most 32 MB"
EVERY = DEFAULTS["weights"]

METRICS = (
    MetricSpec(
        "router_weight_similarity",
        "1",
        "Mean pairwise cosine of a router's expert rows, mean over routers.",
        "(E |mean w/|w||^2 - 1) / (E - 1), arXiv:2606.28116",
        COST,
        EVERY,
    ),
    MetricSpec(
        "router_conditioning",
        "1",
        "Largest centred expert row over the mean row, of the worst router.",
        "max |w - mean w| / |mean w|, arXiv:2606.28116",
        "",
        EVERY,
    ),
)


class Collector(Base):
    """Holds nothing; the work is done when a copy has arrived."""
