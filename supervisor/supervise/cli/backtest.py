"""`supervise backtest`: what a policy would have done on recorded runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import msgspec

from ..errors import UsageError
from ._output import echo, echo_json, progress_line

FAILED = 1


@click.command(name="backtest")
@click.argument(
    "recordings", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN..."
)
@click.option("--policy", required=True, metavar="P", help="Name or file of the policy.")
@click.option("--against", multiple=True, metavar="Q", help="Compare with this policy; repeatable.")
@click.option(
    "--labels",
    type=click.Path(path_type=Path),
    metavar="CSV",
    help="Known incidents: run, step_start, step_end, kind.",
)
@click.option(
    "--alias", multiple=True, metavar="COL=METRIC", help="Read a column as METRIC; repeatable."
)
@click.option(
    "--fail-on",
    multiple=True,
    metavar="WHAT",
    help="Exit 1 on a message of SEV0, SEV1, SEV2 (or worse), on an action, or on a label that is"
    " missed; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line per run.")
@click.option(
    "--jobs",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Number of processes. Default: by the amount of work.",
)
def backtest_command(
    recordings: tuple[Path, ...],
    policy: str,
    against: tuple[str, ...],
    labels: Path | None,
    alias: tuple[str, ...],
    fail_on: tuple[str, ...],
    as_json: bool,
    jobs: int,
) -> None:
    """Show what a policy would have done on recorded runs.

    With labels, also how often it would have been wrong. RUN is a run directory, a CSV file (also
    .csv.gz), a Parquet file, a TensorBoard directory, an offline W&B run, or a folder with any of
    these. The engine is that of live runs, in shadow mode.

    A label's `run` is the path of a recording: below the nearest folder with an incidents.csv, else
    below the folder common to all. A recording with a column `run` holds the runs named there. A
    run without a label is healthy. An alarm matches a label from 5 logged rows before it to 20
    after it.

    --fail-on looks at --policy only, not at --against. With --labels it ignores alarms and actions
    inside a label.

    \b
    Examples:
      supervise backtest --policy nano runs/*
      supervise backtest --policy mine.yaml --alias nll=train_loss_raw old.csv
      supervise backtest --policy nano --labels logs/incidents.csv logs --json
      supervise backtest --policy mine.yaml --fail-on SEV1 runs/good

    Exit codes: 0; 1 as --fail-on says; 64 wrong usage; 65 a policy or recording cannot be read.
    """
    # Here, not above: other commands need no policies and detectors.
    from ..lab import backtest, score

    extra = dict(map(_column_and_metric, alias))
    labels_of = None if labels is None else score.read_labels(labels)
    _check_fail_on(fail_on, labelled=labels_of is not None)
    for warning in _unknown_metrics(extra, (policy, *against)):
        echo(f"supervise: warning: {warning}", err=True)
    left_out: list[str] = []
    with progress_line("recordings") as report:
        outcome = backtest.run_backtest(
            recordings, [policy, *against], extra, jobs, left_out, report
        )
    for note in left_out:
        echo(f"supervise: skipped {note}", err=True)
    runs = [outcomes[0].run for outcomes in outcome]
    _warn_of_others(score.unknown_runs(labels_of or (), runs))
    if as_json:
        for line in score.format_outcomes(outcome, labels_of):
            echo_json(msgspec.to_builtins(line))
    else:
        echo(*score.score_lines(outcome, labels_of))
    failed = score.list_failures(score.score_policies(outcome, labels_of)[0], fail_on)
    for series, text in failed.items():
        echo(f"supervise: --fail-on {series}: {text}", err=True)
    if failed:
        click.get_current_context().exit(FAILED)


def _warn_of_others(notes: Sequence[str]) -> None:
    if notes:
        those = "1 run that is" if len(notes) == 1 else f"{len(notes)} runs that are"
        names = ", ".join(notes[:3]) + (", …" if notes[3:] else "")
        echo(f"supervise: warning: labels name {those} not among these: {names}", err=True)


def _column_and_metric(pair: str) -> tuple[str, str]:
    column, equals, metric = pair.rpartition("=")
    if not (equals and column and metric):
        raise UsageError(f"--alias {pair!r}", hint="use COLUMN=METRIC, as in nll=train_loss_raw")
    return column, metric


def _check_fail_on(conditions: Sequence[str], *, labelled: bool) -> None:
    from ..catalog.diagnostics import did_you_mean
    from ..lab import score

    for condition in conditions:
        if condition not in score.FAILURES:
            hint = did_you_mean(condition, score.FAILURES, alike=0.5)
            raise UsageError(f"--fail-on {condition!r}", hint=hint)
    if "missed" in conditions and not labelled:
        raise UsageError(
            "--fail-on 'missed'", hint="give --labels: what is not known is not missed"
        )


def _unknown_metrics(extra: Mapping[str, str], policies: Sequence[str]) -> Iterator[str]:
    """Yield a warning per alias whose metric is not standard and not read by a policy."""
    from ..catalog import metrics
    from ..lab import backtest

    unknown = {c: metric for c, metric in extra.items() if not metrics.is_known(metric)}
    if not unknown:
        return
    loaded = [backtest.load_in_shadow_mode(policy) for policy in policies]
    read = {m for policy_of in loaded for d in policy_of.detectors.values() for m in d.metrics}
    for column, metric in unknown.items():
        if metric not in read:
            near = metrics.suggest_metric(metric, {**metrics.all_metrics(), **dict.fromkeys(read)})
            hint = f"; {near}" if near else ""
            yield f"--alias {column}={metric}: no policy reads a metric {metric!r}{hint}"
