"""`supervise metrics`: the standard metrics, what they mean, and which detectors read them."""

from __future__ import annotations

import json
from typing import Any

import click

from ..errors import UsageError
from ._output import print_table

ORDER = """\
Frame t holds the values of optimizer step t: loss(t) -> grad(t) -> update(t). The update of step t
affects the loss of frame t+1. Values on an accelerator are published one step late, in the frame
of the step that they belong to. Under FSDP a rank's norms are those of its shard; their squares
add up over the ranks."""

_MEASURED = {
    "probe": "by the probe",
    "supervisor": "by the supervisor, beside the job",
    "job": "no; the job must report it",
}
_COSTS = {
    "supervisor": "nothing in the job's process",
    "job": "what the job spends to compute it",
}


@click.group(name="metrics", no_args_is_help=True)
def command() -> None:
    """List the metrics, or explain one.

    A job can report further metrics: `supervise_probe.report(my_score=x)`.
    """


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def listing(as_json: bool) -> None:
    """List every metric with a standard id, its unit, and the packs whose rules judge it.

    Where none does, or nothing measures it, its last sentence says why.

    \b
    Examples:
      supervise metrics list
      supervise metrics list --json | jq '.[] | select(.measured) | .id'
    """
    from ..catalog import docs, metrics

    found = [describe(name) for name in metrics.everything()]
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    for source, head in docs.BY.items():
        rows = [row for row in found if row["measured_by"] == source]
        if rows:
            click.echo(f"{head}:")
            print_table([(f"  {row['id']}", row["unit"], *_listed(row)) for row in rows])


@command.command(name="show")
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
        near = metrics.meant(metric) or did_you_mean(metric, metrics.near(metric))
        raise UsageError(f"no metric {metric!r}", hint=near or "supervise metrics list")
    found = describe(metric)
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    click.echo(f"{found['id']} [{found['unit']}]")
    click.echo(f"  {found['meaning']}")
    for head in ("source", "cost"):
        click.echo(f"  {head + ':':10} {found[head]}")
    click.echo(f"  {'measured:':10} {_MEASURED[found['measured_by']]}")
    if found["not_covered"]:
        click.echo(f"  {'reason:':10} {found['not_covered']}")
    if found["rules"]:
        click.echo(f"  {'rules:':10} {', '.join(found['rules'])}")
    for name, text in found["detectors"].items():
        click.echo(f"  {'detector:':10} {name}: {text}")
    click.echo(f"\n{ORDER}")


def describe(metric: str) -> dict[str, Any]:
    """Return the facts of a standard metric, for `--json`."""
    from ..catalog import docs, metrics
    from ..catalog.metrics import REASONS
    from ._metric_availability import SUPERVISOR_METRICS

    spec = metrics.spec_of(metric)
    assert spec is not None
    by = docs.measured_by(metric, SUPERVISOR_METRICS)
    return {
        "id": metric,
        "unit": spec.unit,
        "meaning": spec.meaning,
        "source": spec.source,
        "cost": _cost(spec.id) if by == docs.PROBE else _COSTS[by],
        "measured": by in (docs.PROBE, docs.SUPERVISOR),
        "measured_by": by,
        "not_covered": REASONS.get(spec.id, ""),
        "rules": docs.judges(metric),
        "detectors": docs.readers(metric),
    }


def _listed(row: dict[str, Any]) -> tuple[str, str]:
    """Return the packs that judge a metric, and what it means; where not covered, why."""
    packs = dict.fromkeys(rule.partition(".")[0] for rule in row["rules"])
    return ", ".join(packs) or "-", " ".join(filter(None, (row["meaning"], row["not_covered"])))


def _cost(metric: str) -> str:
    """Return what a sample costs the job; many metrics are by-products of another one."""
    from supervise_probe import collectors

    family = next(
        family
        for _, module in collectors.modules()
        if metric in (family := {spec.id: str(spec.cost) for spec in module.METRICS})
    )
    if family[metric]:
        return family[metric]
    first = next((name for name, cost in family.items() if cost), None)
    if first is None:
        return "no pass over data of its own; probe_self_time has the total"
    return f"that of {first}: {family[first]}"
