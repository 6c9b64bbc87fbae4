"""A story as lines of text: what `supervise why` prints. The data is an `incident_report`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.model.format_readings import number
from . import action_counts
from .incident_report import COUNTS, clock

Part = Mapping[str, Any]


def lines(story: Part) -> Iterator[str]:
    """Yield the story, headings at the left, two spaces deeper what belongs to them."""
    end = story["end"]
    yield f"{story['incident']}  {story['severity']}  {story['headline']}"
    if end["how"] == "closed":
        yield f"  {end['reason']}, {_at(end)}"
    else:
        yield f"  not over: {end['reason']}"
    for heading, part in (
        ("what was seen", _seen(story)),
        ("which rule fired", _rules(story["rules"])),
        ("what was held back", _suppressed(story["suppressed"])),
        ("what was done", _done(story)),
        ("what kind of trouble it was", _spike(story["spike"])),
        ("who was told", _messages(story["messages"])),
        ("how it ended", _end(story)),
        ("step by step", _timeline(story["timeline"])),
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
        acted = action_counts.told({how: row[name] for how, name in COUNTS.items()})
        yield (
            f"{row['incident']:8} {row['severity']}  step {row['step']}{until}  "
            f"{clock(row['wall'])}  {row['end'] or row['phase']}; {acted}"
        )
        yield f"         {row['headline']}"


def _seen(story: Part) -> Iterator[str]:
    seen = story["seen"]
    yield f"{_at(seen)}, first breach at step {seen['breach_step']}"
    for one in seen["readings"]:
        yield f"{one['detector']}: {one['text']}"
    if not seen["readings"]:
        yield str(seen["reason"])
    if band := seen["band"]:
        yield (
            f"the loss was {number(band['level'])}; it counts as back under {number(band['limit'])}"
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


def _done(story: Part) -> Iterator[str]:
    for book in story["runbooks"]:
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
    if story["runbooks"] and story["budgets"]:
        yield f"budgets after the last action: {_inline(story['budgets'], ' ')}"
    if not story["runbooks"]:
        yield "no runbook ran"


def _outcome(action: Part) -> str:
    if action["ok"] is None:
        said = action.get("outcome")
        return f"in doubt: {said}" if said else "intended; no outcome is recorded"
    how = "done" if action["ok"] else f"FAILED: {action['outcome']}"
    ack = f" at the end of step {action['ack_step']}" if action["ack_step"] is not None else ""
    took = f" after {action['took_s']:.1f} s" if action["took_s"] is not None else ""
    seen = _inline({k: v for k, v in action["result"].items() if k != "ack_step"})
    at = f" (record {action['record']} -> {action['outcome_record']})"
    return f"{how}{ack}{took}{at}" + (f"; observed {seen}" if seen else "")


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
        for told in one["delivered"]:
            tries = f" in {told['tries']} tries" if (told["tries"] or 1) > 1 else ""
            yield f"  {'delivered' if told['ok'] else 'NOT delivered'}{tries}: {told['said']}"
        if not one["delivered"]:
            yield "  no channel has answered yet, or none wanted it"


def _end(story: Part) -> Iterator[str]:
    end = story["end"]
    failed = "every action on the job failed" if end["failed"] else "the job was not touched"
    acted = {True: "the job was acted on", False: failed, None: "whether it was acted on is open"}
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
    told = {k: v for k, v in values.items() if not isinstance(v, (list, tuple)) or v}
    return ", ".join(f"{name}{joint}{_value(name, value)}" for name, value in told.items())


def _value(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_inline(value)})"
    if isinstance(value, (list, tuple)):
        return f"[{len(value)}]"
    return str(value)[:12] if name == "sha256" else number(value)
