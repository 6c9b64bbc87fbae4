"""The metrics that have a name: what our collectors measure, by id, and the other standard ids.

A policy may name others: a job can report its own. So an unknown id is a warning, never an error.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module

from supervise_probe import collectors
from supervise_probe.spec import MetricSpec

from . import standard_metrics


@cache
def known() -> Mapping[str, MetricSpec]:
    """Return what the collectors measure, by id, in the order of their files."""
    found: dict[str, MetricSpec] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(collectors.__path__)):
        module = import_module(f"{collectors.__name__}.{name}")
        for spec in getattr(module, "METRICS", ()):
            found[spec.id] = spec
    return found


@cache
def everything() -> Mapping[str, MetricSpec]:
    """Return every metric that has a standard id: measured ones first."""
    return {**known(), **{spec.id: spec for spec in standard_metrics.METRICS}}


def is_known(metric: str) -> bool:
    """Return whether the id is a standard one, or one member of such a family."""
    return spec_of(metric) is not None


def spec_of(metric: str) -> MetricSpec | None:
    """Return the spec of an id: `learning_rate.3` is a `learning_rate.<i>`.

    A metric of the probe has the members that its spec lists. One that a job reports may have
    others: `spectral_radius.head`.
    """
    base, found = metric, everything().get(metric)
    while found is None and "." in base:
        base = base.rpartition(".")[0]
        family = everything().get(f"{base}.<i>")
        found = family or everything().get(base)
        member = metric[len(base) + 1 :]
        if family is not None and not (member.isdecimal() or f"`.{member}`" in family.meaning):
            return None
    if found is None or metric in everything() or found.id.endswith(".<i>"):
        return found
    return found if found.id not in known() or "append" in found.meaning else None


def near(metric: str) -> list[str]:
    """Return the candidates for a near miss: ids that contain the text, else all."""
    return [name for name in everything() if metric in name] or list(everything())
