"""One trouble, from its first breach to its verified recovery.

There is at most one open incident: whatever fires meanwhile joins it, so that a hundred detectors
tripping in one step are one page and one runbook.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .rule import Runbook
from .values import SEVERITIES

BAND_MADS = (
    6.0  # half width of the loss band; no healthy nano loss was further out (metrics.md 0.3)
)
BAND_SHARE = 0.05  # least half width, as a share of the level; project default
BAND_LEAST = 8  # samples without which there is no band

OPEN, ACTING, PROBATION, HELD, CLOSED = "open", "acting", "probation", "held", "closed"


@dataclass(frozen=True, slots=True)
class Band:
    """Where the loss was before the trouble. `limit` is what it must come back under."""

    level: float
    spread: float
    limit: float
    samples: int


def band_of(losses: Iterable[tuple[int, float]], before_step: int) -> Band | None:
    """Return the band of the losses before `before_step`, None with fewer than 8 of them.

    level = median, spread = 1.4826 x median absolute deviation of the newest 128 samples, limit =
    level + max(6 x spread, 5 % of |level|). A falling loss only makes the limit milder.
    """
    values = [loss for step, loss in losses if step < before_step][-128:]
    if len(values) < BAND_LEAST:
        return None
    level = _median(sorted(values))
    spread = 1.4826 * _median(sorted(abs(v - level) for v in values))
    limit = level + max(BAND_MADS * spread, BAND_SHARE * abs(level))
    return Band(level, spread, limit, len(values))


def _median(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


@dataclass(slots=True)
class Run:
    """A runbook in progress. `index` is the step that waits, is performed, or is verified."""

    number: int
    runbook: Runbook
    severity: str  # of the incident when it was started
    index: int = 0
    waiting_for: str | None = None  # id of the action being performed
    args: dict[str, Any] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)  # indices of steps that were committed
    undoing: list[Any] = field(default_factory=list)  # compensations still to do
    failed: str | None = None  # why the runbook failed, while it is being compensated
    exhausted: bool = False  # it failed for want of budget: nothing else may be tried
    overdue_ns: int = 0  # when the outcome waited for is in doubt
    effects: list[tuple[int, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    reduced: str = ""  # why only evidence is taken and people are told
    verify_until: int | None = None  # pace at which the verification has failed
    verify_ns: int = 0  # when the newest frame to verify by came
    clear_steps: int = 0
    last_trouble: str = ""


@dataclass(slots=True)
class Incident:
    """An open incident."""

    id: str
    opened_step: int
    breach_step: int
    severity: str
    rules: list[str]
    phase: str = OPEN
    rung: int = -1
    run: Run | None = None
    runs: int = 0
    band: Band | None = None
    probation_until: int = 0
    quiet_since: int | None = None
    rebaselined: bool = False  # a detector behind it took the new level for its baseline
    headline: str = ""
    shadowed: list[str] = field(default_factory=list)  # runbooks that shadow mode only wrote down

    def join(self, rule: str, severity: str) -> bool:
        """Add a rule; return True when it raised the incident's severity."""
        if rule not in self.rules:
            self.rules.append(rule)
        if SEVERITIES.index(severity) < SEVERITIES.index(self.severity):
            self.severity = severity
            return True
        return False


def first_breach(numbers: Mapping[str, Mapping[str, Any]], step: int) -> int:
    """Return the earliest step at which any detector behind a rule may have been in breach.

    A coupling tells the first step of its match; one that needs m of n samples in breach may have
    met the first of them n - 1 steps ago.
    """
    found = [step]
    for reading in numbers.values():
        if reading.get("code") != "BREACH":
            continue
        found.append(step - max(0, reading.get("of", 1) - 1))
        found.append((reading.get("match") or {}).get("first_step", step))
    return min(found)


def headline(numbers: Mapping[str, Mapping[str, Any]], otherwise: str) -> str:
    """Return the breaching metrics behind a rule in one line, each with its number and limit."""
    parts = []
    for reading in numbers.values():
        metric, limit = reading.get("metric"), reading.get("threshold")
        if reading.get("code") == "BREACH" and "signal" in reading:
            silent = f"no {reading['signal']} for {reading['value']:.0f} s"
            parts.append(f"{silent} (limit {limit:.0f} s)")
        if reading.get("code") != "BREACH" or metric is None:
            continue
        for key, form in (("z", "z {:.1f}"), ("ratio", "{:.3g} times its past"), ("value", "")):
            if isinstance(reading.get(key), float):
                text = f"{metric} {reading['value']:.4g}"
                text += f", {form.format(reading[key])}" if form else ""
                text += f" (limit {limit:g})" if isinstance(limit, (int, float)) else ""
                parts.append(text)
                break
    nonfinite = [name for reading in numbers.values() for name in reading.get("nonfinite", ())]
    parts += [f"{name} is not finite" for name in nonfinite]
    return "; ".join(dict.fromkeys(parts)) or otherwise
