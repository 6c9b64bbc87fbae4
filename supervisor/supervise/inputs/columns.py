"""Which metrics the supervisor measures beside the job: what it may add to a rank's frames."""

from __future__ import annotations

from . import hardware, ranks
from .checkpoints import news

METRICS = (*ranks.METRICS, *hardware.METRICS, *news.METRICS)
