"""The monitors of a run: each signal with its formula and healthy values, each rule with its
threshold, where that comes from, its lead time, and what it is blind to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.model.policy import HOLD, Policy, Rule
from .frames import Frames
from .interventions import drills

NOT_SHOWN = "not shown: no drill in this run, and no recording of a fault that it reported"
CHANGED = "not shown: its thresholds are not those that were recorded"
STOPPING = frozenset(("stop",))
SHOWN_IN_SUITE = ("delays", "leads", "false_alarms")


@dataclass(frozen=True)
class Knowledge:
    """What this installation knows about the parts of a policy.

    Attributes:
        formulas_sha256: digest of the files that hold the formulas of signals and detectors.
        signal: metric -> `module`, `meaning`, `unit`, `formula`, `formula_version`; None: unknown.
        faults: name -> `meaning`, `moves`, `params`.
        shown: what benchmarks have shown, `policies/shown.json`.
        blind_to: kind of a detector -> what it does not see.
        source: returns where the thresholds of a rule of a policy come from.
        alarms: pack -> healthy situations in which it fires.
    """

    version: str
    formulas_sha256: str
    signal: Callable[[str], Mapping[str, str] | None]
    faults: Mapping[str, Mapping[str, Any]]
    shown: Mapping[str, Any]
    blind_to: Mapping[str, str]
    source: Callable[[Policy, Rule], str]
    alarms: Callable[[str], Sequence[str]]

    def made_by(self) -> dict[str, str]:
        """Return what the fields that are read from this installation depend on."""
        shown = hashlib.sha256(json.dumps(self.shown, sort_keys=True).encode()).hexdigest()
        return {
            "version": self.version,
            "formulas_sha256": self.formulas_sha256,
            "shown_sha256": shown,
        }

    def design(self) -> list[dict[str, Any]]:
        """Return every fault that can be injected, and in how many programs it showed."""
        drills = self.shown.get("drills", {})
        moved = drills.get("moved", {})
        where = {name: drills[name] for name in ("machine", "date") if name in drills}
        return [
            {
                "fault": name,
                **fault,
                "shown": [
                    {"variant": variant, **found, **where}
                    for variant, found in moved.items()
                    if variant.partition(":")[0] == name
                ],
            }
            for name, fault in self.faults.items()
        ]

    def recoveries(self, verbs: Sequence[str]) -> list[dict[str, Any]]:
        """Return the recorded recoveries in which the job was changed by just these actions."""
        found = self.shown.get("recoveries", {})
        where = {name: found[name] for name in ("machine", "date", "policy") if name in found}
        return [
            {**row, **where}
            for row in found.get("rows", ())
            if (named := set(row["actions"].split(", ")) - {"–"})
            and named <= {*verbs, "pause"}
            and {v for v in verbs if v in CHANGES} <= named
        ]


CHANGES = frozenset(("rollback", "relaunch", "hold_rate", "lr_scale", "clip", "update_clip"))


def monitors(
    policy: Policy, seen: Frames, known: Knowledge, records: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return each signal that a rule reads."""
    readers: dict[str, dict[str, None]] = {}
    for rule in policy.rules:
        for name in policy.detectors_of(rule):
            for metric in policy.detectors[name].metrics:
                readers.setdefault(metric, {})[rule.id] = None
    versions = _formulas(records)
    found = []
    for metric, used in sorted(readers.items()):
        about = known.signal(metric)
        none = {"unknown": "the job reports it; this installation has no formula of it"}
        sample = seen.samples.get(metric)
        baseline = None if sample is None else sample.quantiles()
        absent = {"unknown": seen.unreadable or "no frame of the leading rank holds it"}
        version: Any = none
        if about is not None:
            version = about["formula_version"]
            if versions not in (None, known.formulas_sha256):
                version = {"unknown": f"recorded with other formulas (sha256 {versions})"}
        found.append(
            {
                "signal": metric,
                "module": "the job" if about is None else about["module"],
                **{
                    name: none if about is None else about[name]
                    for name in ("meaning", "unit", "formula")
                },
                "formula_version": version,
                "rules": list(used),
                "faults": [n for n, fault in known.faults.items() if fault["moves"] == metric],
                "present_in": absent
                if sample is None
                else round(sample.present / max(1, seen.frames), 6),
                "healthy_baseline": absent
                if sample is None
                else baseline or {"unknown": "fewer than 16 healthy values"},
            }
        )
    return found


