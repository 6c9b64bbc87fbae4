"""A suite as data, which every report is made from, and the rows of its tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from ..canary.gate_document import thinned
from .findings import Drill, Finding, Healthy, Monitor, Runs

Document = Mapping[str, Any]

SCHEMA = "supervise/drill-suite/v1"
FAULTS = (
    *("fault", "best monitor", "alarm", "page", "loss leaves", "lead"),
    *("harm", "lost", "with actions", "actions"),
)
MONITORS = ("monitor", "sev", "leads the loss", "with or behind it", "loss stays", "false alarms")
READING = (
    "best monitor: has an alarm in the most runs, then the earliest. alarm, page: steps from "
    "the fault to its first alarm, and to the first page (SEV0, SEV1) of any monitor. loss "
    "leaves: steps until the training loss left the band around the healthy run of its seed. "
    "lead: of the best monitor before that. harm: runs that ended early, not finite, or worse "
    "by more than 1.5 % and two spreads of the loss. lost: nats x steps against the healthy "
    "run, without actions and with them; steps again: made again after a rollback. A range is "
    "over the seeds, one number is their median."
)


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
        about: `suite`, `command`, `policy`, `metric`, `steps`, `at`, `seeds`, `notes`, `rules`, and
            `means`: fault -> what it does.
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
    """Return the series of a fault for a plot, None where nothing was judged."""
    if one.injected is None:
        return None
    arms = {"healthy": runs.control, "unattended": runs.unattended, "acting": runs.acting}
    first = one.detections[0] if one.detections else None
    return {
        "seed": one.seed,
        "injected": one.injected,
        "departed": None if one.departed is None else one.injected + one.departed,
        "alarm": None if first is None else one.injected + first.delay,
        "ends": [text for text in (one.end, one.end_acting) if text],
        "series": {
            name: thinned(arm.arm.series(metric, 0, arm.arm.end))
            for name, arm in arms.items()
            if arm is not None
        },
    }


def _fault(drill: Drill, seeds: Sequence[Finding]) -> dict[str, Any]:
    judged = [one for one in seeds if not one.excluded]
    pages = [one.page for one in judged]
    return {
        "fault": drill.text,
        "kind": drill.name,
        "excluded": "" if judged else next((one.excluded for one in seeds), "not tried"),
        "runs": len(judged),
        "detected": sum(bool(one.detections) for one in judged),
        "paged": sum(page is not None for page in pages),
        "harmed": sum(one.harmed for one in judged),
        "acted": sum(bool(one.acts) for one in judged),
        "page": _span(page.delay for page in pages if page is not None),
        "departed": _span(one.departed for one in judged if one.departed is not None),
        "lost": _span(one.lost for one in judged if one.lost is not None),
        "lost_acting": _span(one.lost_acting for one in judged if one.lost_acting is not None),
        "repeated": _span(one.repeated for one in judged if one.acts),
        "monitors": _monitors(judged),
        "seeds": [asdict(one) for one in seeds],
    }


def _span(values: Iterable[float]) -> dict[str, float] | None:
    """Return number, how many are above 0, median, least and most; None without a value."""
    known = sorted(values)
    if not known:
        return None
    return {
        "runs": len(known),
        "ahead": sum(value > 0 for value in known),
        "median": median(known),
        "least": known[0],
        "most": known[-1],
    }


def _monitors(judged: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the monitors of a fault: those with an alarm in most runs first, then the earliest."""
    delays: dict[str, list[int]] = {}
    leads: dict[str, list[int]] = {}
    severity: dict[str, str] = {}
    for one in judged:
        for alarm in one.detections:
            delays.setdefault(alarm.rule, []).append(alarm.delay)
            severity[alarm.rule] = min(severity.get(alarm.rule, alarm.severity), alarm.severity)
            if one.departed is not None:
                leads.setdefault(alarm.rule, []).append(one.departed - alarm.delay)
    ranked = sorted(delays, key=lambda r: (-len(delays[r]), median(delays[r]), severity[r], r))
    return [
        {
            "rule": rule,
            "severity": severity[rule],
            "delay": _span(delays[rule]),
            "lead": _span(leads.get(rule, ())),
        }
        for rule in ranked
    ]


