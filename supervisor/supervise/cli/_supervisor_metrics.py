"""Which metrics the supervisor measures beside the job: what it may add to a rank's frames."""

from __future__ import annotations

from ..checkpoints import notifications
from ..inputs import cross_rank_metrics, hardware

METRICS = (*cross_rank_metrics.METRICS, *hardware.METRICS, *notifications.METRICS)
