"""`supervise metrics`: which metrics have a name, what they mean, and who watches them."""

from __future__ import annotations

import json
from typing import Any

import click

from ..errors import UsageError

ORDER = """\
Frame t holds what optimizer step t saw, in this order: loss(t) -> grad(t) -> update(t). The update
of step t shows in the loss of frame t+1. What is copied from an accelerator is published one step
late, in the frame of the step that it belongs to. Under FSDP a rank's norms are those
of its shard; their squares add up over the ranks."""

_MEASURED = {
    "probe": "by the probe",
    "supervisor": "by the supervisor, beside the job",
    "job": "no; report it",
    "nobody": "no, and the job cannot know it",
}
_COSTS = {
    "supervisor": "nothing in the job's process",
    "job": "what the job spends on it",
    "nobody": "nothing, as nobody measures it",
}


@click.group(name="metrics", no_args_is_help=True)
def command() -> None:
    """List the metrics, or explain one.

    What is not measured a job may report itself: `supervise_probe.report(my_score=x)`.
    """


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def listing(as_json: bool) -> None:
    """List every metric with a standard id.

    \b
    Examples:
      supervise metrics list
      supervise metrics list --json | jq '.[] | select(.measured) | .id'
    """
    from ..catalog.export import origin
    from ..catalog.inventory import metrics

    found = [describe(name) for name in metrics.everything()]
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    width = max(len(row["id"]) for row in found)
    for who, head in origin.BY.items():
        click.echo(f"{head}:")
        for row in found:
            if row["measured_by"] == who:
                click.echo(f"  {row['id']:{width}}  {row['unit']:9}  {row['meaning']}")


@command.command(name="show")
@click.argument("metric", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show(metric: str, as_json: bool) -> None:
    """Explain one metric: unit, formula, cost, source, and the detectors that read it.

    \b
    Examples:
      supervise metrics show grad_global_norm
      supervise metrics show learning_rate.1 --json
    """
    from ..catalog.document.diagnostics import did_you_mean
    from ..catalog.inventory import metrics

    if not metrics.is_known(metric):
        near = did_you_mean(metric, metrics.near(metric))
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
    for name, text in found["detectors"].items():
        click.echo(f"  {'detector:':10} {name}: {text}")
    click.echo(f"\n{ORDER}")


def describe(metric: str) -> dict[str, Any]:
    """Return what is known of a metric that has a standard id, for `--json`."""
    from ..catalog.export import metric_readers, origin
    from ..catalog.inventory import metrics
    from . import _supervisor_metrics

    spec = metrics.spec_of(metric)
    assert spec is not None
    by = origin.measured_by(metric, _supervisor_metrics.METRICS)
    return {
        "id": metric,
        "unit": spec.unit,
        "meaning": spec.meaning,
        "source": spec.source,
        "cost": _cost(spec.id) if by == origin.PROBE else _COSTS[by],
        "measured": by in (origin.PROBE, origin.SUPERVISOR),
        "measured_by": by,
        "detectors": metric_readers.readers(metric),
    }


def _cost(metric: str) -> str:
    """Return what a sample costs the job; many come out of what another metric was taken for."""
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
        return "no pass over data of its own; see probe_self_time for all together"
    return f"that of {first}: {family[first]}"
