"""A suite as data, which every report is made from, and the rows of its tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from .findings import Drill, Finding, Healthy, Monitor, Runs

Document = Mapping[str, Any]

SCHEMA = "supervise/drill-suite/v1"
POINTS = 200  # of a plotted series; each is the mean of the steps around it
SHOWN = 3  # monitors of a fault that a table names
FAULTS = (
    "fault",
    "first monitor",
    "after",
    "loss leaves",
    "lead",
    "harm",
    "lost",
    "with actions",
    "actions",
)
MONITORS = ("monitor", "sev", "leads the loss", "with or behind it", "loss stays", "false alarms")


def suite_document(
    about: Mapping[str, Any],
    drills: Sequence[Drill],
    found: Sequence[Finding],
    controls: Sequence[Healthy],
    monitors: Sequence[Monitor],
    plots: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a suite as plain data; numbers may be infinite or NaN.

    Args:
        about: `suite`, `command`, `policy`, `metric`, `steps`, `at`, `seeds`, `notes`, `rules`.
        plots: fault -> what `plot_of` returned for one of its seeds.
    """
    return {
        "schema": SCHEMA,
        **about,
        "healthy": [asdict(one) for one in controls],
        "faults": [_fault(one, [f for f in found if f.fault == one.text]) for one in drills],
        "monitors": [asdict(one) for one in monitors],
        "plots": dict(plots),
    }


def plot_of(runs: Runs, one: Finding, metric: str) -> dict[str, Any] | None:
    """Return the series of a fault for a plot, None where it did not come."""
    if one.injected is None:
        return None
    arms = {"healthy": runs.control, "unattended": runs.silent, "acting": runs.acting}
    return {
        "seed": one.seed,
        "injected": one.injected,
        "departed": None if one.departed is None else one.injected + one.departed,
        "alarm": None if one.first is None else one.injected + one.first.delay,
        "series": {
            name: thinned(arm.arm.series(metric, 0, arm.arm.end))
            for name, arm in arms.items()
            if arm is not None
        },
    }