def _formulas(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the digest of the formulas that the run was recorded with."""
    for r in records:
        if r["kind"] == "identity":
            found = (r["data"]["identity"].get("supervise") or {}).get("formulas_sha256")
            return None if found is None else str(found)
    return None


def rules(
    policy: Policy,
    seen: Frames,
    known: Knowledge,
    records: Sequence[Mapping[str, Any]],
    cites: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return each rule of a policy.

    Args:
        cites: trials that the run cites; what a drill suite has shown of the rule as it is now.
    """
    fired = Counter(
        r["rule"]
        for r in records
        if r["kind"] == "rule" and (r.get("data") or {}).get("what") == "fired"
    )
    injected = drills(records)
    found = []
    for rule in policy.rules:
        behind = policy.detectors_of(rule)
        kinds = dict.fromkeys(_kind(policy.detectors[name]) for name in behind)
        book = policy.runbooks.get(rule.runbook or "")
        response = rule.runbook or "people are notified"
        found.append(
            {
                "rule": rule.id,
                "severity": rule.severity,
                "mode": policy.mode_of(rule),
                "condition": rule.text + (f" for {rule.for_steps}" * (rule.for_steps > 1)),
                "thresholds": {name: _thresholds(policy.detectors[name]) for name in behind},
                "threshold_source": known.source(policy, rule),
                "response": response,
                "stops": response == HOLD
                or (book is not None and not STOPPING.isdisjoint(book.verbs)),
                "fired": fired[rule.id],
                "state": _state(policy, behind, seen),
                "lead_time": _lead_time(policy, rule, known, records, injected, cites),
                "blind_to": [known.blind_to[kind] for kind in kinds if kind in known.blind_to],
            }
        )
    return found


def _kind(detector: Any) -> str:
    return str(type(detector).__module__.rpartition(".")[2])


def _thresholds(detector: Any) -> str:
    """Return the kind and all keys of a detector, defaults included."""
    pairs = (
        f"{field.name.rstrip('_')}: {value}"
        for field in dataclasses.fields(detector)
        if (value := getattr(detector, field.name)) not in (None, ())
    )
    return f"{_kind(detector)}, {', '.join(pairs)}"


def _state(policy: Policy, behind: Sequence[str], seen: Frames) -> str:
    needed = list(dict.fromkeys(m for name in behind for m in policy.detectors[name].metrics))
    lacking = [metric for metric in needed if metric not in seen.announced]
    if not lacking:
        return "evaluated"
    names = ", ".join(lacking)
    if len(lacking) < len(needed):
        return f"evaluated without {names}"
    return f"inactive: the job has no {names}"


def _lead_time(
    policy: Policy,
    rule: Rule,
    known: Knowledge,
    records: Sequence[Mapping[str, Any]],
    injected: Sequence[Mapping[str, Any]],
    cites: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    in_run = []
    for number, drill in enumerate(injected):
        until = injected[number + 1]["record"] if number + 1 < len(injected) else float("inf")
        hit = next(
            (
                r["step"] - drill["step"]
                for r in records
                if drill["record"] < r["seq"] < until
                and r["kind"] == "rule"
                and r["rule"] == rule.id
                and r["data"].get("what") == "fired"
            ),
            None,
        )
        if hit is not None:
            about = {name: drill[name] for name in ("fault", "step")}
            in_run.append({**about, "reported_after": max(0, hit)})
    if in_run:
        found["in_this_run"] = in_run
    suites = [
        {"trial": one["trial"], **{name: of_rule[name] for name in SHOWN_IN_SUITE}}
        for one in cites
        if (of_rule := one.get("monitors", {}).get(rule.id)) is not None
        and of_rule["digest"] == policy.digest_of(rule)
        and of_rule["delays"]
    ]
    if suites:
        found["suites"] = suites
    recorded = known.shown.get("recordings", {})
    shown = recorded.get("rules", {}).get(rule.id)
    if shown is not None and shown["digest"] == policy.digest_of(rule) and shown["faults"]:
        found["recordings"] = {
            **{name: recorded[name] for name in ("machine", "date")},
            "unit": "rows from the first report to half of the harm, least, median and most",
            "faults": shown["faults"],
            "false_alarms": f"{shown['false_alarms']} of {recorded['healthy']} healthy runs",
        }
    if found:
        return found
    changed = shown is not None and shown["digest"] != policy.digest_of(rule)
    return {"unknown": CHANGED if changed else NOT_SHOWN}
