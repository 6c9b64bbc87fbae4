"""`supervise canary`: whether a candidate may replace a baseline."""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from ..errors import StoreError, SuperviseError, UsageError, understood
from ..store import audit, files, history
from ..store.run_directory import RunDir
from ._output import document as as_json
from ._output import print_table, printable
from ._runs import complete, find
from .why import INSPECT

if TYPE_CHECKING:
    from ..canary.arms import Arm
    from ..canary.judgement import Pair
    from ..canary.plan import Plan

EXIT = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2, "VOID": 3}
BAD = tuple(name.lower() for name in EXIT if name != "PASS")


@click.group(name="canary", no_args_is_help=True)
def command() -> None:
    """Judge a candidate by short runs of it and of a baseline.

    \b
    Examples:
      supervise canary compare runs/main runs/branch
      supervise canary target --target 3.28 --needed 0.004 runs/a runs/b runs/c
    """


def _shares(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        found = tuple(float(one) for one in value.split(","))
    except ValueError:
        found = ()
    if not found or list(found) != sorted(set(found)) or not 0.0 < found[0] <= found[-1] == 1.0:
        raise click.BadParameter("rising shares of the steps, the last one 1, as 0.5,1")
    return found


def _fail_on(ctx: click.Context, param: click.Parameter, value: str) -> frozenset[str]:
    found = frozenset(one.strip().lower() for one in value.split(","))
    if not found <= set(BAD) or "fail" not in found:
        raise click.BadParameter(f"some of {', '.join(BAD)}, and fail among them")
    return found


def _finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("must be a finite number")
    return value


FILE = click.Path(path_type=Path, dir_okay=False)
ALPHA = click.FloatRange(0.0, 0.5, min_open=True, max_open=True)


@command.command()
@click.argument(
    "runs", nargs=-1, required=True, metavar="BASELINE CANDIDATE...", shell_complete=complete
)
@click.option("--metric", default="train_loss_raw", help="Loss per step; lower is better.")
@click.option(
    "--margin",
    type=click.FloatRange(0.0, min_open=True),
    default=0.03,
    show_default=True,
    callback=_finite,
    help="A PASS shows that the candidate is worse by less than this, in the metric's unit.",
)
@click.option("--alpha", type=ALPHA, default=0.05, show_default=True, help="Level, one-sided.")
@click.option(
    "--looks",
    default="0.5,1",
    show_default=True,
    callback=_shares,
    metavar="SHARES",
    help="When the data may be judged. All but the last look can only fail.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Planned length. Default: that of the first baseline, which must have ended.",
)
@click.option(
    "--warmup", type=click.IntRange(0), default=50, show_default=True, help="Steps left out."
)
@click.option(
    "--calibrate",
    nargs=2,
    multiple=True,
    metavar="RUN RUN",
    help="Two runs of one program (A/A): their difference is noise. Repeatable.",
)
@click.option("--ignore", multiple=True, metavar="GUARD", help="A guard that does not count.")
@click.option("--cpu-time", default="", metavar="METRIC", help="CPU time per step, for throughput.")
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON document.")
@click.option("--junit", type=FILE, metavar="FILE", help="Write JUnit XML.")
@click.option("--html", type=FILE, metavar="FILE", help="Write one HTML file with plots.")
@click.option(
    "--fail-on",
    default=",".join(BAD),
    show_default=True,
    callback=_fail_on,
    metavar="VERDICTS",
    help="Verdicts with an exit code other than 0; fail is always one.",
)
@click.pass_context
def compare(ctx: click.Context, /, runs: Sequence[str], **options: Any) -> None:
    """Compare runs of a candidate with runs of a baseline.

    Runs are given in pairs, one per seed: A B [A2 B2 ...]. Both of a pair start at the same step
    and read the same batches in the same order, which is checked by their fingerprints; otherwise
    the difference is estimated without pairing, and is less sure. Three or more seeds, or some A/A
    pairs, show how far two runs of one program drift apart.

    PASS: the loss is shown to be worse by less than the margin, no guard fails, nothing is missing.
    FAIL: a regression beyond the margin, a failed guard, or the candidate crashed. VOID: tokens per
    update, data or evaluation files differ. INCONCLUSIVE: all else; add steps or seeds.

    In GitHub Actions the verdict is annotated, and a summary is added to the page of the job.

    \b
    Examples:
      supervise canary compare runs/main runs/branch
      supervise canary compare main-1 branch-1 main-2 branch-2 main-3 branch-3 --html gate.html
      supervise canary compare runs/main runs/branch --calibrate runs/main runs/main-again
      supervise canary compare runs/main runs/branch --junit gate.xml --fail-on fail,void

    Exit codes: 0 PASS; 1 FAIL; 2 INCONCLUSIVE; 3 VOID; 64 no such run; 70 an error of our own.
    """
    if len(runs) % 2:
        text = f"runs are compared in pairs, and {len(runs)} are given"
        raise UsageError(text, hint="supervise canary compare BASELINE CANDIDATE")
    with _own_errors():
        from ..canary.ci_reports import annotation, junit, summary
        from ..canary.gate_document import gate_document
        from ..canary.gate_page import gate_page
        from ..canary.judgement import judge

        plan = _plan(options)
        pairs = _pairs(list(zip(runs[::2], runs[1::2], strict=True)), plan)
        found = judge(pairs, plan, _pairs(options["calibrate"], plan))
        whole = gate_document(found, pairs)
        outputs: tuple[tuple[str, Callable[[Mapping[str, Any]], bytes]], ...] = (
            ("junit", junit),
            ("html", lambda document: gate_page(document).encode()),
        )
        for name, render in outputs:
            if options[name] is not None:
                _write(options[name], render(whole))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            click.echo(annotation(whole), err=True)
        if page := os.environ.get("GITHUB_STEP_SUMMARY"):
            _append(Path(page), summary(whole))
    if options["json_wanted"]:
        click.echo(as_json(whole))
    else:
        _print(whole)
    counts = found.verdict.lower() in options["fail_on"]
    ctx.exit(EXIT[found.verdict] if counts else 0)


@command.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete)
@click.option(
    "--target", type=float, required=True, callback=_finite, help="What the mean must be below."
)
@click.option(
    "--needed",
    type=float,
    callback=_finite,
    help="What (target - mean) * sqrt(runs) must reach. Default: by a t-test, from 3 runs on.",
)
@click.option("--alpha", type=ALPHA, default=0.01, show_default=True, help="Level of the t-test.")
@click.option("--metric", default="train_loss_raw", help="The metric; lower is better.")
@click.option(
    "--last",
    type=click.IntRange(1),
    default=50,
    show_default=True,
    help="The value of a run is the mean of the metric's last N samples.",
)
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON document.")
@click.pass_context
def target(ctx: click.Context, /, runs: Sequence[str], **options: Any) -> None:
    """Test whether the mean of many short runs is below a target.

    The runs differ in the seed alone, and all that were made are given.

    \b
    Examples:
      supervise canary target --target 3.28 --needed 0.004 runs/a runs/b runs/c
      supervise canary target --target 2.1 --metric val_loss --last 1 runs/seed-*

    Exit codes: 0 PASS; 1 FAIL, also where a run crashed; 2 INCONCLUSIVE: a run has not ended, or
    too few have a finite value; 64 no such run; 70 an error of our own.
    """
    with _own_errors():
        from ..canary.target import RUNS, against_target

        metric = options["metric"]
        arms = [_arm(name, (metric,)) for name in runs]
        tails = [list(arm.series(metric, 0, arm.end).values())[-options["last"] :] for arm in arms]
        values = [fmean(tail) if tail else math.nan for tail in tails]
        needed = options["needed"]
        found = against_target(values, options["target"], options["alpha"], needed)
        few = needed is None and found.runs < RUNS
        open_ = few or not all(math.isfinite(value) for value in values)
        if any(arm.crashed for arm in arms):
            verdict = "FAIL"
        elif open_ or not all(arm.complete for arm in arms):
            verdict = "INCONCLUSIVE"
        else:
            verdict = "PASS" if found.reached else "FAIL"
        rows = [
            (arm.name, _end_text(arm), f"{value:.6g}")
            for arm, value in zip(arms, values, strict=True)
        ]
        whole = {
            "schema": "supervise/canary-target/v1",
            "verdict": verdict,
            "target": options["target"],
            **{name: getattr(found, name) for name in found.__slots__},
            "values": [{"run": arm.name, "value": v} for arm, v in zip(arms, values, strict=True)],
        }
    if options["json_wanted"]:
        click.echo(as_json(whole))
    else:
        click.echo(f"{verdict}: (target - mean) * sqrt(runs) = {found.score:.4g}")
        click.echo(f"needed: {found.needed:.4g}; mean of {found.runs} runs: {found.mean:.6g}\n")
        print_table(rows, ("run", "end", metric))
    ctx.exit(EXIT[verdict])