def thinned(series: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return at most `POINTS` points `(step, mean)`."""
    points = sorted(series.items())
    size = max(1, -(-len(points) // POINTS))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], fmean(value for _, value in group)) for group in groups]


def _fault(drill: Drill, seeds: Sequence[Finding]) -> dict[str, Any]:
    came = [one for one in seeds if not one.refused]
    return {
        "fault": drill.text,
        "kind": drill.name,
        "refused": next((one.refused for one in seeds if one.refused), "") if not came else "",
        "runs": len(came),
        "detected": sum(one.first is not None for one in came),
        "paged": sum(one.page is not None for one in came),
        "harmed": sum(one.harmed for one in came),
        "acted": sum(bool(one.acts) for one in came),
        "after": _medians(one.first.delay for one in came if one.first is not None),
        "departed": _medians(one.departed for one in came if one.departed is not None),
        "lead": _medians(one.lead for one in came if one.lead is not None),
        "lost": _medians(one.lost for one in came),
        "kept": _medians(one.kept for one in came if one.kept is not None),
        "trusted": _trusted(came),
        "seeds": [{**asdict(one), "lead": one.lead} for one in seeds],
    }


def _medians(values: Iterator[Any]) -> dict[str, float] | None:
    """Return median, least and most; None without a value."""
    known = sorted(values)
    if not known:
        return None
    return {"median": median(known), "least": known[0], "most": known[-1]}


def _trusted(came: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the monitors of a fault: those with an alarm in most runs first, then the earliest."""
    delays: dict[str, list[int]] = {}
    severity: dict[str, str] = {}
    for one in came:
        for alarm in one.detections:
            delays.setdefault(alarm.rule, []).append(alarm.delay)
            severity[alarm.rule] = min(severity.get(alarm.rule, alarm.severity), alarm.severity)
    ranked = sorted(delays, key=lambda r: (-len(delays[r]), median(delays[r]), severity[r], r))
    return [
        {
            "rule": rule,
            "severity": severity[rule],
            "runs": len(delays[rule]),
            "after": median(delays[rule]),
        }
        for rule in ranked
    ]


def fault_rows(document: Document) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each fault, under `FAULTS`."""
    for one in document["faults"]:
        if one["refused"]:
            yield one["fault"], f"not injected: {one['refused']}", *([""] * (len(FAULTS) - 2))
            continue
        runs = one["runs"]
        yield (
            one["fault"],
            _first(one),
            _steps(one["after"]),
            _steps(one["departed"]) or "never",
            _lead(one),
            f"{one['harmed']}/{runs}",
            nats(one["lost"]),
            nats(one["kept"]),
            did(one),
        )


def _first(one: Document) -> str:
    if not one["trusted"]:
        return "unattended"
    best = one["trusted"][0]
    share = "" if best["runs"] == one["runs"] else f" ({best['runs']} of {one['runs']} runs)"
    return f"{best['severity']} {best['rule']}{share}"


def _steps(found: Mapping[str, float] | None) -> str:
    if found is None:
        return ""
    low, high = found["least"], found["most"]
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


def _lead(one: Document) -> str:
    """Return by how much the first alarm leads; without one, or a departure, there is none."""
    if one["lead"] is None:
        return "-"
    if one["lead"]["median"] > 0:
        return f"{one['lead']['median']:g} ahead"
    behind = -one["lead"]["median"]
    return f"{behind:g} behind" if behind else "with it"


def nats(found: Mapping[str, float] | None) -> str:
    """Return nats x steps, the median; "" where it was not measured."""
    if found is None:
        return ""
    middle = found["median"]
    return "not finite" if math.isinf(middle) else f"{middle:.3g}"


def did(one: Document) -> str:
    """Return what the policy did about a fault, in the order of the first run that it acted in."""
    for seed in one["seeds"]:
        if seed["acts"]:
            verbs = ", ".join(dict.fromkeys(verb for verb, _ in seed["acts"]))
            rest = f" ({one['acted']} of {one['runs']} runs)" if one["acted"] < one["runs"] else ""
            return f"{verbs}{rest}"
    return "nothing"


def monitor_rows(document: Document) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each monitor, under `MONITORS`."""
    for one in document["monitors"]:
        ahead, behind, alone = [], [], []
        for fault, delays in one["delays"].items():
            leads = one["leads"].get(fault)
            if not leads:
                alone.append(f"{fault} (after {median(delays):g})")
            elif (lead := median(leads)) > 0:
                ahead.append(f"{fault} (by {lead:g})")
            else:
                behind.append(f"{fault} ({f'by {-lead:g}' if lead else 'with it'})")
        yield (
            one["rule"],
            one["severity"],
            ", ".join(ahead),
            ", ".join(behind),
            ", ".join(alone),
            str(one["false_alarms"] or "none"),
        )


def undetected(document: Document) -> list[str]:
    """Return a sentence for each fault without an alarm in some run, the harmful ones first."""
    found = []
    for one in document["faults"]:
        missed = one["runs"] - one["detected"]
        if not missed or one["refused"]:
            continue
        alarm = "no alarm" if not one["detected"] else f"no alarm in {missed} of {one['runs']} runs"
        lost = nats(one["lost"])
        if one["harmed"]:
            cost = f"it harms {one['harmed']} of {one['runs']} runs, {lost} nats x steps lost"
        elif one["departed"] is None:
            cost = f"the loss never leaves its band, {lost} nats x steps lost"
        else:
            cost = f"the loss leaves its band and comes back, {lost} nats x steps lost"
        found.append((not one["harmed"], f"{one['fault']}: {alarm}; {cost}"))
    return [text for _, text in sorted(found, key=lambda pair: pair[0])]


def doubts(document: Document) -> list[str]:
    """Return a sentence for each thing that makes the suite say less than it seems to."""
    found = list(document["notes"])
    for one in document["healthy"]:
        if one["acts"]:
            verbs = ", ".join(dict.fromkeys(verb for verb, _ in one["acts"]))
            found.append(f"the healthy run of seed {one['seed']} was acted on: {verbs}")
        if one["end"]:
            found.append(f"the healthy run of seed {one['seed']} {one['end']}")
    for fault in document["faults"]:
        for metric in dict.fromkeys(m for seed in fault["seeds"] for m, _ in seed["moved"]):
            text = f"moves {metric}, which this fault leaves alone: another one may be at work"
            found.append(f"{fault['fault']} {text}")
    for monitor in document["monitors"]:
        if monitor["misattributed"]:
            text = f"{monitor['rule']} has alarms for {', '.join(monitor['misattributed'])}"
            found.append(f"{text}, and reads only what these leave alone")
    if any(seed["apart"] for fault in document["faults"] for seed in fault["seeds"]):
        text = "two runs of one seed differ before the fault: the job does not repeat itself, and "
        found.append(f"{text}what was lost is rough")
    return found


def summary(document: Document) -> str:
    """Return one sentence about the whole."""
    came = [one for one in document["faults"] if not one["refused"]]
    ahead = sum(one["lead"] is not None and one["lead"]["median"] > 0 for one in came)
    silent = sum(one["detected"] < one["runs"] for one in came)
    harmful = [one for one in came if one["harmed"]]
    paged = sum(one["paged"] == one["runs"] for one in harmful)
    alarms = sum(len(one["alarms"]) for one in document["healthy"])
    steps = sum(one["steps"] for one in document["healthy"])
    return (
        f"{len(came)} faults: {len(harmful)} harm the run, {paged} of these are paged in every "
        f"run; a monitor leads the loss in {ahead}; {silent} have a run without an alarm; "
        f"{alarms} alarms in {steps} healthy steps"
    )
