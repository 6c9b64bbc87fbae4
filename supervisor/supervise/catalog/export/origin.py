"""Origin of each part of a policy, the metrics that it reads, and their sources."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any, NamedTuple

from ...core.model.interfaces import Detector
from ...core.model.policy import detectors_behind
from ..assembly.expression import parse
from ..assembly.freeze import BuiltRule, Draft
from ..assembly.pack import PACKS, Entry
from ..document import yaml_reader
from ..document.diagnostics import Place, Problems
from ..document.nodes import Mapping, plain
from ..document.yaml_writer import inline
from ..forms.part_types import BASELINE_KEYS, read_detector
from ..inventory import metrics, shipped
from ..schema.dataclass_types import keys_of

PROBE, SUPERVISOR, JOB = "probe", "supervisor", "job"
BY = {
    PROBE: "measured by the probe",
    SUPERVISOR: "measured by the supervisor",
    JOB: "to be reported by the job",
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
    """Return who measures a metric: one of `PROBE`, `SUPERVISOR`, `JOB`.

    Args:
        beside: the ids of what the supervisor measures beside the job.
    """
    spec = metrics.spec_of(metric)
    if spec is not None and spec.id in metrics.known():
        return PROBE
    return SUPERVISOR if metric in beside or (spec is not None and spec.id in beside) else JOB


def metric(name: str, beside: Collection[str]) -> dict[str, Any]:
    """Return a metric's source, unit and meaning."""
    spec = metrics.spec_of(name)
    known = {} if spec is None else {"unit": spec.unit, "meaning": spec.meaning}
    return {"measured_by": measured_by(name, beside), **known}


def sections(draft: Draft) -> dict[str, str]:
    """Return where the sections of a policy that extends another one were written, by key."""
    root, found = draft.root, dict[str, str]()
    if not isinstance(root, Mapping) or "extends" not in root.pairs:
        return found
    for key, (at, value) in root.pairs.items():
        keys = value.pairs if isinstance(value, Mapping) else {}
        from_base = [name for name, (own, _) in keys.items() if own.source is not at.source]
        places = dict.fromkeys(keys[name][0].source.label for name in from_base)
        rest = f"; {', '.join(from_base)} from {', '.join(places)}" if from_base else ""
        found[key] = f"{place(at)}{rest}"
    return found


def facts(draft: Draft, beside: Collection[str]) -> dict[str, Any]:
    """Return everything that `show` prints besides the policy itself.

    Args:
        beside: the ids of what the supervisor measures beside the job.
    """
    rules = {made.rule.id: rule(draft, made, beside) for made in draft.rules}
    used = dict.fromkeys(m for found in draft.detectors.values() for m in found.metrics)
    return {
        "sections": sections(draft),
        "detectors": {name: detector(draft, name) for name in draft.detectors},
        "rules": rules,
        "metrics": {name: metric(name, beside) for name in used},
    }


def readers(metric: str) -> dict[str, str]:
    """Return `{"pack.detector": "robust_z, gt: 6.0, ..."}` for a metric, in order of the packs."""
    return {
        f"{pack.name}.{name}": inline(pack.written[name]).strip("{}")
        for pack in _packs()
        for name, detector in pack.detectors.items()
        if _reads(detector, metric)
    }


def judges(metric: str) -> list[str]:
    """Return the shipped rules, as `pack.rule`, that read a metric directly or through others."""
    return [
        f"{pack.name}.{rule}"
        for pack in _packs()
        for rule, names in pack.rules.items()
        if any(_reads(pack.detectors[d], metric) for d in detectors_behind(pack.detectors, names))
    ]


def _reads(detector: Detector, metric: str) -> bool:
    """Return whether it reads the metric, or one member of such a family."""
    specs = map(metrics.spec_of, detector.metrics)
    return metric in detector.metrics or any(s is not None and s.id == metric for s in specs)


class _Pack(NamedTuple):
    name: str
    written: dict[str, dict[str, Any]]  # detectors without what they read
    detectors: dict[str, Detector]
    rules: dict[str, tuple[str, ...]]  # id -> detectors in `when`


@cache
def _packs() -> list[_Pack]:
    found = []
    for name in shipped.names(PACKS):
        path = shipped.folder(PACKS) / f"{name}.yaml"
        root = yaml_reader.read(path, shipped.label(path), problems := Problems())
        problems.stop()
        assert root is not None
        section, written_rules = root.get("detectors"), root.get("rules")
        assert isinstance(section, Mapping)
        assert written_rules is not None
        pairs = {key: node for key, (_, node) in section.pairs.items()}
        written = {
            key: {k: v for k, v in plain(node).items() if k not in ("metric", "metrics", "event")}
            for key, node in pairs.items()
        }
        detectors = {key: read_detector(node, problems, key) for key, node in pairs.items()}
        rules = {rule["id"]: parse(rule["when"]).names for rule in plain(written_rules)}
        found.append(_Pack(name, written, detectors, rules))
    return found
