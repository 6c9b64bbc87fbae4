"""`supervise canary`: whether a candidate may replace a baseline."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import asdict

from ..core.model.decisions import json_document, plain_json
from ..core.model.payload import Payload
from ..errors import StoreError, UsageError
from ..store import files
from ..store.run_directory import RunDir
from ._output import echo, echo_json, print_table, progress_line, reserve_stdout
from ._params import JobCommand
from ._runs import (
    SCRATCH,
    complete_run,
    errors_without_verdict,
    find_exact_run,
    find_run,
    make_empty,
    trial_directory,
    write_policy,
)

if TYPE_CHECKING:
    from ..trials.arms import Arm
    from ..trials.gate_report import GateReport
    from ..trials.judgement import Judgement, Pair, Plan
    from ..trials.trial_runs import TrialLog, TrialPolicy

Option = Callable[[Any], Any]

EXIT = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2, "VOID": 3}
BAD = tuple(name.lower() for name in EXIT if name != "PASS")


def parse_finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Return a finite number. Raises click.BadParameter."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("must be a finite number")
    return value


def _fail_on(ctx: click.Context, param: click.Parameter, value: str) -> frozenset[str]:
    names = frozenset(name.strip().lower() for name in value.split(","))
    if not names <= set(BAD) or "fail" not in names:
        raise click.BadParameter(f"some of {', '.join(BAD)}, and fail among them")
    return names


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
        callback=parse_finite,
        help="A PASS shows that the candidate is worse by less than this, in the metric's unit.",
    ),
    click.option(
        "--alpha",
        type=ALPHA,
        default=0.05,
        show_default=True,
        help="Significance level, one-sided.",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(0),
        default=50,
        show_default=True,
        help="First steps, which are left out.",
    ),
    click.option(
        "--calibrate",
        nargs=2,
        multiple=True,
        metavar="RUN RUN",
        help="Two runs of one program (A/A): their difference is noise. Repeatable.",
    ),
    click.option(
        "--ignore",
        multiple=True,
        metavar="GUARD",
        help="A guard (see `canary compare --help`) that does not count.",
    ),
    click.option(
        "--cpu-time",
        default="",
        metavar="METRIC",
        help="Metric of CPU time per step, for throughput.",
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
        help="Annotation and summary for GitHub. Default: in GitHub Actions.",
    ),
    click.option(
        "--fail-on",
        default=",".join(BAD),
        show_default=True,
        callback=_fail_on,
        metavar="VERDICTS",
        help="Verdicts with an exit code other than 0; must contain fail.",
    ),
)


def plan_of(options: Mapping[str, Any]) -> Plan:
    """Return the plan that options ask for. Raises UsageError."""
    from ..trials.judgement import IGNORABLE_GUARDS, Plan

    unknown = [name for name in options["ignore"] if name not in IGNORABLE_GUARDS]
    if unknown:
        hint = f"it is one of: {', '.join(IGNORABLE_GUARDS)}"
        raise UsageError(f"no guard {unknown[0]!r} that can be ignored", hint=hint)
    names = ("metric", "margin", "alpha", "looks", "steps", "warmup", "cpu_time")
    values = {name: options[name] for name in names if name in options}
    return Plan(**values, ignored=frozenset(options["ignore"]))


def metrics_of(plan: Plan) -> tuple[str, ...]:
    """Return the metrics that a plan needs, beside those of guards."""
    return (plan.metric, *filter(None, (plan.cpu_time,)))


def open_pairs(names: Sequence[tuple[str, str]]) -> list[tuple[RunDir, RunDir]]:
    """Open the runs of pairs. Raises StoreError, UsageError."""
    for a, b in names:
        if find_run(a).resolve() == find_run(b).resolve():
            raise UsageError(f"{a} is compared with itself", hint="name a run of each program")
    return [(RunDir.open(find_run(a)), RunDir.open(find_run(b))) for a, b in names]


def read_pairs(runs: Sequence[tuple[RunDir, RunDir]], plan: Plan) -> list[Pair]:
    """Read the runs of pairs. Raises StoreError."""
    from ..trials.arms import read_arm

    metrics = metrics_of(plan)
    return [(read_arm(a, metrics), read_arm(b, metrics)) for a, b in runs]


def write_verdict(report: GateReport, runs: Sequence[tuple[RunDir, RunDir]], log: TrialLog) -> None:
    """Add the verdict to the audit log of the comparison. Raises StoreError."""
    from ..trials.arms import cite_run
    from ..trials.trial_runs import VERDICT_LOG

    fields = plain_json(report)
    del fields["schema"]
    for pair in fields["pairs"]:
        del pair["series"]
    fields["runs"] = plain_json(
        [{"baseline": cite_run(a), "candidate": cite_run(b)} for a, b in runs]
    )
    log.note(VERDICT_LOG, f"{report.verdict}: {'; '.join(report.reasons)}", Payload(fields))


def print_report(report: GateReport, options: Mapping[str, Any]) -> int:
    """Write the reports that options ask for, print the verdict, and return the exit code."""
    from ..trials.gate_report import gate_page, github_annotation, render_junit, render_summary

    outputs: tuple[tuple[str, Callable[[GateReport], bytes]], ...] = (
        ("junit", render_junit),
        ("html", lambda report: gate_page(report).encode()),
    )
    for name, render in outputs:
        if options[name] is not None:
            _write(options[name], render(report))
    github = options["github"]
    if github or (github is None and os.environ.get("GITHUB_ACTIONS") == "true"):
        echo(github_annotation(report), err=True)
    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if page and github is not False:
        _append(Path(page), render_summary(report))
    with reserve_stdout((options["junit"], options["html"])):
        if options["json_wanted"]:
            echo_json(report)
        else:
            _print(report)
    counts = report.verdict.lower() in options["fail_on"]
    return EXIT[report.verdict] if counts else 0


def _write(path: Path, data: bytes) -> None:
    try:
        with files.replacing_file(path, shared=True) as file:
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
    from ..trials.gate_report import check_rows, effect_text

    echo(f"{report.verdict}: {effect_text(report)}")
    for reason in report.reasons:
        echo(f"  {reason}")
    noise = report.calibration
    if noise:
        noise_text = ", ".join(f"{value:+.4g}" for value in noise)
        echo(f"  A/A pairs differ by {noise_text}")
    for note in report.notes:
        echo(f"  note: {note}")
    echo("")
    pairs = [(str(number), *pair.cells) for number, pair in enumerate(report.pairs, 1)]
    print_table(pairs, ("pair", "baseline", "candidate", "difference", "batches"))
    echo("")
    print_table(list(check_rows(report)), ("check", "result", "baseline", "candidate", ""))


@click.group(name="canary", no_args_is_help=True)
def canary_command() -> None:
    """Judge a change of the job by short runs with and without it.

    The candidate is the program with the change, the baseline the one without.

    \b
    Examples:
      supervise canary run --baseline runs/a --steps 400 -- python train.py {out}
      supervise canary compare runs/main runs/branch
    """


def _shares(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(share) for share in value.split(","))
    except ValueError:
        shares = ()
    if (
        not shares
        or list(shares) != sorted(set(shares))
        or not 0.0 < shares[0] <= shares[-1] == 1.0
    ):
        raise click.BadParameter("rising shares of the steps, the last one 1, as 0.5,1")
    return shares


@canary_command.command()
@click.argument(
    "runs", nargs=-1, required=True, metavar="BASE CAND [BASE CAND]...", shell_complete=complete_run
)
@JUDGING
@click.option(
    "--looks",
    default="0.5,1",
    show_default=True,
    callback=_shares,
    metavar="SHARES",
    help="Shares of the length at which to judge; a PASS is possible only at the last.",
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

    Each pair is a run of the baseline and a run of the candidate with the same seed. They are
    compared batch by batch if both start at the same step and read the same batches in the same
    order, which fingerprints of the batches show; if not, the difference is less certain. Three or
    more seeds, or some A/A pairs, show how far two runs of one program drift apart.

    PASS: the loss is worse by less than the margin for sure, no guard fails, nothing is missing.
    FAIL: a regression beyond the margin, a failed guard, or the candidate crashed. VOID: tokens per
    update, data files or evaluation files differ. INCONCLUSIVE: all else; add steps or seeds.

    Guards are the other checks: crash, non_finite, interventions, loss_spikes, grad_global_norm,
    update_norm, gpu_mem_allocated, gpu_mem_reserved, skipped_updates, fixed_probe_loss, throughput.

    In GitHub Actions the verdict is annotated, and a summary is added to the page of the job.

    \b
    Examples:
      supervise canary compare runs/main runs/branch
      supervise canary compare main-1 branch-1 main-2 branch-2 --html gate.html
      supervise canary compare main-1 branch --calibrate main-1 main-2
      supervise canary compare main branch --junit gate.xml --fail-on fail,void

    Exit codes: 0 PASS; 1 FAIL; 2 INCONCLUSIVE; 3 VOID; 64 no such run; 70 an error of our own.
    """
    if len(runs) % 2:
        text = f"runs are compared in pairs, and {len(runs)} are given"
        raise UsageError(text, hint="supervise canary compare BASELINE CANDIDATE")
    with errors_without_verdict(EXIT.values()):
        from ..trials import trial_runs
        from ..trials.gate_report import gate_report
        from ..trials.judgement import judge_gate

        plan = plan_of(options)
        opened = open_pairs(list(zip(runs[::2], runs[1::2], strict=True)))
        pairs = read_pairs(opened, plan)
        judgement = judge_gate(pairs, plan, read_pairs(open_pairs(options["calibrate"]), plan))
        report = gate_report(judgement, pairs)
        if options["audit"] is not None:
            with trial_runs.open_log(options["audit"]) as log:
                write_verdict(report, opened, log)
        ctx.exit(print_report(report, options))


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
    "--policy",
    default="canary",
    show_default=True,
    metavar="P",
    help="Policy that watches the runs.",
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory of runs and verdict. Default: runs/canary-<time>-<id>.",
)
@click.option("--keep", is_flag=True, help="Keep what the runs write to {out}.")
@JUDGING
@REPORTING
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD...")
@click.pass_context
def canary_run_command(ctx: click.Context, /, argv: Sequence[str], **options: Any) -> None:
    """Make short runs of a baseline and of a candidate, and compare them.

    {out} in a command stands for a scratch directory, {seed} for 1 to N, {steps} for the length;
    longer runs are stopped. The runs of baseline (A) and candidate (B) follow one another: A B, B
    A, A B. After each pair there is a planned look. It ends the trial if the candidate fails for
    sure: by a crash, a guard, or a loss that is higher beyond what seeds explain. A PASS needs all
    pairs.

    Each run is watched under the policy `canary`, which stops a job at the first grave doubt and
    never repairs it. Under any policy no message is sent and no job is restarted. W&B and model
    hubs are offline, and no run of an experiment tracker is resumed.

    \b
    Examples:
      supervise canary run --steps 400 \\
        --baseline 'python train.py --out {out} --seed {seed}' \\
        -- python train.py --lr 1e-3 --out {out} --seed {seed}
      supervise canary run --baseline runs/a --steps 400 -- python train.py {out}
      supervise canary run --baseline-dir ../main --seeds 5 --junit gate.xml \\
        --baseline 'python train.py --out {out} --seed {seed}' \\
        --steps 400 -- python train.py --out {out} --seed {seed}

    Exit codes: 0 PASS; 1 FAIL; 2 INCONCLUSIVE; 3 VOID; 64 wrong usage, or a run that cannot be
    started; 65 invalid policy; 70 an error of our own.
    """
    if not argv:
        raise UsageError("no command given", hint=EXAMPLE)
    with errors_without_verdict(EXIT.values()):
        from ..trials import trial_runs
        from ..trials.gate_report import gate_report

        trial = _trial(list(argv), options)
        with trial_runs.open_log(trial.directory / trial_runs.LOG) as log:
            judgement, pairs, runs = _run_pairs(trial, log, open_pairs(options["calibrate"]))
            report = gate_report(judgement, pairs, trial.notes(len(pairs)))
            write_verdict(report, runs, log)
        files.replace_file(trial.directory / DOCUMENT, json_document(report).encode(), durable=True)
        echo(f"kept in {trial.directory}", err=True)
        ctx.exit(print_report(report, options))


