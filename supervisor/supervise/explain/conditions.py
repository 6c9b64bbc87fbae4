"""Parts of a rule's condition that were not met, and by how much.

A rule is a tree of detectors; the leaves that keep it from being TRUE are its missing conditions.
Each gets its numbers and one sentence: the measured value, the bound, the distance, and the
baseline, or why nothing could be measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..catalog.expression import Tree, parse
from ..core.detection.rank_monitor import RankMonitor
from ..core.model import format_readings
from ..core.model.decisions import BREACH, CODE_NAMES, OK, UNKNOWN
from ..core.model.interfaces import Detector
from ..core.model.policy import Policy, Rule


class Leaf(NamedTuple):
    """A detector that does not read as the rule needs it; `any`: one of several would do."""

    name: str
    wanted: int
    any: bool


def missing(rule: Rule, policy: Policy, monitor: RankMonitor) -> list[dict[str, Any]]:
    """Return the conditions of a rule that were not met, unknown ones first."""
    codes = {name: monitor.codes[i] for name, i in monitor.index.items()}
    tree = parse(rule.text, limit=len(rule.text)).tree
    found = [
        describe(leaf.name, policy, monitor, wanted=leaf.wanted) | {"any": leaf.any}
        for leaf in dict.fromkeys(_missing_leaves(tree, BREACH, codes, several=False))
    ]
    return sorted(found, key=lambda one: one["code"] != "UNKNOWN")


def describe(
    name: str, policy: Policy, monitor: RankMonitor, *, wanted: int = BREACH
) -> dict[str, Any]:
    """Return one detector's reading: numbers, what it needed, and a sentence; inputs included."""
    place, spec = monitor.index[name], policy.detectors[name]
    code, watch = monitor.codes[place], monitor.watches[place]
    numbers = watch.numbers()
    if len(spec.metrics) == 1:
        numbers["metric"] = spec.metrics[0]
    found: dict[str, Any] = {
        "detector": name,
        "kind": type(spec).__module__.rpartition(".")[2],
        "code": CODE_NAMES[code],
        "raw": CODE_NAMES[watch.raw],
        "wanted": CODE_NAMES[wanted],
        "numbers": numbers,
        **_distance(spec, numbers),
        "inputs": [describe(inner, policy, monitor) for inner in spec.detectors],
    }
    found["text"] = _sentence(spec, monitor, found, code, wanted)
    return found


# ── the tree ──────────────────────────────────────────────────────────────────────────────────────


def _missing_leaves(
    tree: Tree | str, wanted: int, codes: Mapping[str, int], *, several: bool
) -> Iterator[Leaf]:
    """Yield the leaves that keep `tree` from being `wanted` (BREACH or OK)."""
    kind, parts = tree[0], tree[1:]
    if kind == "name":
        name = str(parts[0])
        if codes[name] != wanted:
            yield Leaf(name, wanted, several)
    elif kind == "not":
        yield from _missing_leaves(parts[0], 2 - wanted, codes, several=several)
    else:
        any_suffices = (kind == "or") == (wanted == BREACH)
        if any_suffices and any(_code(part, codes) == wanted for part in parts):
            return
        for part in parts:
            yield from _missing_leaves(part, wanted, codes, several=several or any_suffices)


def _code(tree: Tree | str, codes: Mapping[str, int]) -> int:
    kind, parts = tree[0], tree[1:]
    if kind == "name":
        return codes[str(parts[0])]
    if kind == "not":
        return 2 - _code(parts[0], codes)
    return (min if kind == "and" else max)(_code(part, codes) for part in parts)


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────


