"""The document on a terminal: a card of ten lines, and all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..records import clock
from .sentences import number

Part = Mapping[str, Any]

SENTENCES = ("what", "cause", "did", "cost", "proof")
WIDE = 100  # columns of the first line


def card(document: Part) -> Iterator[str]:
    """Yield the card: a title line, one line per sentence, the loss, and what is next."""
    head = f"{document['id']}  {document['severity']}  {document['title']}"
    yield f"{head:<{WIDE - len(document['state']) - 2}}  {document['state']}"
    for name in SENTENCES:
        yield f"{name.capitalize():7}{document[name]['text']}"
    if document["loss"]["spark"]:
        yield f"{'Loss':7}{document['loss']['spark']}"
    yield f"{'Next':7}{following(document)}"
    if not document["final"]:
        yield f"{'State':7}{document['state_means']}; {document['run']['phase']}"


def following(document: Part) -> str:
    """Return what is next, and where the evidence is."""
    text = str(document["next"]["text"])
    where = evidence(document)
    return f"{text}{'' if text.endswith('.') else '.'} {where}"


def evidence(document: Part) -> str:
    """Return where the evidence is, or that there is none."""
    if document["evidence"]["bundles"]:
        return f"Evidence: {document['evidence']['directory']}/"
    return "No evidence bundle"


def rows(overviews: Sequence[Part]) -> Iterator[str]:
    """Yield one line per incident of a run."""
    for one in overviews:
        first, last = one["steps"]
        yield (
            f"{one['id']:8} {one['severity']}  step {first}..{last}  {clock(one['wall'])}  "
            f"{one['state']}: {one['title']}"
        )


def full(document: Part) -> Iterator[str]:
    """Yield the card, then headings with the numbers behind it."""
    yield from card(document)
    for heading, part in (
        ("conditions (value | limit | past)", _conditions(document["conditions"])),
        ("rules that fired", _rules(document["rules"])),
        ("suppressed", _suppressed(document["suppressed"])),
        ("actions", _actions(document)),
        ("diagnosis", _diagnosis(document["diagnosis"])),
        ("messages", _messages(document["messages"])),
        ("timeline", _timeline(document["timeline"])),
        ("replay", filter(None, document["replay"].values())),
    ):
        text = list(part)
        if text:
            yield ""
            yield heading
            yield from (f"  {line}" for line in text)


def _conditions(conditions: Sequence[Part]) -> Iterator[str]:
    for one in conditions:
        yield f"{one['code']:7} {one['detector']}: {one['text']}"
        value, limit, past = cells(one)
        yield f"        {value} | limit {limit} | before: {past}"


def cells(one: Part) -> tuple[str, str, str]:
    """Return value, limit and past of a condition, each in a few words."""
    measure = "" if one["measure"] == "value" else f"{one['measure']} "
    value = f"{measure}{shown(one['measured'])}"
    if one["nonfinite"]:
        value = f"{', '.join(one['nonfinite'])} NaN or Inf"
    limit = "none" if one["limit"] is None else shown(one["limit"])
    past = one["past"]
    if past is None:
        return value, limit, "unknown"
    near = f"nearest {shown(past['measured'])} at step {past['step']}"
    return value, limit, f"{near}, of {past['steps']} frames"


def shown(value: Any) -> str:
    """Return a number of the document; "NaN" and the like are text there already."""
    return value if isinstance(value, str) else "absent" if value is None else number(value)


def _rules(rules: Sequence[Part]) -> Iterator[str]:
    for one in rules:
        runs = f", runs {one['runbook']}" if one["runbook"] else ""
        yield f"{one['rule']} ({one['severity']}{runs}), {at(one)}, rank {one['rank']}"
        yield f"  when {one['when']}" + (f"   in {one['where']}" if one["where"] else "")


def _suppressed(records: Sequence[Part]) -> Iterator[str]:
    for one in records:
        yield f"{one['text']} [{one['by']}], {at(one)}"
        for step in one["would"]:
            refused = f"refused: {step['refused']}" if "refused" in step else ""
            yield f"  {step['verb']} {refused or inline(step.get('args') or {})}".rstrip()


def _actions(document: Part) -> Iterator[str]:
    for action in document["actions"]:
        undo = "undo: " if action["undo"] else ""
        yield f"{undo}{action['verb']} {inline(action['args'])}".rstrip()
        yield f"  {outcome(action)} [{action['runbook']}]"
    for one in document["verification"]:
        yield f"{one['what'] or 'verify'}: {one['text']}, {at(one)}"
    if document["cost"]["budgets"]:
        yield f"budgets after the last action: {inline(document['cost']['budgets'], ' ')}"


def outcome(action: Part) -> str:
    """Return what became of an action, with what was observed."""
    at_records = f" (record {action['record']} -> {action['outcome_record']})"
    if action["ok"] is None:
        known = action["outcome_record"] is not None
        return f"in doubt: {action['outcome']}" if known else "intended; no outcome on record"
    how = "done" if action["ok"] else f"FAILED: {action['outcome']}"
    result = dict(action["result"])
    ack = result.pop("ack_step", None)
    where = f" at the end of step {ack}" if ack is not None else ""
    took = f" after {action['took_s']:.1f} s" if action["took_s"] is not None else ""
    observed = inline(result)
    return f"{how}{where}{took}{at_records}" + (f"; observed {observed}" if observed else "")


def _diagnosis(found: Part | None) -> Iterator[str]:
    if not found:
        return
    yield str(found.get("class", "undecided"))
    for n, (name, answer) in enumerate((found.get("questions") or {}).items(), 1):
        yield f"{n} {name.replace('_', ' ')}: {answer.get('answer')}: {answer.get('text')}"
    if advice := found.get("advice"):
        yield f"advice: {advice}"


def _messages(messages: Sequence[Part]) -> Iterator[str]:
    for one in messages:
        yield f"{one['severity']} {one['title']}, {at(one)}"
        for sent in one["delivered"]:
            tries = f" after {sent['tries']} attempts" if (sent["tries"] or 1) > 1 else ""
            yield f"  {'delivered' if sent['ok'] else 'NOT delivered'}{tries}: {sent['text']}"
        if not one["delivered"]:
            yield "  no delivery on record"


def _timeline(moments: Sequence[Part]) -> Iterator[str]:
    for one in moments:
        attempt = f"/{one['attempt']}" if one["attempt"] else ""
        yield (
            f"{clock(one['wall'])} {one['since_s']:+9.3f} s  step {one['step']}{attempt}  "
            f"{one['kind']}: {one['text']}"
        )


def at(one: Part) -> str:
    """Return when something was: step, attempt, time of day, audit record."""
    attempt = f" of attempt {one['attempt']}" if one["attempt"] else ""
    return f"step {one['step']}{attempt} {clock(one['wall'])} (record {one['record']})"


def inline(values: Mapping[str, Any], joint: str = "=") -> str:
    """Return named values in one line; lists by their length."""
    known = {k: v for k, v in values.items() if not isinstance(v, list) or v}
    return ", ".join(f"{name}{joint}{_value(name, value)}" for name, value in known.items())


def _value(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({inline(value)})"
    if isinstance(value, list):
        return f"[{len(value)}]"
    return str(value)[:12] if name == "sha256" else shown(value) if value is not None else "none"
