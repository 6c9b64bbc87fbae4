"""The report of an incident as lines of text, for `supervise why`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.model.format_readings import number
from .incident_report import COUNTS, clock, describe_counts

Part = Mapping[str, Any]


def lines(report: Part) -> Iterator[str]:
    """Yield headings, and their lines indented by two spaces."""
    end = report["end"]
    yield f"{report['incident']}  {report['severity']}  {report['headline']}"
    if end["how"] == "closed":
        yield f"  {end['reason']}, {_at(end)}"
    else:
        yield f"  not closed: {end['reason']}"
    for heading, part in (
        ("observed", _seen(report)),
        ("rules that fired", _rules(report["rules"])),
        ("suppressed", _suppressed(report["suppressed"])),
        ("actions", _done(report)),
        ("diagnosis", _spike(report["spike"])),
        ("messages", _messages(report["messages"])),
        ("end", _end(report)),
        ("timeline", _timeline(report["timeline"])),
    ):
        text = list(part)
        if text:
            yield ""
            yield heading
            yield from (f"  {line}" for line in text)


def table(rows: Sequence[Part]) -> Iterator[str]:
    """Yield one line per incident."""
    for row in rows:
        until = f"..{row['end_step']}" if row["end_step"] is not None else ""
        acted = describe_counts({how: row[name] for how, name in COUNTS.items()})
        yield (
            f"{row['incident']:8} {row['severity']}  step {row['step']}{until}  "
            f"{clock(row['wall'])}  {row['end'] or row['phase']}; {acted}"
        )
        yield f"         {row['headline']}"


def _seen(report: Part) -> Iterator[str]:
    seen = report["seen"]
    yield f"{_at(seen)}, first breach at step {seen['breach_step']}"
    for one in seen["readings"]:
        yield f"{one['detector']}: {one['text']}"
    if not seen["readings"]:
        yield str(seen["reason"])
    if band := seen["band"]:
        yield (
            f"the loss was {number(band['level'])}; recovered means below {number(band['limit'])}"
        )


def _rules(rules: Sequence[Part]) -> Iterator[str]:
    for one in rules:
        runs = f", runs {one['runbook']}" if one["runbook"] else ""
        needed = f", for {one['for']} steps" if (one["for"] or 1) > 1 else ""
        yield f"{one['rule']} ({one['severity']}{runs}), {_at(one)}, rank {one['rank']}"
        yield f"  when {one['when']}{needed}" + (f"   in {one['where']}" if one["where"] else "")
        for name, reading in one["numbers"].items():
            yield f"  {reading['code']:7} {name}: {reading['text']}"


def _suppressed(records: Sequence[Part]) -> Iterator[str]:
    for one in records:
        yield f"{one['reason']} [{one['by']}], {_at(one)}"
        for step in one.get("would", ()):
            refused = f"refused: {step['refused']}" if "refused" in step else ""
            yield f"  {step['verb']} {refused or _inline(step.get('args') or {})}".rstrip()


def _done(report: Part) -> Iterator[str]:
    for book in report["runbooks"]:
        why = f": {book['why']}" if book["why"] else ""
        yield f"{book['runbook']}, {_at(book)}{why}"
        if book["refused"]:
            yield f"  refused: {book['refused']}"
        for action in book["actions"]:
            undo = "undo: " if "undo-" in str(action["id"]) else ""
            yield f"  {undo}{action['verb']} {_inline(action['args'])}".rstrip()
            yield f"    {_outcome(action)}"
        for one in book["verification"]:
            yield f"  verify {one['what']}: {one['reason']}, {_at(one)}"
    if report["runbooks"] and report["budgets"]:
        yield f"budgets after the last action: {_inline(report['budgets'], ' ')}"
    if not report["runbooks"]:
        yield "no runbook ran"


def _outcome(action: Part) -> str:
    if action["ok"] is None:
        outcome = action.get("outcome")
        return f"in doubt: {outcome}" if outcome else "intended; no outcome on record"
    how = "done" if action["ok"] else f"FAILED: {action['outcome']}"
    ack = f" at the end of step {action['ack_step']}" if action["ack_step"] is not None else ""
    took = f" after {action['took_s']:.1f} s" if action["took_s"] is not None else ""
    observed = _inline({k: v for k, v in action["result"].items() if k != "ack_step"})
    at = f" (record {action['record']} -> {action['outcome_record']})"
    return f"{how}{ack}{took}{at}" + (f"; observed {observed}" if observed else "")


def _spike(spike: Part | None) -> Iterator[str]:
    if not spike:
        return
    yield str(spike.get("class", "undecided"))
    questions = spike.get("questions") or {}
    for n, (name, found) in enumerate(questions.items(), 1):
        text = (
            f"{found.get('answer')}: {found.get('text')}" if isinstance(found, Mapping) else found
        )
        yield f"{n} {name.replace('_', ' ')}: {text}"
    if advice := spike.get("advice"):
        yield f"advice: {advice}"


def _messages(messages: Sequence[Part]) -> Iterator[str]:
    for one in messages:
        yield f"{one['severity']} {one['title']}, {_at(one)}"
        for sent in one["delivered"]:
            tries = f" after {sent['tries']} attempts" if (sent["tries"] or 1) > 1 else ""
            yield f"  {'delivered' if sent['ok'] else 'NOT delivered'}{tries}: {sent['detail']}"
        if not one["delivered"]:
            yield "  no delivery on record"


def _end(report: Part) -> Iterator[str]:
    end = report["end"]
    failed = "every action on the job failed" if end["failed"] else "no action on the job"
    acted = {True: "the job was changed", False: failed, None: "effect on the job unknown"}
    yield f"{end['reason']}, {_at(end)}; {acted[end['acted']]}"


def _timeline(moments: Sequence[Part]) -> Iterator[str]:
    for one in moments:
        attempt = f"/{one['attempt']}" if one["attempt"] else ""
        yield (
            f"{clock(one['wall'])} {one['since_s']:+9.3f} s  step {one['step']}{attempt}  "
            f"{one['kind']}: {one['reason']}"
        )


def _at(one: Part) -> str:
    attempt = f" of attempt {one['attempt']}" if one["attempt"] else ""
    return f"step {one['step']}{attempt} {clock(one['wall'])} (record {one['record']})"


def _inline(values: Mapping[str, Any], joint: str = "=") -> str:
    shown = {k: v for k, v in values.items() if not isinstance(v, (list, tuple)) or v}
    return ", ".join(f"{name}{joint}{_value(name, value)}" for name, value in shown.items())


def _value(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_inline(value)})"
    if isinstance(value, (list, tuple)):
        return f"[{len(value)}]"
    return str(value)[:12] if name == "sha256" else number(value)
