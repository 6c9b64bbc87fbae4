"""The report of a back-test: text or JSON lines, several policies side by side."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..core.model.decisions import SEVERITIES
from .score import CAVEAT, SLACK, Alarm, Label, Outcome, Score, quantile, score

MOST = 40  # lines of a list in the text report; JSON has all
Found = Sequence[Sequence[Outcome]]  # per run, one outcome per policy


def lines(found: Found, labels: Sequence[Label] | None) -> Iterator[dict[str, Any]]:
    """Yield one JSON-ready line per run.

    With labels it holds the run's `score`. The outcomes of further policies are under `against`, by
    policy, each with the alarms that only one of the two raised.
    """
    for first, *others in found:
        line = _line(first, labels)
        if others:
            line["against"] = {
                other.policy: {
                    **_line(other, labels),
                    "only_here": [asdict(alarm) for alarm in only_in(other, first)],
                    "not_here": [asdict(alarm) for alarm in only_in(first, other)],
                }
                for other in others
            }
        yield line


def _line(outcome: Outcome, labels: Sequence[Label] | None) -> dict[str, Any]:
    line = outcome.line()
    if labels is not None:
        line["score"] = score(outcome.policy, [outcome], labels).line()
    return line


def scores(found: Found, labels: Sequence[Label] | None) -> list[Score]:
    """Return the score of each policy over all runs."""
    columns = [list(outcomes) for outcomes in zip(*found, strict=True)]
    return [score(outcomes[0].policy, outcomes, labels or ()) for outcomes in columns]


def only_in(left: Outcome, right: Outcome) -> list[Alarm]:
    """Return the incidents of `left` with none as severe within SLACK rows in `right`."""
    near = SLACK * left.spacing
    return [
        alarm
        for alarm in left.alarms
        if alarm.what in ("opened", "raised")
        and not any(
            abs(other.step - alarm.step) <= near
            and SEVERITIES.index(other.severity) <= SEVERITIES.index(alarm.severity)
            for other in right.alarms
        )
    ]


# ── text ──────────────────────────────────────────────────────────────────────────────────────────


def report(found: Found, labels: Sequence[Label] | None) -> Iterator[str]:
    """Yield the lines of a report."""
    totals = scores(found, labels)
    rows = sum(outcomes[0].rows for outcomes in found)
    runs = f"{len(found)} run" + ("s" if len(found) != 1 else "")
    yield f"{totals[0].policy} on {runs}, {rows} rows, in shadow"
    yield from _limited(line for outcomes in found for line in _incident_lines(outcomes[0]))
    quiet = sum(not outcomes[0].alarms for outcomes in found)
    yield f"  {quiet} without an incident"
    notes = dict.fromkeys(note for outcomes in found for note in outcomes[0].notes)
    yield from _limited(f"  note: {note}" for note in notes)
    clock = dict.fromkeys(rule for outcomes in found for rule in outcomes[0].no_heartbeat)
    if clock:
        yield f"  not evaluated, a recording has no heartbeats: {', '.join(clock)}"
    never = set.intersection(*(set(outcomes[0].inactive) for outcomes in found))
    if never:
        yield f"  not evaluated, no recording has their metrics: {', '.join(sorted(never))}"
        yield "    if the column has another name: --alias COLUMN=METRIC"
    yield from _unjudged([outcomes[0] for outcomes in found])
    yield ""
    yield from table(totals, labelled=labels is not None)
    yield ""
    used = _budget_usage([outcomes[0] for outcomes in found])
    yield f"  highest budget use in one run: {used or 'none'}"
    if labels is not None:
        yield from _limited(
            f"  missed: {m['run']} {m['kind']} at {m['step']} (best: {m['best'] or 'no alarm'})"
            for m in totals[0].missed
        )
    for i, other in enumerate(totals[1:], 1):
        yield ""
        differences = [
            f"  {left.run} {alarm.step} {alarm.severity} {alarm.rule}: {left.policy} only"
            for outcomes in found
            for left, right in itertools.permutations((outcomes[0], outcomes[i]))
            for alarm in only_in(left, right)
        ]
        both = f"{totals[0].policy} and {other.policy}"
        yield f"{both} differ:" if differences else f"{both} raise the same alarms"
        yield from _limited(iter(differences))
    yield ""
    yield CAVEAT


def _unjudged(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the rules that no run could judge though it has their metrics, by the reason."""
    rules: dict[str, list[str]] = {}
    for rule, why in {
        r: why for outcome in outcomes for r, why in outcome.unjudged.items()
    }.items():
        if all(rule in outcome.unjudged or rule in outcome.inactive for outcome in outcomes):
            rules.setdefault(why, []).append(rule)
    if rules:
        yield "  not judged, rows are too few or too far apart:"
        yield from _limited(f"    {', '.join(names)}: {why}" for why, names in rules.items())


def _budget_usage(outcomes: Sequence[Outcome]) -> str:
    most: dict[str, tuple[int, int]] = {}
    for outcome in outcomes:
        for kind, (used, allowed, _) in outcome.budgets.items():
            most[kind] = max(most.get(kind, (0, allowed)), (used, allowed))
    return ", ".join(f"{kind} {used}/{allowed}" for kind, (used, allowed) in sorted(most.items()))


def _incident_lines(outcome: Outcome) -> Iterator[str]:
    would: dict[str, list[str]] = {}
    for act in outcome.actions:
        would.setdefault(act.incident, []).append(act.runbook)
    raised: dict[str, list[Alarm]] = {}
    for alarm in outcome.alarms:
        if alarm.what in ("opened", "raised"):
            raised.setdefault(alarm.incident, []).append(alarm)
    for incident, alarms in raised.items():
        steps = ", ".join(f"{a.severity} {a.rule} at {a.step}" for a in alarms)
        runs = f"; would have run {', '.join(would[incident])}" if incident in would else ""
        yield f"  {outcome.run} {incident}: {steps}{runs}"


def _limited(texts: Iterator[str]) -> Iterator[str]:
    more = 0
    for number, text in enumerate(texts):
        if number < MOST:
            yield text
        else:
            more += 1
    if more:
        yield f"  … {more} more: --json prints all"


def table(totals: Sequence[Score], *, labelled: bool) -> list[str]:
    """Return a padded Markdown table with a row per policy.

    Without labels no alarm is known to be false: the columns count all of them.
    """
    kinds = list(dict.fromkeys(kind for total in totals for kind in total.kinds))
    false = "false " if labelled else ""
    head = ["policy", *kinds]
    if labelled:
        head.append("delay median / p90")
    head += [f"{false}actions per 10k [95 %]", f"{false}SEV0/1", f"{false}SEV2", "destructive"]
    head.append("over budget")
    rows = [head, ["---"] * len(head)]
    rows += [_row(total, kinds, labelled) for total in totals]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    rows[1] = ["-" * width for width in widths]
    return [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]


def _row(total: Score, kinds: Sequence[str], labelled: bool) -> list[str]:
    cells = [total.policy]
    cells += [
        "/".join(map(str, total.kinds[kind])) if kind in total.kinds else "–" for kind in kinds
    ]
    if labelled:
        middle, late = quantile(total.delays, 0.5), quantile(total.delays, 0.9)
        cells.append("–" if middle is None else f"{middle:g} / {late:g}")
    per, low, high = total.rate(total.false_actions)
    rate = f"{per:.2f} [{low:.2f}, {high:.2f}]" if total.rows else "–"
    cells.append(f"{total.false_actions}: {rate}")
    return [
        *cells,
        *map(str, (total.false_pages, total.false_notices, total.destructive, total.refused)),
    ]
