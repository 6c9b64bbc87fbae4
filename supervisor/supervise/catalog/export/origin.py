"""Where each part of a policy was written, what it reads, who measures that, and what reads it."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from ...core.model.policy import detectors_behind
from ..assembly.freeze import BuiltRule, Draft
from ..assembly.pack import PACKS, Entry
from ..document import yaml_reader
from ..document.diagnostics import Place, Problems
from ..document.nodes import Mapping, plain
from ..document.yaml_writer import inline
from ..forms.part_types import BASELINE_KEYS
from ..inventory import metrics, shipped
from ..schema.dataclass_types import keys_of

PROBE, SUPERVISOR, JOB, NONE = "probe", "supervisor", "job", "nobody"
BY = {
    PROBE: "measured by the probe",
    SUPERVISOR: "measured by the supervisor",
    JOB: "to be reported by the job",
    NONE: "not measured yet",
}


def place(at: Place) -> str:
    """Return `file:line:col`."""
    return f"{at.source.label}:{at.line}:{at.col}"


def _entry(entry: Entry) -> dict[str, Any]:
    changed = {key: place(at) for key, at in entry.overridden.items()}
    return {"defined": place(entry.node), "overridden": changed}


def detector(draft: Draft, name: str) -> dict[str, Any]:
    """Return where a detector was defined, what was overridden, what it has from the baseline."""
    entry, built = draft.parts.detectors[name], draft.detectors[name]
    given = entry.node.pairs if isinstance(entry.node, Mapping) else {}
    keeps = all(key in keys_of(type(built)) for key in BASELINE_KEYS)
    filled = [key for key in BASELINE_KEYS if keeps and key not in given]
    return {
        **_entry(entry),
        "metrics": list(built.metrics),
        "detectors": list(built.detectors),
        "baseline": filled,
    }


def rule(draft: Draft, made: BuiltRule, beside: Collection[str]) -> dict[str, Any]:
    """Return what a rule reads, directly and through detectors, and what can mute it."""
    behind = list(detectors_behind(draft.detectors, made.rule.uses))
    needed = dict.fromkeys(m for name in behind for m in draft.detectors[name].metrics)
    mutes = [i.by_rule or ", ".join(i.by_state) for i in draft.inhibit if made.rule.id in i.mute]
    return {
        **_entry(made.entry),
        "detectors": behind,
        "metrics": list(needed),
        "to_report": [name for name in needed if measured_by(name, beside) == JOB],
        "muted_by": mutes,
    }


def measured_by(metric: str, beside: Collection[str]) -> str:
    """Return who measures a metric: one of `PROBE`, `SUPERVISOR`, `JOB`, `NONE`.

    Args:
        beside: the ids of what the supervisor measures beside the job.
    """
    spec = metrics.spec_of(metric)
    if spec is not None and spec.id in metrics.known():
        return PROBE
    if metric in beside:
        return SUPERVISOR
    return NONE if spec is not None and spec.id in metrics.NOT_COVERED else JOB


def metric(name: str, beside: Collection[str]) -> dict[str, Any]:
    """Return a metric's source, unit and meaning."""
    spec = metrics.spec_of(name)
    known = {} if spec is None else {"unit": spec.unit, "meaning": spec.meaning}
    return {"measured_by": measured_by(name, beside), **known}


def facts(draft: Draft, beside: Collection[str]) -> dict[str, Any]:
    """Return everything that `show` prints besides the policy itself.

    Args:
        beside: the ids of what the supervisor measures beside the job.
    """
    rules = {made.rule.id: rule(draft, made, beside) for made in draft.rules}
    used = dict.fromkeys(m for found in draft.detectors.values() for m in found.metrics)
    return {
        "detectors": {name: detector(draft, name) for name in draft.detectors},
        "rules": rules,
        "metrics": {name: metric(name, beside) for name in used},
    }


def readers(metric: str) -> dict[str, str]:
    """Return `{"pack.detector": "robust_z, gt: 6.0, ..."}` for a metric, in order of the packs."""
    found: dict[str, str] = {}
    for name, detector in _detectors():
        if detector.get("metric") == metric or metric in detector.get("metrics", ()):
            keys = {
                key: value for key, value in detector.items() if key not in ("metric", "metrics")
            }
            found[name] = inline(keys).strip("{}")
    return found


@cache
def _detectors() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for pack in shipped.names(PACKS):
        path = shipped.folder(PACKS) / f"{pack}.yaml"
        root = yaml_reader.read(path, shipped.label(path), problems := Problems())
        problems.stop()
        section = root.get("detectors") if root is not None else None
        if isinstance(section, Mapping):
            for name, detector in plain(section).items():
                found.append((f"{pack}.{name}", detector))
    return found
