"""Reference commands: the metrics, the runbooks, and the completion of a shell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec
from click.shell_completion import get_completion_class

from ..errors import UsageError
from ._output import echo, echo_json, print_table
from ._params import PROGRAM

ORDER = """\
Frame t holds the values of optimizer step t: loss(t) -> grad(t) -> update(t). The update of step t
affects the loss of frame t+1. Values on an accelerator are published one step late, in the frame
of the step that they belong to. Under FSDP a rank's norms are those of its shard; their squares
add up over the ranks."""

_MEASURED = {
    "probe": "by the probe",
    "supervisor": "by the supervisor, beside the job",
    "build": "of training data, by supervise data check",
    "job": "no; the job must report it",
}
_COSTS = {
    "supervisor": "nothing in the job's process",
    "build": "nothing in a run; a pass over the data",
    "job": "what the job spends to compute it",
}


@click.group(name="metrics", no_args_is_help=True)
def metrics_command() -> None:
    """List the metrics, or explain one.

    A job can report further metrics: `supervise_probe.report(my_score=x)`.
    """


@metrics_command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def listing(as_json: bool) -> None:
    """List every metric with a standard id.

    Each has its unit, and the packs whose rules judge it. If none does, or nothing measures it, the
    end of its description says why.

    \b
    Examples:
      supervise metrics list
      supervise metrics list --json | jq '.[] | select(.measured) | .id'
    """
    from ..catalog import docs, metrics

    entries = [describe_metric(name) for name in metrics.all_metrics()]
    if as_json:
        echo_json(msgspec.to_builtins(entries))
        return
    for source, head in docs.BY.items():
        rows = [entry for entry in entries if entry.measured_by == source]
        if rows:
            echo(f"{head}:")
            print_table([(f"  {row.id}", row.unit, *_listed(row)) for row in rows])


@metrics_command.command(name="show")
@click.argument("metric", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show(metric: str, as_json: bool) -> None:
    """Explain one metric and list the detectors that read it.

    \b
    Examples:
      supervise metrics show grad_global_norm
      supervise metrics show learning_rate.1 --json
    """
    from ..catalog import metrics
    from ..catalog.diagnostics import did_you_mean

    if not metrics.is_known(metric):
        near = metrics.suggest_metric(metric) or did_you_mean(metric, metrics.similar_ids(metric))
        raise UsageError(f"no metric {metric!r}", hint=near or "supervise metrics list")
    entry = describe_metric(metric)
    if as_json:
        echo_json(msgspec.to_builtins(entry))
        return
    echo(f"{entry.id} [{entry.unit}]")
    echo(f"  {entry.meaning}")
    echo(f"  {'source:':10} {entry.source}")
    echo(f"  {'cost:':10} {entry.cost}")
    echo(f"  {'measured:':10} {_MEASURED[entry.measured_by]}")
    if entry.not_covered:
        echo(f"  {'reason:':10} {entry.not_covered}")
    if entry.rules:
        echo(f"  {'rules:':10} {', '.join(entry.rules)}")
    for name, text in entry.detectors.items():
        echo(f"  {'detector:':10} {name}: {text}")
    echo("", f"{ORDER}")


class MetricEntry(msgspec.Struct, frozen=True):
    """The facts of a standard metric.

    Attributes:
        measured_by: docs.PROBE, SUPERVISOR, BUILD or JOB.
        not_covered: the reason for no rule, else "".
        rules: those that judge it. detectors: those that read it, with their parameters.
    """

    id: str
    unit: str
    meaning: str
    source: str
    cost: str
    measured: bool
    measured_by: str
    not_covered: str
    rules: Sequence[str]
    detectors: Mapping[str, str]


def describe_metric(metric: str) -> MetricEntry:
    """Return the facts of a standard metric."""
    from ..catalog import docs, metrics
    from ..catalog.metrics import ABSENCE_REASONS
    from ._job_check import SUPERVISOR_METRICS

    spec = metrics.spec_of(metric)
    assert spec is not None
    readers = docs.measuring_component(metric, SUPERVISOR_METRICS)
    return MetricEntry(
        id=metric,
        unit=spec.unit,
        meaning=spec.meaning,
        source=spec.source,
        cost=_cost(spec.id) if readers == docs.PROBE else _COSTS[readers],
        measured=readers != docs.JOB,
        measured_by=readers,
        not_covered=ABSENCE_REASONS.get(spec.id, ""),
        rules=docs.rules_judging(metric),
        detectors=docs.detectors_reading(metric),
    )


def _listed(entry: MetricEntry) -> tuple[str, str]:
    """Return the packs that judge a metric, and what it means; where not covered, why."""
    packs = dict.fromkeys(rule.partition(".")[0] for rule in entry.rules)
    return ", ".join(packs) or "-", " ".join(filter(None, (entry.meaning, entry.not_covered)))


def _cost(metric: str) -> str:
    """Return what a sample costs the job; many metrics are by-products of another one."""
    from supervise_probe import collectors

    family = next(
        family
        for collector in collectors.collector_classes().values()
        if metric in (family := {spec.id: str(spec.cost) for spec in collector.METRICS})
    )
    if family[metric]:
        return family[metric]
    member = next((name for name, cost in family.items() if cost), None)
    if member is None:
        return "no pass over data of its own; probe_self_time has the total"
    return f"that of {member}: {family[member]}"


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
    "-p", "--policy", default="nano", metavar="P", help="Policy that has it. Default: nano."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def runbook_command(name: str | None, policy: str, as_json: bool) -> None:
    """Show a runbook: its actions, triggers, costs and checks.

    Without NAME the runbooks of the policy are listed. P is a file, or the name of a shipped
    policy; that of a run is RUN/policy.yaml.

    \b
    Examples:
      supervise runbook
      supervise runbook rollback-and-rewarm
      supervise runbook loss-spike --policy runs/main/policy.yaml

    Exit codes: 0; 64 no such runbook; 65 the policy is invalid.
    """
    from ..catalog import loader
    from ..catalog.diagnostics import did_you_mean
    from ..catalog.loader import compose_policy

    draft = compose_policy(policy)
    whole = loader.policy_document(draft)
    books = whole["runbooks"]
    if name is None:
        found = [_facts(book, whole) for book in sorted(books)]
        found.sort(key=lambda facts: not facts["acts"])
        echo_json(found) if as_json else print_table(list(_rows(found)), HEADER)
        return
    if name not in books:
        raise UsageError(
            f"policy {draft.name} has no runbook {name!r}", hint=did_you_mean(name, books)
        )
    facts = _facts(name, whole)
    if as_json:
        echo_json(facts)
    else:
        print_table(list(_lines(facts)))


HEADER = ("runbook", "steps", "runs for", "meaning")


def _facts(name: str, document: Facts) -> dict[str, Any]:
    """Return the runbook with its steps explained, its users, and the budgets that it needs."""
    from ..catalog import discover
    from ..catalog.sections import first_sentence

    actions, book = discover.action_classes(), document["runbooks"][name]
    steps, budgets = [], []
    for step in book["steps"]:
        verb, args = (step, {}) if isinstance(step, str) else next(iter(step.items()))
        form = actions[verb]
        steps.append({"verb": verb, "args": args, "does": first_sentence(form)})
        counted = form.budget and not args.get("tested")  # else a part of what goes back
        budgets += [form.budget, "all"] if counted else []
    given = document.get("budgets") or {}
    rules = document.get("rules") or ()
    ladder = (document.get("escalate") or {}).get("ladder") or ()
    return {
        **book,
        "runbook": name,
        "policy": document["policy"],
        "steps": steps,
        "acts": any(actions[step["verb"]].touches_job for step in steps),
        "budgets": {budget: given.get(budget) for budget in dict.fromkeys(budgets)},
        "run_by": [rule["id"] for rule in rules if rule.get("run") == name],
        "read_for": [rule["id"] for rule in rules if rule.get("see") == name],
        "ladder_level": _level(name, ladder),
        "after": [
            book
            for book, steps in document["runbooks"].items()
            if name in (steps.get("if_it_fails", "hold"), steps.get("if_refused"))
        ],
    }


def _level(name: str, ladder: Any) -> int | None:
    names = [level if isinstance(level, str) else next(iter(level)) for level in ladder]
    return names.index(name) + 1 if name in names else None


def _rows(books: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for facts in books:
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
        yield "budgets", ", ".join(_budget(*budget) for budget in facts["budgets"].items())
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


def _budget(name: str, budget: Any) -> str:
    if not isinstance(budget, Mapping):
        return f"{name}: none in this policy"
    return f"{name} {budget['max']}" + _window(budget.get("per"))


def _window(per: Any) -> str:
    if per is None:
        return ""
    return f" per {per} steps" if isinstance(per, int) else f" per {per}"


SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_SUPERVISE_COMPLETE"


@click.command(name="completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print what your shell needs to complete commands and runs.

    What follows `--` is the job's command and is not completed.

    \b
    Examples:
      supervise completion bash >> ~/.bash_completion
      supervise completion zsh > "${fpath[1]}/_supervise"
      supervise completion fish > ~/.config/fish/completions/supervise.fish

    Exit codes: 0; 64 no such shell.
    """
    shell_class = get_completion_class(shell)
    assert shell_class is not None
    echo(shell_class(ctx.find_root().command, {}, PROGRAM, VARIABLE).source())
