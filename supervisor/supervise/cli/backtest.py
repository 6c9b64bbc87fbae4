"""`supervise backtest`: what a policy would have done on runs that were recorded before."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from ..errors import UsageError


@click.command(name="backtest")
@click.argument(
    "recordings", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN..."
)
@click.option("--policy", required=True, metavar="P", help="Name or file of the policy.")
@click.option(
    "--against", multiple=True, metavar="Q", help="Another policy to compare with; may be repeated."
)
@click.option(
    "--labels",
    type=click.Path(path_type=Path),
    metavar="CSV",
    help="What is known: run, step_start, step_end, kind.",
)
@click.option(
    "--alias", multiple=True, metavar="COL=METRIC", help="What a column is; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON line per run.")
@click.option(
    "--jobs", type=click.IntRange(0), default=0, metavar="N", help="Processes; 0: as many as help."
)
def command(
    recordings: tuple[Path, ...],
    policy: str,
    against: tuple[str, ...],
    labels: Path | None,
    alias: tuple[str, ...],
    as_json: bool,
    jobs: int,
) -> None:
    """Show what a policy would have done on recorded runs, and how often it would have been wrong.

    RUN is a run directory, a CSV file (also .csv.gz), a Parquet file, a TensorBoard directory, an
    offline W&B run, or a folder with any of these. It is judged by the very engine that runs live,
    in shadow mode. Exit status 65: a policy or a recording cannot be read.

    A run is called by its path below the nearest folder that holds an incidents.csv, else below the
    folder that all have in common; in a table with a column `run` by that; `file` is put behind
    the table's own name. With --labels, a run that has none is taken for healthy, and an alarm
    finds a label from 5 logged rows before it to 20 after it.

    \b
    Examples:
      supervise backtest --policy nano runs/*
      supervise backtest --policy mine.yaml --against nano old.csv --alias nll=train_loss_raw
      supervise backtest --policy nano --labels logs/incidents.csv logs --json
    """
    # Here, not above: policies and detectors are not needed by the other commands.
    from ..backtest import compare, pool, score

    extra = {}
    for pair in alias:
        column, equals, metric = pair.rpartition("=")
        if not (equals and column and metric):
            raise UsageError(f"--alias {pair!r}", hint="column=metric, as in nll=train_loss_raw")
        extra[column] = metric
    known = None if labels is None else score.read_labels(labels)
    for told in _unknown(extra, (policy, *against)):
        click.echo(f"supervise: warning: {told}", err=True)
    left_out: list[str] = []
    found = pool.run(recordings, [policy, *against], extra, jobs, left_out)
    for each in left_out:
        click.echo(f"supervise: left out {each}", err=True)
    runs = [outcomes[0].run for outcomes in found]
    others = score.unknown_runs(known or (), runs)
    if others:
        those = "1 run that is" if len(others) == 1 else f"{len(others)} runs that are"
        told = f"labels name {those} not among these: {', '.join(others[:3])}"
        click.echo(f"supervise: warning: {told}{', …' if others[3:] else ''}", err=True)
    if as_json:
        for line in compare.lines(found, known):
            click.echo(json.dumps(line, ensure_ascii=False, allow_nan=False))
        return
    for text in compare.report(found, known):
        click.echo(text)


def _unknown(extra: Mapping[str, str], policies: Sequence[str]) -> Iterator[str]:
    """Yield a sentence per alias whose metric has no standard name and that no policy reads."""
    from ..backtest import backtest_runner
    from ..catalog.inventory import metrics

    wrong = {c: metric for c, metric in extra.items() if not metrics.is_known(metric)}
    if not wrong:
        return
    loaded = [backtest_runner.shadowed(policy) for policy in policies]
    read = {m for each in loaded for d in each.detectors.values() for m in d.metrics}
    for column, metric in wrong.items():
        if metric not in read:
            near = difflib.get_close_matches(
                metric, {**metrics.everything(), **dict.fromkeys(read)}
            )
            meant = f"; did you mean {near[0]!r}?" if near else ""
            yield f"--alias {column}={metric}: nobody reads a metric {metric!r}{meant}"
