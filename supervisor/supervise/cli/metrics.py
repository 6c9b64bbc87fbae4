"""`supervise metrics`: which metrics have a name, what they mean, and who watches them."""

from __future__ import annotations

import json
from typing import Any

import click

from ..errors import UsageError

ORDER = """\
Frame t holds what optimizer step t saw, in this order: loss(t) -> grad(t) -> update(t). The update
of step t shows in the loss of frame t+1. What is copied from an accelerator is published one step
late, in the frame of the step that it belongs to."""


@click.group(name="metrics", no_args_is_help=True)
def command() -> None:
    """List the metrics, or explain one.

    A metric that nobody measures can be reported by the job: `supervise_probe.report(val_loss=x)`.
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
    from ..catalog import metrics

    found = [describe(name) for name in metrics.everything()]
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    width = max(len(row["id"]) for row in found)
    for measured, head in ((True, "measured by the probe"), (False, "to be reported by the job")):
        click.echo(f"{head}:")
        for row in found:
            if row["measured"] is measured:
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
    from ..catalog import metrics
    from ..catalog.problems import did_you_mean

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
        click.echo(f"  {head + ':':10} {found[head] or 'nothing that can be measured'}")
    click.echo(f"  {'measured:':10} {'by the probe' if found['measured'] else 'no; report it'}")
    for name, text in found["detectors"].items():
        click.echo(f"  {'detector:':10} {name}: {text}")
    click.echo(f"\n{ORDER}")


def describe(metric: str) -> dict[str, Any]:
    """Return what is known of a metric that has a standard id, for `--json`."""
    from ..catalog import metrics, readers

    spec = metrics.spec_of(metric)
    assert spec is not None
    return {
        "id": metric,
        "unit": spec.unit,
        "meaning": spec.meaning,
        "source": spec.source,
        "cost": spec.cost,
        "measured": spec.id in metrics.known(),
        "detectors": readers.readers(metric),
    }
