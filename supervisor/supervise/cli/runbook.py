"""`supervise runbook`: what a runbook does, when it runs, what it costs, what people check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from ..errors import UsageError
from ._output import document, print_table

Facts = Mapping[str, Any]
# Keys of a runbook that are for people, and their headings.
TEXTS = {
    "containment": "contain",
    "evidence": "evidence",
    "diagnose": "diagnose",
    "probe_replay": "reproduce",
    "over_when": "over when",
}


@click.command(name="runbook")
@click.argument("name", required=False, metavar="[NAME]")
@click.option(
    "-p", "--policy", default="nano", metavar="P", help="Policy that it is in. Default: nano."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(name: str | None, policy: str, as_json: bool) -> None:
    """Show a runbook: its steps, when it runs, what it costs, and what people check.

    Without NAME the runbooks of the policy are listed. P is a file, or the name of a shipped
    policy; RUN/policy.yaml is that of a run.

    \b
    Examples:
      supervise runbook
      supervise runbook rollback-and-rewarm
      supervise runbook loss-spike --policy runs/20260105-101112-7f3a9c/policy.yaml

    Exit codes: 0; 64 no such runbook; 65 the policy is invalid.
    """
    from ..catalog import loader
    from ..catalog.diagnostics import did_you_mean
    from ..catalog.loader import compose

    draft = compose(policy)
    whole = loader.document(draft)
    books = whole["runbooks"]
    if name is None:
        found = [_facts(each, whole) for each in sorted(books)]
        found.sort(key=lambda facts: not facts["acts"])
        click.echo(document(found)) if as_json else print_table(list(_rows(found)), HEADER)
        return
    if name not in books:
        raise UsageError(
            f"policy {draft.name} has no runbook {name!r}", hint=did_you_mean(name, books)
        )
    facts = _facts(name, whole)
    if as_json:
        click.echo(document(facts))
    else:
        print_table(list(_lines(facts)))


HEADER = ("runbook", "steps", "runs for", "meaning")


def _facts(name: str, whole: Facts) -> dict[str, Any]:
    """Return the runbook with its steps explained, its users, and the budgets that it needs."""
    from ..catalog import discover
    from ..catalog.forms.part_types import summary

    actions, book = discover.actions(), whole["runbooks"][name]
    steps, budgets = [], []
    for step in book["steps"]:
        verb, args = (step, {}) if isinstance(step, str) else next(iter(step.items()))
        form = actions[verb]
        steps.append({"verb": verb, "args": args, "does": summary(form)})
        counted = form.budget and not args.get("tested")  # else a part of what goes back
        budgets += [form.budget, "all"] if counted else []
    given = whole.get("budgets") or {}
    rules = whole.get("rules") or ()
    ladder = (whole.get("escalate") or {}).get("ladder") or ()
    return {
        **book,
        "runbook": name,
        "policy": whole["policy"],
        "steps": steps,
        "acts": any(actions[step["verb"]].touches_job for step in steps),
        "budgets": {each: given.get(each) for each in dict.fromkeys(budgets)},
        "run_by": [rule["id"] for rule in rules if rule.get("run") == name],
        "read_for": [rule["id"] for rule in rules if rule.get("see") == name],
        "ladder_level": _level(name, ladder),
        "after": [
            other
            for other, each in whole["runbooks"].items()
            if name in (each.get("if_it_fails", "hold"), each.get("if_refused"))
        ],
    }


def _level(name: str, ladder: Any) -> int | None:
    names = [each if isinstance(each, str) else next(iter(each)) for each in ladder]
    return names.index(name) + 1 if name in names else None


def _rows(found: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for facts in found:
        verbs = " → ".join(step["verb"] for step in facts["steps"])
        users = len(facts["run_by"])
        runs = f"{users} rule{'s' if users > 1 else ''}" if users else "-"
        yield facts["runbook"], verbs, runs, facts.get("meaning", "")


def _lines(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield what is run, then what is read."""
    yield "runbook", f"{facts['runbook']} (policy {facts['policy']})"
    yield "meaning", facts.get("meaning") or "-"
    yield "costs", facts.get("impact") or "-"
    yield "runs for", ", ".join(facts["run_by"]) or _other_use(facts)
    if facts["ladder_level"]:
        yield "ladder", f"level {facts['ladder_level']} of what is tried in an incident"
    if facts["after"]:
        yield "follows", ", ".join(facts["after"])
    if facts["read_for"]:
        yield "read for", ", ".join(facts["read_for"])
    for number, step in enumerate(facts["steps"], 1):
        args = ", ".join(f"{key} {value}" for key, value in step["args"].items())
        yield f"step {number}", f"{step['verb']}{f' ({args})' if args else ''}: {step['does']}"
    yield "if it fails", facts.get("if_it_fails", "hold")
    if facts.get("if_refused"):
        yield "if refused", facts["if_refused"]
    if facts["budgets"]:
        yield "budgets", ", ".join(_budget(*each) for each in facts["budgets"].items())
    elif not facts["acts"]:
        yield "budgets", "none: it does not touch the job"
    for key, head in TEXTS.items():
        yield from ((head, text) for text in facts.get(key) or ())
    for area, texts in (facts.get("localize") or {}).items():
        yield from ((area, text) for text in texts)


def _other_use(facts: Facts) -> str:
    if facts["ladder_level"] or facts["after"]:
        return "no rule at first"
    return "no rule: it is for people to read" if facts["read_for"] else "no rule of this policy"


def _budget(name: str, given: Any) -> str:
    if not isinstance(given, Mapping):
        return f"{name}: none in this policy"
    return f"{name} {given['max']}" + _window(given.get("per"))


def _window(per: Any) -> str:
    if per is None:
        return ""
    return f" per {per} steps" if isinstance(per, int) else f" per {per}"