def fault_rows(document: Document) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each fault, under `FAULTS`."""
    for one in document["faults"]:
        if one["excluded"]:
            yield one["fault"], f"not judged: {one['excluded']}", *([""] * (len(FAULTS) - 2))
            continue
        best = one["monitors"][0] if one["monitors"] else None
        yield (
            one["fault"],
            "none" if best is None else f"{best['severity']} {best['rule']}",
            "" if best is None else _steps(best["delay"], one["runs"]),
            _steps(one["page"], one["runs"]) or "none",
            _steps(one["departed"], one["runs"]) or "never",
            "" if best is None else _lead(best["lead"], one["runs"]),
            f"{one['harmed']} of {one['runs']}",
            _lost(one, "lost", "end"),
            _lost(one, "lost_acting", "end_acting") if one["acted"] else "",
            actions_text(one),
        )


def _steps(found: Mapping[str, float] | None, runs: int) -> str:
    if found is None:
        return ""
    low, high = found["least"], found["most"]
    share = "" if found["runs"] == runs else f" ({found['runs']} of {runs})"
    return f"{f'{low:g}' if low == high else f'{low:g}-{high:g}'}{share}"


def _lead(found: Mapping[str, float] | None, runs: int) -> str:
    """Return the median lead, and in how many runs there is one where that is not all."""
    if found is None:
        return ""
    middle = found["median"]
    if middle <= 0:
        return f"{-middle:g} behind" if middle else "with it"
    share = f" ({found['ahead']} of {runs} runs)" if found["ahead"] < runs else ""
    return f"{middle:g} ahead{share}"


def _lost(one: Document, name: str, end: str) -> str:
    """Return nats x steps, the median; of a run that ended early, how it ended."""
    found = one[name]
    ends = [seed[end] for seed in one["seeds"] if seed[end]]
    if found is None:
        return ends[0] if ends else ""
    made = one["repeated"] if name == "lost_acting" else None
    again = f", {made['median']:g} steps again" if made and made["median"] else ""
    return f"{nats(found)}{again}{f' ({len(ends)} ended early)' if ends else ''}"


def nats(found: Mapping[str, float]) -> str:
    """Return a median of nats x steps."""
    middle = found["median"]
    if math.isinf(middle):
        return "not finite"
    return f"{middle:.3g}{' (a run is not finite)' if math.isinf(found['most']) else ''}"


def actions_text(one: Document) -> str:
    """Return what the policy did about a fault, in the order of the first run with actions."""
    for seed in one["seeds"]:
        if seed["acts"]:
            verbs = ", ".join(dict.fromkeys(verb for verb, _ in seed["acts"]))
            rest = f" ({one['acted']} of {one['runs']} runs)" if one["acted"] < one["runs"] else ""
            return f"{verbs}{rest}"
    return "none"


def monitor_rows(document: Document) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each monitor, under `MONITORS`."""
    runs = {one["fault"]: one["runs"] for one in document["faults"]}
    for one in document["monitors"]:
        ahead, behind, alone = [], [], []
        for fault, delays in one["delays"].items():
            leads = one["leads"].get(fault)
            few = f", {len(delays)} of {runs[fault]}" if len(delays) < runs[fault] else ""
            if not leads:
                alone.append(f"{fault} (after {median(delays):g}{few})")
            elif (lead := median(leads)) > 0:
                ahead.append(f"{fault} ({lead:g} ahead{few})")
            else:
                behind.append(f"{fault} ({f'{-lead:g} behind' if lead else 'with it'}{few})")
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
        silent = [s for s in one["seeds"] if not s["excluded"] and not s["detections"]]
        if not silent:
            continue
        runs = one["runs"]
        which = "no alarm" if len(silent) == runs else f"no alarm in {len(silent)} of {runs} runs"
        harmed = [seed for seed in silent if seed["harmed"]]
        if harmed:
            ends = [seed["end"] for seed in harmed if seed["end"]]
            what = (
                f"the run {ends[0]}" if ends else f"{_lost(one, 'lost', 'end')} nats x steps lost"
            )
            text = f"harm, {what}"
        elif any(seed["lower"] for seed in silent):
            text = "the loss ends lower, so it does not measure what this fault does"
        elif all(seed["departed"] is None for seed in silent):
            text = "the loss stays in its band"
        else:
            text = "the loss leaves its band, and ends no worse"
        found.append((not harmed, f"{one['fault']}: {which}; {text}"))
    return [text for _, text in sorted(found, key=lambda pair: pair[0])]


def limits(document: Document) -> list[str]:
    """Return a sentence for each thing that makes the suite say less than it seems to."""
    found = list(document["notes"])
    finals: dict[float, int] = {}
    for one in document["healthy"]:
        if one["acts"]:
            verbs = ", ".join(dict.fromkeys(verb for verb, _ in one["acts"]))
            found.append(f"the healthy run of seed {one['seed']} was acted on: {verbs}")
        if (other := finals.setdefault(one["final"], one["seed"])) != one["seed"]:
            found.append(
                f"seeds {other} and {one['seed']} end with the same loss: {{seed}} is lost"
            )
    for fault in document["faults"]:
        for seed in fault["seeds"]:
            if seed["excluded"] and not fault["excluded"]:
                text = f"{fault['fault']}, seed {seed['seed']}: not judged: {seed['excluded']}"
                found.append(text)
        for metric in dict.fromkeys(m for seed in fault["seeds"] for m, _ in seed["moved"]):
            text = f"moves {metric}, which this fault leaves alone: another one may be at work"
            found.append(f"{fault['fault']} {text}")
    for monitor in document["monitors"]:
        if monitor["misattributed"]:
            text = f"{monitor['rule']} has alarms during {', '.join(monitor['misattributed'])}"
            found.append(f"{text}, which change nothing that it measures: not counted above")
    if any(seed["not_repeatable"] for fault in document["faults"] for seed in fault["seeds"]):
        text = "two runs of one seed differ before the fault: the job does not repeat itself, and "
        found.append(f"{text}what was lost is rough")
    return found


def summary(document: Document) -> str:
    """Return one sentence about the whole."""
    judged = [one for one in document["faults"] if not one["excluded"]]
    harmful = [one for one in judged if one["harmed"]]
    paged = sum(one["paged"] == one["runs"] for one in harmful)
    ahead = sum(
        any(m["lead"] is not None and m["lead"]["median"] > 0 for m in one["monitors"])
        for one in judged
    )
    missed = sum(one["detected"] < one["runs"] for one in judged)
    alarms = sum(len(one["alarms"]) for one in document["healthy"])
    runs, steps = len(document["healthy"]), sum(one["steps"] for one in document["healthy"])
    return (
        f"{len(judged)} faults. Harmful: {len(harmful)}, {paged} of them paged in every run. With "
        f"a monitor ahead of the loss: {ahead}. With a run without an alarm: {missed}. False "
        f"alarms: {alarms} in {runs} healthy runs of {steps} steps in all"
    )