@contextmanager
def _own_errors() -> Iterator[None]:
    """Give errors an exit code that is no verdict; a broken gate must not look like one."""
    try:
        yield
    except SuperviseError as error:
        if error.exit_code not in EXIT.values():
            raise
        raise SuperviseError(str(error), hint=error.hint) from error
    except Exception as error:
        traceback.print_exc()
        text = f"the runs could not be judged: {type(error).__name__}: {error}"
        raise SuperviseError(text) from error


def _plan(options: Mapping[str, Any]) -> Plan:
    from ..canary.guards import IGNORABLE
    from ..canary.plan import Plan

    unknown = [name for name in options["ignore"] if name not in IGNORABLE]
    if unknown:
        hint = f"it is one of: {', '.join(IGNORABLE)}"
        raise UsageError(f"no guard {unknown[0]!r} that can be ignored", hint=hint)
    names = ("metric", "margin", "alpha", "looks", "steps", "warmup", "cpu_time")
    chosen = {name: options[name] for name in names}
    return Plan(**chosen, ignored=frozenset(options["ignore"]))


def _pairs(names: Sequence[tuple[str, str]], plan: Plan) -> list[Pair]:
    metrics = (plan.metric, *filter(None, (plan.cpu_time,)))
    for a, b in names:
        if find(a).resolve() == find(b).resolve():
            raise UsageError(f"{a} is compared with itself", hint="name a run of each program")
    return [(_arm(a, metrics), _arm(b, metrics)) for a, b in names]