def _distance(spec: Detector, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was measured, the comparison it needed, and how far off it was."""
    key, value = format_readings.measured(numbers)
    limit = format_readings.finite(numbers.get("slack" if "slack" in numbers else "threshold"))
    found: dict[str, Any] = {"measure": key, "measured": value, "limit": limit, "short_by": None}
    if "last_breach" in numbers or "nonfinite" in numbers or limit is None:
        return found
    lower = any(_given(spec, name) for name in ("lt", "lte", "slope_per_1k_lt"))
    side = getattr(spec, "side", "high") if key in ("z", "distance") else "high"
    both = side == "both" or numbers.get("law") == "constant"
    if side == "low" or numbers.get("law") in ("nondecreasing", "increasing"):
        lower, limit = True, -limit
    # A rate breaches at its bound, most others beyond it.
    equal = "=" if any(_given(spec, n) for n in ("gte", "lte")) or "sample" in numbers else ""
    found["needs"] = f"{'<' if lower else '>'}{equal} {format_readings.number(limit)}"
    if both:
        found["needs"] = f"{found['needs']} either way"
    known = format_readings.finite(value)
    if known is not None:
        short = known - limit if lower else limit - (abs(known) if both else known)
        found["short_by"] = short if short > 0.0 or math.isclose(short, 0.0) else None
    return found


def _given(spec: Detector, name: str) -> bool:
    return getattr(spec, name, None) is not None


# ── sentences ─────────────────────────────────────────────────────────────────────────────────────


def _sentence(
    spec: Detector, monitor: RankMonitor, found: Mapping[str, Any], code: int, wanted: int
) -> str:
    numbers: Mapping[str, Any] = found["numbers"]
    if code == UNKNOWN:
        return f"UNKNOWN: {_unknown(spec, monitor, found)}"
    if wanted == OK or code == BREACH:
        against = ", and the rule requires that it is not" if code == BREACH != wanted else ""
        state = "in breach" if code == BREACH else "OK"
        return f"{state}{against}: {format_readings.reading(numbers)}"
    if found["inputs"]:
        reading = f"no match; {format_readings.reading(numbers)}"
        return "; ".join([reading, *_unmatched(spec, numbers)])
    if "needs" not in found:
        return format_readings.reading(numbers)
    form = format_readings.MEASURES.get(found["measure"], "{}")
    named = f"{numbers.get('metric', 'value')} {format_readings.number(numbers.get('value'))}"
    text = f"{named}: " + form.format(format_readings.number(found["measured"]))
    if found["measure"] == "value":
        text = named
    if "signal" in numbers:
        text = f"{format_readings.silence(numbers, limited=False)},"
    text += f" {'is' if found['raw'] == 'BREACH' else 'needs'} {found['needs']}"
    if found["short_by"] is not None:
        text += f", short by {format_readings.number(found['short_by'])}"
    if numbers.get("needed", 1) > 1:
        text += (
            f"; {numbers['breaching']} of the {numbers['needed']} breaches it needs in the newest "
            f"{numbers['of']} samples"
        )
    return "; ".join(filter(None, [text, format_readings.baseline(numbers)]))


def _unmatched(spec: Detector, numbers: Mapping[str, Any]) -> Iterator[str]:
    """Yield what came in another order, too late, or not at all, of a sequence or a join."""
    now, within = int(numbers["step"]), int(numbers["within"])
    match = numbers.get("match") or {"last_step": -1}
    at = {name: s for name, s in numbers["last_breach"].items() if s > match["last_step"]}
    if match["last_step"] >= 0 and not at:
        yield f"its match ended at step {match['last_step']}, and is a breach of that step only"
    elif "match" in numbers:
        yield from _out_of_order(spec.detectors[: len(getattr(spec, "steps", ()))], at, now, within)
    else:
        for name in spec.detectors:
            if name not in at:
                yield f"{name} has not breached"
            elif now - at[name] > within:
                ago = now - at[name]
                yield f"{name} at step {at[name]} was {ago} steps ago: {ago - within} too long"


def _out_of_order(
    stages: Sequence[str], at: Mapping[str, int], now: int, within: int
) -> Iterator[str]:
    """Yield why the newest breaches of the stages of a sequence are no match."""
    seen = [name for name in stages if name in at]
    wrong = [(a, b) for a, b in itertools.pairwise(seen) if at[b] < at[a]]
    for before, name in wrong:
        yield (
            f"{name} at step {at[name]} came before {before} at step {at[before]},"
            " and must follow it"
        )
    lacking = next((name for name in stages if name not in at), None)
    if wrong or not seen:
        return
    first, last = seen[0], seen[-1]
    late = at[last] - at[first] - within
    if lacking == stages[0]:
        yield f"{lacking} did not come before {first} at step {at[first]}"
    elif late > 0:
        yield (
            f"{last} at step {at[last]} came {late + within} steps after {first}"
            f" at step {at[first]}: {late} too late"
        )
    elif now - at[first] >= within and lacking:
        yield f"{lacking} did not follow {first} at step {at[first]} within {within} steps"
    elif lacking:
        until = at[first] + within
        yield f"{lacking} may still follow {first} at step {at[first]} until step {until}"


def _unknown(spec: Detector, monitor: RankMonitor, found: Mapping[str, Any]) -> str:
    """Return why nothing could be measured."""
    unsure = [one["detector"] for one in found["inputs"] if one["code"] == "UNKNOWN"]
    if unsure:
        return f"it depends on {', '.join(unsure)}"
    if spec.reads == "clock":
        return "no heartbeat of this rank's probe was received"
    why = list(filter(None, (_metric_problem(metric, monitor) for metric in spec.metrics)))
    if why and (spec.reads != "metrics" or len(why) == len(spec.metrics)):
        return "; ".join(why)
    numbers: Mapping[str, Any] = found["numbers"]
    if few := monitor.watches[monitor.index[found["detector"]]].lacks(1):
        return f"warming up, {few}"
    value = format_readings.finite(numbers.get("value"))
    if numbers.get("transform") == "log" and value is not None and value <= 0.0:
        return f"{format_readings.number(value)} has no logarithm"
    return f"undecided so far; {format_readings.reading(numbers)}"


def _metric_problem(metric: str, monitor: RankMonitor) -> str | None:
    if metric not in monitor.names:
        return f"{metric} was never announced by the job"
    value = monitor.value(metric)
    if value is None:
        return f"{metric} is absent in this frame"
    if not math.isfinite(value):
        return f"{metric} is {'NaN' if math.isnan(value) else 'infinite'}"
    return None
