"""The metrics that our collectors measure, by id, as their files list them in `METRICS`.

A policy may name others: a job can report its own. So an unknown id is a warning, never an error.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module

from supervise_probe import collectors
from supervise_probe.spec import MetricSpec

_NUMBERED = re.compile(r"\.(?:[0-9]+|<i>)$")  # learning_rate.1: one per parameter group


@cache
def known() -> Mapping[str, MetricSpec]:
    """Return what the collectors measure, by id, in the order of their files."""
    found: dict[str, MetricSpec] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(collectors.__path__)):
        module = import_module(f"{collectors.__name__}.{name}")
        for spec in getattr(module, "METRICS", ()):
            found[spec.id] = spec
    return found


def is_known(metric: str) -> bool:
    """Return whether a collector measures this metric."""
    return metric in known() or _NUMBERED.sub("", metric) in _families()


@cache
def _families() -> frozenset[str]:
    return frozenset(_NUMBERED.sub("", metric) for metric in known())


def near(metric: str) -> list[str]:
    """Return the ids to look for a near miss in: those that contain the word, else all."""
    return [name for name in known() if metric in name] or list(known())
