"""`supervise canary run`: make the arms of a comparison, one after the other, and judge them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from ..store import files
from ..store.run_directory import RunDir
from ._canary_verdict import (
    EXIT,
    JUDGING,
    REPORTING,
    metrics_of,
    open_pairs,
    plan_of,
    print_report,
    read_pairs,
    write_verdict,
)
from ._output import document as as_json
from ._output import printable
from ._params import JobCommand
from ._runs import exactly
from ._trials import SCRATCH, make_empty, outside_notes, own_errors, place_of, write_policy

if TYPE_CHECKING:
    from ..trials.arms import Arm
    from ..trials.guards import Plan
    from ..trials.judgement import Judgement, Pair
    from ..trials.trial_log import TrialLog

SEEDS = 3  # the fewest that show how far two runs of one program drift apart
LEAST, MOST = 200, 2000  # steps: six blocks after the warm-up; more is no short run
EXAMPLE = (
    "supervise canary run --baseline 'python train.py --out {out} --seed {seed}' --steps 400 -- "
    "python train.py --lr 1e-3 --out {out} --seed {seed}"
)
DOCUMENT = "gate.json"


@click.command(name="run", cls=JobCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--baseline",
    multiple=True,
    required=True,
    metavar="RUN|CMD",
    help="A recorded run, or a command as one text. Several runs: one per seed.",
)
@click.option(
    "--baseline-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Working directory of the baseline's command. Default: this one.",
)
@click.option("--seeds", type=click.IntRange(1, 100), metavar="N", help="Pairs of runs, at most.")
@click.option(
    "--steps", type=click.IntRange(LEAST, MOST), required=True, help="Length of each run."
)
@click.option(
    "--policy", default="canary", show_default=True, metavar="P", help="What watches the runs."
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where runs and verdict are kept. Default: runs/canary-<time>-<id>.",
)
@click.option("--keep", is_flag=True, help="Keep what the runs write to {out}.")
@JUDGING
@REPORTING
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD...")
@click.pass_context
def command(ctx: click.Context, /, argv: Sequence[str], **options: Any) -> None:
    """Make short runs of a baseline and of a candidate, and compare them.

    {out} in a command stands for a scratch directory, {seed} for 1 to N, {steps} for the length; a
    run that goes on after it is stopped. The runs follow one another, A B, B A, A B. After each
    pair there is a planned look, which ends the trial where the candidate fails for sure: a crash,
    a guard, a loss that is higher beyond what seeds explain. A PASS needs all pairs.

    Each run is watched under the policy `canary`, which stops a job at the first grave doubt and
    never repairs it. Another policy sends no messages here, and starts no job again. W&B and the
    hubs are offline, and no tracked run is resumed. What a run writes elsewhere is reported, as far
    as that can be seen.

    \b
    Examples:
      supervise canary run --baseline 'python train.py --out {out} --seed {seed}' --steps 400 -- \\
        python train.py --lr 1e-3 --out {out} --seed {seed}
      supervise canary run --baseline runs/main --steps 400 -- python train.py --out {out}
      supervise canary run --baseline-dir ../main --baseline 'python train.py --out {out} --seed \\
        {seed}' --seeds 5 --steps 400 --junit gate.xml -- python train.py --out {out} --seed {seed}

    Exit codes: 0 PASS; 1 FAIL; 2 INCONCLUSIVE; 3 VOID; 64 wrong usage, or a run that cannot be
    started; 65 invalid policy; 70 an error of our own.
    """
    if not argv:
        raise UsageError("no command given", hint=EXAMPLE)
    with own_errors(EXIT.values()):
        from ..trials import trial_log
        from ..trials.gate_report import gate_report

        trial = _trial(list(argv), options)
        with trial_log.opened(trial.directory / trial_log.LOG) as log:
            found, pairs, runs = _made(trial, log, open_pairs(options["calibrate"]))
            whole = gate_report(found, pairs, trial.notes(len(pairs)))
            write_verdict(whole, runs, log)
        files.replace(trial.directory / DOCUMENT, as_json(whole.as_json()).encode(), durable=True)
        click.echo(f"kept in {trial.directory}", err=True)
        ctx.exit(print_report(whole, options))


@dataclass(slots=True)
class _Trial:
    """What is to be made.

    Attributes:
        policy: file of the policy that watches the runs. about: what the log keeps of it.
        recorded: runs of the baseline; empty where its command makes them.
        commands: of each arm that is made, with placeholders. cwd: where they are started.
        outside: arm -> files that it wrote elsewhere.
    """

    plan: Plan
    steps: int
    seeds: int
    policy: Path
    about: Mapping[str, Any]
    directory: Path
    recorded: Sequence[Path]
    commands: Mapping[str, Sequence[str]]
    cwd: Mapping[str, Path]
    keep: bool
    outside: dict[str, list[str]] = field(default_factory=dict)

    def notes(self, made: int) -> list[str]:
        """Return sentences about the trial for its reports."""
        found = [f"decided after {made} of {self.seeds} pairs"] if made < self.seeds else []
        return [*found, *outside_notes(self.outside)]


def _trial(argv: Sequence[str], options: Mapping[str, Any]) -> _Trial:
    """Check what was asked for, and make the directory. Raises UsageError, StoreError."""
    from ..catalog.loader import isolated
    from ..trials.judgement import BASELINE, CANDIDATE, missing

    recorded = [path for path in map(exactly, options["baseline"]) if path is not None]
    texts = [text for text in options["baseline"] if exactly(text) is None]
    if texts and (recorded or len(texts) > 1):
        raise UsageError("--baseline is one command, or runs", hint=EXAMPLE)
    seeds = options["seeds"] or (len(recorded) or SEEDS)
    if recorded and seeds != len(recorded):
        text = f"{seeds} seeds need as many runs of the baseline, and {len(recorded)} are given"
        raise UsageError(text, hint="name one --baseline RUN for each seed, or give its command")
    commands = {CANDIDATE: argv}
    if texts:
        commands[BASELINE] = _split(texts[0])
    for name, template in commands.items():
        if lacking := missing(template, seeds):
            text = f"the command of the {name} has no {' and no '.join(lacking)}"
            if name == BASELINE and len(template) == 1:
                text = f"{texts[0]} is not a run, and as a command it has no {{out}}"
            raise UsageError(text, hint=EXAMPLE)
    found = isolated(options["policy"])
    directory = make_empty(place_of(options["directory"], "canary"))
    here = Path.cwd()
    return _Trial(
        plan=replace(plan_of(options), looks=(1.0,)),
        steps=options["steps"],
        seeds=seeds,
        policy=write_policy(directory, found),
        about={"name": found.policy.name, "digest": found.policy.digest, "without": found.left_out},
        directory=directory,
        recorded=recorded,
        commands=commands,
        cwd={CANDIDATE: here, BASELINE: (options["baseline_dir"] or here).absolute()},
        keep=options["keep"],
    )


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--baseline {text!r}: {error}", hint=EXAMPLE) from error


def _made(
    trial: _Trial, log: TrialLog, calibration: Sequence[tuple[RunDir, RunDir]]
) -> tuple[Judgement, list[Pair], list[tuple[RunDir, RunDir]]]:
    """Make pair after pair until it is decided; return the last judgement and what it is about."""
    from ..trials.judgement import BASELINE, CANDIDATE, arm_order, is_decided, judge, plan_of
    from ..trials.recorded_arm import read_arm

    plan = replace(trial.plan, steps=trial.steps)
    noise = read_pairs(calibration, plan)
    shown = {"steps": trial.steps, "seeds": trial.seeds, "policy": trial.about}
    shown |= {"margin": plan.margin, "alpha": plan.alpha, "warmup": plan.warmup}
    log.note("canary_plan", f"{trial.seeds} pairs of {trial.steps} steps", shown)
    runs: list[tuple[RunDir, RunDir]] = []
    pairs: list[Pair] = []
    while True:
        arms: dict[str, tuple[RunDir, Arm]] = {}
        for name in arm_order(len(pairs)):
            if name in trial.commands:
                arms[name] = _run(trial, name, len(pairs) + 1, log)
            else:
                run = RunDir.open(trial.recorded[len(pairs)])
                arms[name] = run, read_arm(run, metrics_of(plan))
        runs.append((arms[BASELINE][0], arms[CANDIDATE][0]))
        pairs.append((arms[BASELINE][1], arms[CANDIDATE][1]))
        found = judge(pairs, plan_of(plan, len(pairs), trial.seeds), noise)
        text = f"{found.verdict} after {len(pairs)} of {trial.seeds} pairs"
        effect = None if found.effect is None else found.effect.mean
        log.note("canary_look", text, {"verdict": found.verdict, "mean": effect})
        if len(pairs) == trial.seeds or is_decided(found, len(pairs) - 1 + len(noise)):
            return found, pairs, runs
        shown_effect = "" if effect is None else f": {effect:+.4g}"
        click.echo(f"pair {len(pairs)} of {trial.seeds}{shown_effect}, not decided", err=True)


def _run(trial: _Trial, name: str, number: int, log: TrialLog) -> tuple[RunDir, Arm]:
    """Make one arm, and report how it ended."""
    from ..trials.arm_run import ArmSpec, last_lines, run_arm
    from ..trials.judgement import filled
    from ..trials.recorded_arm import cite, read_arm

    called = f"{name}-{number}"
    out = trial.directory / SCRATCH / called
    spec = ArmSpec(
        name=called,
        argv=filled(trial.commands[name], str(out), number, trial.steps),
        cwd=trial.cwd[name],
        out=out,
        steps=trial.steps,
        warmup=trial.plan.warmup,
        policy=str(trial.policy),
        keep=trial.keep,
    )
    outcome = run_arm(spec, trial.directory, os.environ)
    arm = read_arm(outcome.run, metrics_of(trial.plan), called, outcome.cpu_s)
    if outcome.outside:
        trial.outside[called] = outcome.outside
    made = len(arm.steps)
    text = f"{called}: {made} steps in {outcome.seconds:.0f} s, exit code {outcome.code}"
    about: dict[str, Any] = {
        "exit_code": outcome.code,
        "seconds": round(outcome.seconds, 1),
        "steps": made,
    }
    about |= {"cpu_s": outcome.cpu_s, "outside": outcome.outside}
    log.note("canary_arm", text, {**about, **cite(outcome.run)})
    click.echo(text, err=True)
    if arm.crashed and not arm.stopped:
        shown = last_lines(trial.directory / f"{called}.log")
        click.echo("\n".join(f"    {printable(line)}" for line in shown.splitlines()), err=True)
    return outcome.run, arm
