"""Shared parts of the gate's commands: their options, what they read, how a verdict is reported."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import StoreError, UsageError
from ..store import files
from ..store.run_directory import RunDir
from ._output import document as as_json
from ._output import print_table, printable
from ._runs import find

if TYPE_CHECKING:
    from ..trials.arms import Arm
    from ..trials.gate_report import GateReport
    from ..trials.guards import Plan
    from ..trials.judgement import Pair
    from ..trials.trial_log import TrialLog

Option = Callable[[Any], Any]

EXIT = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2, "VOID": 3}
BAD = tuple(name.lower() for name in EXIT if name != "PASS")


def finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Return a finite number. Raises click.BadParameter."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("must be a finite number")
    return value


def _fail_on(ctx: click.Context, param: click.Parameter, value: str) -> frozenset[str]:
    found = frozenset(one.strip().lower() for one in value.split(","))
    if not found <= set(BAD) or "fail" not in found:
        raise click.BadParameter(f"some of {', '.join(BAD)}, and fail among them")
    return found


FILE = click.Path(path_type=Path, dir_okay=False)
ALPHA = click.FloatRange(0.0, 0.5, min_open=True, max_open=True)


def _together(*options: Option) -> Option:
    """Return a decorator that adds options, shown in this order."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


# How arms are judged.
JUDGING = _together(
    click.option("--metric", default="train_loss_raw", help="Loss per step; lower is better."),
    click.option(
        "--margin",
        type=click.FloatRange(0.0, min_open=True),
        default=0.03,
        show_default=True,
        callback=finite,
        help="A PASS shows that the candidate is worse by less than this, in the metric's unit.",
    ),
    click.option("--alpha", type=ALPHA, default=0.05, show_default=True, help="Level, one-sided."),
    click.option(
        "--warmup", type=click.IntRange(0), default=50, show_default=True, help="Steps left out."
    ),
    click.option(
        "--calibrate",
        nargs=2,
        multiple=True,
        metavar="RUN RUN",
        help="Two runs of one program (A/A): their difference is noise. Repeatable.",
    ),
    click.option("--ignore", multiple=True, metavar="GUARD", help="A guard that does not count."),
    click.option(
        "--cpu-time", default="", metavar="METRIC", help="CPU time per step, for throughput."
    ),
)

# Where a verdict is reported.
REPORTING = _together(
    click.option("--json", "json_wanted", is_flag=True, help="Print one JSON document."),
    click.option("--junit", type=FILE, metavar="FILE", help="Write JUnit XML."),
    click.option("--html", type=FILE, metavar="FILE", help="Write one HTML file with plots."),
    click.option(
        "--github/--no-github",
        default=None,
        help="Annotation and summary for GitHub. Default: in its actions.",
    ),
    click.option(
        "--fail-on",
        default=",".join(BAD),
        show_default=True,
        callback=_fail_on,
        metavar="VERDICTS",
        help="Verdicts with an exit code other than 0; fail is always one.",
    ),
)


def plan_of(options: Mapping[str, Any]) -> Plan:
    """Return the plan that options ask for. Raises UsageError."""
    from ..trials.guards import IGNORABLE, Plan

    unknown = [name for name in options["ignore"] if name not in IGNORABLE]
    if unknown:
        hint = f"it is one of: {', '.join(IGNORABLE)}"
        raise UsageError(f"no guard {unknown[0]!r} that can be ignored", hint=hint)
    names = ("metric", "margin", "alpha", "looks", "steps", "warmup", "cpu_time")
    chosen = {name: options[name] for name in names if name in options}
    return Plan(**chosen, ignored=frozenset(options["ignore"]))


def metrics_of(plan: Plan) -> tuple[str, ...]:
    """Return the metrics that a plan needs, beside those of guards."""
    return (plan.metric, *filter(None, (plan.cpu_time,)))


def open_pairs(names: Sequence[tuple[str, str]]) -> list[tuple[RunDir, RunDir]]:
    """Open the runs of pairs. Raises StoreError, UsageError."""
    for a, b in names:
        if find(a).resolve() == find(b).resolve():
            raise UsageError(f"{a} is compared with itself", hint="name a run of each program")
    return [(RunDir.open(find(a)), RunDir.open(find(b))) for a, b in names]


def read_pairs(runs: Sequence[tuple[RunDir, RunDir]], plan: Plan) -> list[Pair]:
    """Read the runs of pairs. Raises StoreError."""
    from ..trials.recorded_arm import read_arm

    metrics = metrics_of(plan)
    return [(read_arm(a, metrics), read_arm(b, metrics)) for a, b in runs]


def write_verdict(report: GateReport, runs: Sequence[tuple[RunDir, RunDir]], log: TrialLog) -> None:
    """Add the verdict to the audit log of the comparison. Raises StoreError."""
    from ..trials.recorded_arm import cite
    from ..trials.trial_log import VERDICT

    document = report.as_json()
    del document["schema"]
    for pair in document["pairs"]:
        del pair["series"]
    document["runs"] = [{"baseline": cite(a), "candidate": cite(b)} for a, b in runs]
    log.note(VERDICT, f"{report.verdict}: {'; '.join(report.reasons)}", document)


def print_report(report: GateReport, options: Mapping[str, Any]) -> int:
    """Write the reports that options ask for, print the verdict, and return the exit code."""
    from ..trials.gate_report import annotation, gate_page, junit, summary

    outputs: tuple[tuple[str, Callable[[GateReport], bytes]], ...] = (
        ("junit", junit),
        ("html", lambda report: gate_page(report).encode()),
    )
    for name, render in outputs:
        if options[name] is not None:
            _write(options[name], render(report))
    github = options["github"]
    if github or (github is None and os.environ.get("GITHUB_ACTIONS") == "true"):
        click.echo(annotation(report), err=True)
    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if page and github is not False:
        _append(Path(page), summary(report))
    if options["json_wanted"]:
        click.echo(as_json(report.as_json()))
    else:
        _print(report)
    counts = report.verdict.lower() in options["fail_on"]
    return EXIT[report.verdict] if counts else 0


def end_text(arm: Arm) -> str:
    """Return how a run ended, for a table."""
    if arm.live:
        return "running"
    return "unknown" if arm.exit_code is None else f"exit {arm.exit_code}"


def _write(path: Path, data: bytes) -> None:
    try:
        with files.replacing(path, shared=True) as file:
            file.write(data)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StoreError(f"cannot write GITHUB_STEP_SUMMARY: {error.strerror}") from error


def _print(report: GateReport) -> None:
    from ..trials.gate_report import effect_text, rows

    click.echo(f"{report.verdict}: {effect_text(report)}")
    for reason in report.reasons:
        click.echo(printable(f"  {reason}"))
    noise = report.calibration
    if noise:
        shown = ", ".join(f"{value:+.4g}" for value in noise)
        click.echo(f"  A/A pairs differ by {shown}")
    for note in report.notes:
        click.echo(printable(f"  note: {note}"))
    click.echo("")
    pairs = [(str(number), *pair.cells) for number, pair in enumerate(report.pairs, 1)]
    print_table(pairs, ("pair", "baseline", "candidate", "difference", "batches"))
    click.echo("")
    print_table(list(rows(report)), ("check", "result", "baseline", "candidate", ""))