def _arm(name: str, metrics: Sequence[str]) -> Arm:
    """Read a run. Raises StoreError."""
    from ..canary.arms import ArmBuilder

    run = RunDir.open(find(name))
    builder = ArmBuilder(metrics)
    for row in history.rows(run):
        builder.take(row.step, row.rank, row.attempt, row.values)
    exit_code: int | None = None
    inputs: Mapping[str, str] | None = None
    with understood(f"the records in {run.audit_path}", INSPECT):
        for record in audit.read(run.audit_path):
            kind, data = record["kind"], record.get("data") or {}
            exit_code = int(data["exit_code"]) if kind == "run_end" else None
            if kind == "identity" and inputs is None:
                inputs = {str(k): str(v) for k, v in data["identity"].get("inputs", {}).items()}
    live = files.locked(run.audit_path)
    return builder.arm(name, exit_code=exit_code, live=live, inputs=inputs)


def _end_text(arm: Arm) -> str:
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


def _print(document: Mapping[str, Any]) -> None:
    from ..canary.ci_reports import effect_text, rows

    click.echo(f"{document['verdict']}: {effect_text(document)}")
    for reason in document["reasons"]:
        click.echo(printable(f"  {reason}"))
    noise = document["calibration"]
    if noise:
        shown = ", ".join(f"{value:+.4g}" for value in noise)
        click.echo(f"  A/A pairs differ by {shown}")
    click.echo("")
    pairs = [
        (
            str(number),
            pair["baseline"],
            pair["candidate"],
            "" if pair["mean"] is None else f"{pair['mean']:+.4g}",
            "the same" if pair["paired"] else "not shown to be the same",
        )
        for number, pair in enumerate(document["pairs"], 1)
    ]
    print_table(pairs, ("pair", "baseline", "candidate", "difference", "batches"))
    click.echo("")
    print_table(list(rows(document)), ("check", "result", "baseline", "candidate", ""))
