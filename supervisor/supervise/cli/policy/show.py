"""`supervise policy show`: the whole policy, packs and defaults included."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ...errors import UsageError

if TYPE_CHECKING:
    from ...catalog.loader import Draft

Facts = dict[str, Any]
PARTS = ("detectors", "rules", "inhibit", "runbooks")  # every one of them has its own place


@click.command(name="show")
@click.argument("policy", metavar="P")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--rule", "rule_id", metavar="R", help="Show only this rule and the detectors it reads."
)
@click.option(
    "--runbook", "book", metavar="B", help="Print only this runbook: what people check, and steps."
)
def command(policy: str, as_json: bool, rule_id: str | None, book: str | None) -> None:
    """Show a policy with packs and defaults merged.

    P is a path, or the name of a shipped policy. The output is itself a policy with the same
    digest, also of a policy that extends another one. Comments give the place where a part is
    defined, the overrides that apply, the metrics it reads, and those that the job must report.

    \b
    Examples:
      supervise policy show nano > whole.yaml
      supervise policy show nano --rule loss_spike.coupled
      supervise policy show nano --runbook nan
      supervise policy show my.yaml --json | jq '.rules[] | select(.to_report != [])'

    Exit codes: 0; 64 no such rule or runbook; 65 the policy is invalid.
    """
    from ...catalog import docs, loader
    from ...catalog.diagnostics import did_you_mean
    from ...catalog.loader import compose
    from .._metric_availability import SUPERVISOR_METRICS

    draft = compose(policy)
    facts = docs.facts(draft, SUPERVISOR_METRICS)
    if rule_id is not None and rule_id not in facts["rules"]:
        hint = did_you_mean(rule_id, facts["rules"])
        raise UsageError(f"policy {draft.name} has no rule {rule_id!r}", hint=hint)
    document = loader.document(draft)
    if book is not None:
        _print_runbook(draft.name, document["runbooks"], book, as_json=as_json)
        return
    if rule_id is not None:
        document, facts = _only(rule_id, document, facts, draft)
    if as_json:
        click.echo(json.dumps(_merged(document, facts), ensure_ascii=False, indent=2))
    elif rule_id is None:
        whole = loader.policy(draft)
        click.echo(f"# {whole.digest}")
        click.echo("\n".join(_commented(whole.resolved.splitlines(), facts)))
    else:
        from ...catalog import yaml_document

        click.echo("\n".join(_commented(yaml_document.dump(document).splitlines(), facts)))


def _print_runbook(policy: str, books: Mapping[str, Any], name: str, *, as_json: bool) -> None:
    from ...catalog import yaml_document
    from ...catalog.diagnostics import did_you_mean

    if name not in books:
        raise UsageError(f"policy {policy} has no runbook {name!r}", hint=did_you_mean(name, books))
    if as_json:
        click.echo(json.dumps(books[name], ensure_ascii=False, indent=2))
    else:
        click.echo(yaml_document.dump(books[name]).rstrip())


def _only(
    rule_id: str, document: Facts, facts: Facts, draft: Draft
) -> tuple[dict[str, Any], Facts]:
    """Keep the parts of a policy that concern one rule."""
    mine = facts["rules"][rule_id]
    rule = next(rule for rule in document["rules"] if rule["id"] == rule_id)
    names = [name for name in document["detectors"] if name in mine["detectors"]]
    books = draft.runbooks if rule.get("run") in draft.runbooks else {}
    shown = {
        "detectors": {name: document["detectors"][name] for name in names},
        "rules": [rule],
        "inhibit": [i for i in document["inhibit"] if rule_id in (*i["mute"], i.get("by_rule"))],
        "runbooks": {n: document["runbooks"][n] for n in books if n == rule["run"]},
    }
    about = {
        "sections": {},
        "detectors": {name: facts["detectors"][name] for name in names},
        "rules": {rule_id: mine},
        "metrics": {name: facts["metrics"][name] for name in mine["metrics"]},
    }
    return {key: value for key, value in shown.items() if value}, about


def _merged(document: Facts, facts: Facts) -> Facts:
    """Return one document: each part with its facts."""
    detectors = {
        name: {**body, "about": facts["detectors"][name]}
        for name, body in document.get("detectors", {}).items()
    }
    rules = [{**rule, **facts["rules"][rule["id"]]} for rule in document.get("rules", ())]
    about = {"metrics": facts["metrics"], "sections": facts["sections"]}
    return {**document, "detectors": detectors, "rules": rules, **about}


def _commented(lines: list[str], facts: Facts) -> list[str]:
    """Put a comment in front of every detector and every rule of a resolved policy."""
    found: list[str] = []
    detectors, rules = iter(facts["detectors"].values()), iter(facts["rules"].values())
    section = ""
    for line in lines:
        if line[:1] not in (" ", "#", ""):
            section = line.partition(":")[0]
            where = facts["sections"].get(section) if section not in PARTS else None
            found += [f"# {where}"] if where else []
        if section == "detectors" and re.match(r"  [^ -]", line):
            found += [f"  # {text}" for text in _detector(next(detectors))]
        elif section == "rules" and line.startswith("  - "):
            found += [f"  # {text}" for text in _rule(next(rules), facts["metrics"])]
        found.append(line)
    return found


def _origin(about: Facts) -> str:
    changed = [f"{key} overridden in {where}" for key, where in about["overridden"].items()]
    return "; ".join([about["defined"], *changed])


def _detector(about: Facts) -> list[str]:
    text = _origin(about)
    if about["baseline"]:
        text += f"; {' and '.join(about['baseline'])} from the policy's baseline"
    return [text]


def _rule(about: Facts, metrics: Facts) -> list[str]:
    from ...catalog.docs import BY

    lines = [_origin(about), f"reads {', '.join(about['detectors'])}"]
    for source, head in BY.items():
        ids = [name for name in about["metrics"] if metrics[name]["measured_by"] == source]
        if ids:
            lines.append(f"{head}: {', '.join(ids)}")
    if about["muted_by"]:
        lines.append(f"muted by {'; '.join(about['muted_by'])}")
    return lines
