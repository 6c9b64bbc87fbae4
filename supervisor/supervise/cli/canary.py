"""`supervise canary`: whether a candidate may replace a baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import click

from ..errors import UsageError
from ..store.run_directory import RunDir
from . import _canary_trial
from ._canary_verdict import (
    ALPHA,
    EXIT,
    FILE,
    JUDGING,
    REPORTING,
    end_text,
    finite,
    open_pairs,
    plan_of,
    print_report,
    read_pairs,
    write_verdict,
)
from ._output import document as as_json
from ._output import print_table
from ._runs import complete, find
from ._trials import own_errors


@click.group(name="canary", no_args_is_help=True)
def command() -> None:
    """Judge a candidate by short runs of it and of a baseline.

    \b
    Examples:
      supervise canary run --baseline runs/main --steps 400 -- python train.py --out {out}
      supervise canary compare runs/main runs/branch
      supervise canary target --target 3.28 --needed 0.004 runs/a runs/b runs/c
    """


command.add_command(_canary_trial.command)


def _shares(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        found = tuple(float(one) for one in value.split(","))
    except ValueError:
        found = ()
    if not found or list(found) != sorted(set(found)) or not 0.0 < found[0] <= found[-1] == 1.0:
        raise click.BadParameter("rising shares of the steps, the last one 1, as 0.5,1")
    return found


@command.command()
@click.argument(
    "runs", nargs=-1, required=True, metavar="BASELINE CANDIDATE...", shell_complete=complete
)
@JUDGING
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
    "--audit", type=FILE, metavar="FILE", help="Add the verdict to this audit log of comparisons."
)
@REPORTING
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
    with own_errors(EXIT.values()):
        from ..trials import trial_log
        from ..trials.gate_report import gate_report
        from ..trials.judgement import judge

        plan = plan_of(options)
        opened = open_pairs(list(zip(runs[::2], runs[1::2], strict=True)))
        pairs = read_pairs(opened, plan)
        found = judge(pairs, plan, read_pairs(open_pairs(options["calibrate"]), plan))
        whole = gate_report(found, pairs)
        if options["audit"] is not None:
            with trial_log.opened(options["audit"]) as log:
                write_verdict(whole, opened, log)
        ctx.exit(print_report(whole, options))


@command.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete)
@click.option(
    "--target", type=float, required=True, callback=finite, help="What the mean must be below."
)
@click.option(
    "--needed",
    type=float,
    callback=finite,
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
    with own_errors(EXIT.values()):
        from ..trials.gate_statistics import RUNS, against_target
        from ..trials.recorded_arm import read_arm

        metric = options["metric"]
        arms = [read_arm(RunDir.open(find(name)), (metric,)) for name in runs]
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
            (arm.name, end_text(arm), f"{value:.6g}")
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