@dataclass(slots=True)
class _Trial:
    """What is to be made.

    Attributes:
        policy: file of the policy that watches the runs. about: what the log keeps of it.
        recorded: runs of the baseline; empty where its command makes them.
        commands: of each arm that is made, with placeholders. cwd: where they are started.
    """

    plan: Plan
    steps: int
    seeds: int
    policy: Path
    about: TrialPolicy
    directory: Path
    recorded: Sequence[Path]
    commands: Mapping[str, Sequence[str]]
    cwd: Mapping[str, Path]
    keep: bool

    def notes(self, pair_count: int) -> list[str]:
        """Return sentences about the trial for its reports."""
        is_early = pair_count < self.seeds
        return [f"decided after {pair_count} of {self.seeds} pairs"] if is_early else []


def _trial(argv: Sequence[str], options: Mapping[str, Any]) -> _Trial:
    """Check what was asked for, and make the directory. Raises UsageError, StoreError."""
    from ..catalog.loader import load_isolated_policy
    from ..trials.judgement import BASELINE, CANDIDATE, find_missing_placeholders
    from ..trials.trial_runs import TrialPolicy

    recorded = [path for path in map(find_exact_run, options["baseline"]) if path is not None]
    texts = [text for text in options["baseline"] if find_exact_run(text) is None]
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
        if lacking := find_missing_placeholders(template, seeds):
            text = f"the command of the {name} has no {' and no '.join(lacking)}"
            if name == BASELINE and len(template) == 1:
                text = f"{texts[0]} is not a run, and as a command it has no {{out}}"
            raise UsageError(text, hint=EXAMPLE)
    policy = load_isolated_policy(options["policy"])
    directory = make_empty(trial_directory(options["directory"], "canary"))
    here = Path.cwd()
    return _Trial(
        plan=replace(plan_of(options), looks=(1.0,)),
        steps=options["steps"],
        seeds=seeds,
        policy=write_policy(directory, policy),
        about=TrialPolicy(policy.policy.name, policy.policy.digest, policy.left_out),
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


def _run_pairs(
    trial: _Trial, log: TrialLog, calibration: Sequence[tuple[RunDir, RunDir]]
) -> tuple[Judgement, list[Pair], list[tuple[RunDir, RunDir]]]:
    """Make pair after pair until it is decided; return the last judgement and what it is about."""
    from ..trials.arms import read_arm
    from ..trials.judgement import BASELINE, CANDIDATE, arm_order, is_decided, judge_gate, plan_look
    from ..trials.trial_runs import CanaryLook, CanaryPlan

    plan = replace(trial.plan, steps=trial.steps)
    noise = read_pairs(calibration, plan)
    recorded_plan = CanaryPlan(
        trial.steps, trial.seeds, trial.about, plan.margin, plan.alpha, plan.warmup
    )
    log.note("canary_plan", f"{trial.seeds} pairs of {trial.steps} steps", recorded_plan)
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
        judgement = judge_gate(pairs, plan_look(plan, len(pairs), trial.seeds), noise)
        text = f"{judgement.verdict} after {len(pairs)} of {trial.seeds} pairs"
        effect = None if judgement.effect is None else judgement.effect.mean
        log.note("canary_look", text, CanaryLook(judgement.verdict, effect))
        if len(pairs) == trial.seeds or is_decided(judgement, len(pairs) - 1 + len(noise)):
            return judgement, pairs, runs
        shown_effect = "" if effect is None else f": {effect:+.4g}"
        echo(f"pair {len(pairs)} of {trial.seeds}{shown_effect}, not decided", err=True)


def _run(trial: _Trial, name: str, number: int, log: TrialLog) -> tuple[RunDir, Arm]:
    """Make one arm, and report how it ended."""
    from ..trials.arms import cite_run, read_arm
    from ..trials.judgement import fill_placeholders
    from ..trials.trial_runs import ArmSpec, CanaryArm, last_lines, run_arm

    arm_name = f"{name}-{number}"
    out = trial.directory / SCRATCH / arm_name
    spec = ArmSpec(
        name=arm_name,
        argv=fill_placeholders(trial.commands[name], str(out), number, trial.steps),
        cwd=trial.cwd[name],
        out=out,
        steps=trial.steps,
        warmup=trial.plan.warmup,
        policy=str(trial.policy),
        keep=trial.keep,
    )
    with progress_line(arm_name) as report:
        outcome = run_arm(
            spec,
            trial.directory,
            os.environ,
            observe=lambda step, loss: report(
                step + 1, trial.steps, "" if loss is None else f"loss {loss:.4g}"
            ),
        )
    arm = read_arm(outcome.run, metrics_of(trial.plan), arm_name, outcome.cpu_s)
    step_count = len(arm.steps)
    text = f"{arm_name}: {step_count} steps in {outcome.seconds:.0f} s, exit code {outcome.code}"
    recorded_arm = CanaryArm(
        **asdict(cite_run(outcome.run)),
        exit_code=outcome.code,
        seconds=round(outcome.seconds, 1),
        steps=step_count,
        cpu_s=outcome.cpu_s,
    )
    log.note("canary_arm", text, recorded_arm)
    echo(text, err=True)
    if arm.has_crashed and not arm.stopped:
        tail = last_lines(trial.directory / f"{arm_name}.log")
        echo(*(f"    {line}" for line in tail.splitlines()), err=True)
    return outcome.run, arm


canary_command.add_command(canary_run_command)
