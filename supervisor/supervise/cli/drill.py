"""Injected faults: `supervise drill`, a list and a suite of them; `supervise demo`, one to see."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import asdict

from .. import __version__, system
from ..catalog import shipped
from ..core.model.decisions import json_document, plain_json
from ..errors import StoreError, UsageError
from ..report import incident_views
from ..report.incident_report import Status
from ..store import audit, files
from ..store.run_directory import RunDir
from ._output import echo, echo_json, echo_source, print_table, progress_line
from ._params import ARGV, RESUMING, JobCommand
from ._runs import SCRATCH, errors_without_verdict, make_empty, trial_directory, write_policy

if TYPE_CHECKING:
    from ..catalog.discover import DrillFacts
    from ..catalog.loader import Isolated
    from ..trials.arms import FaultArm
    from ..trials.drill_findings import Drill
    from ..trials.suite_report import FaultPlot, SuiteReport
    from ..trials.trial_runs import MonitorResult, PlannedRun, SuitePlan, SuiteSettings, TrialLog

LEAST = 200  # steps: rules know no usual value before some tens, and a fault needs time to show
EXAMPLE = "supervise drill suite --steps 400 -- python train.py --out {out} --seed {seed}"
PLAN, DOCUMENT, PAGE, TABLES = "plan.json", "suite.json", "suite.html", "suite.md"
VERDICTS = (0, 1)  # exit codes


@click.command(name="suite", cls=JobCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--policy", "-p", default="nano", show_default=True, metavar="P", help="Policy to test."
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="FAULT",
    help="A fault as for --drill, without the step. Default: all that a short run can show.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 20),
    default=3,
    show_default=True,
    metavar="N",
    help="Number of seeds; each run is made with each.",
)
@click.option(
    "--healthy",
    type=click.IntRange(1, 50),
    metavar="N",
    help="Number of healthy runs; at least one per seed, which is the default.",
)
@click.option(
    "--steps", type=click.IntRange(LEAST), required=True, help="Length of each run, in steps."
)
@click.option(
    "--at",
    type=click.IntRange(64),
    metavar="STEP",
    help="Step of the fault. Default: half of --steps.",
)
@click.option(
    "--metric", default="train_loss_raw", show_default=True, help="Loss per step; lower is better."
)
@click.option(
    "--act/--no-act",
    default=None,
    help="Also make each run with the policy acting. Default: if its mode is approve or enforce.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="Runs at the same time.",
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory of the suite. Default: runs/suite-<time>-<id>.",
)
@click.option("--keep", is_flag=True, help="Keep what the runs write to {out}.")
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON document.")
@click.option(
    "--fail-on",
    type=click.Choice(("nothing", "false", "undetected")),
    default="false",
    show_default=True,
    help="false: a page or an action in a healthy run; undetected: also harm without a page.",
)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD...")
@click.pass_context
def drill_suite_command(ctx: click.Context, /, argv: Sequence[str], **options: Any) -> None:
    """Inject faults into short runs; show what the policy does.

    For each fault and seed the job runs without actions: this shows what the fault costs and which
    alarm comes first. If the policy acts, the job runs again with actions: this shows what the
    actions save. Healthy runs measure false alarms and the normal range of the loss.

    {out} in the command stands for a scratch directory, {seed} for 1 to N, {steps} for the length.
    No message is sent, no job is restarted, W&B and model hubs are offline. A suite that was
    interrupted continues if it is started again with the same --dir.

    DIR has the suite as HTML, Markdown and JSON, the runs, and an audit log. A policy that asks for
    approval acts at once here.

    \b
    Examples:
      supervise drill suite --steps 400 -- \\
        python train.py --out {out} --seed {seed}
      supervise drill suite --fault lr_spike:factor=10 --fault bad_batch \\
        --steps 400 --jobs 2 -- python train.py --out {out} --seed {seed}

    Exit codes: 0; 1 as --fail-on says; 64 wrong usage, a run that cannot be started, a healthy run
    that fails, or no fault that can be injected; 65 invalid policy; 70 an error of our own.
    """
    if not argv:
        raise UsageError("no command given", hint=EXAMPLE)
    with errors_without_verdict(VERDICTS):
        from ..catalog.loader import load_isolated_policy
        from ..trials import trial_runs

        policy = load_isolated_policy(options["policy"])
        suite = _suite(list(argv), options, policy)
        directory = suite.settings.directory
        if options["directory"] is None:
            head, given = ctx.meta[ARGV][:2], ctx.meta[ARGV][2:]
            ctx.meta[RESUMING] = [*head, "--dir", str(directory), *given]
        with trial_runs.open_log(directory / trial_runs.LOG, trial_runs.SUITE_LOG) as log:
            log.note("suite_plan", f"{len(suite.drills)} faults, {suite.seeds} seeds", suite.plan)
            report = _run(suite, policy, log)
            _save(directory, report, log)
        echo(f"kept in {directory}", err=True)
        if options["json_wanted"]:
            echo_source(report.encode())
        else:
            _print(report)
        ctx.exit(1 if _fails(report, options["fail_on"]) else 0)


@dataclass(frozen=True, slots=True)
class _Suite:
    """What is to be made. `plan`: what must be the same where a suite goes on."""

    settings: SuiteSettings
    drills: Sequence[Drill]
    seeds: int
    healthy: int
    acts: bool
    metric: str
    plan: SuitePlan


def _suite(argv: list[str], options: Mapping[str, Any], policy: Isolated) -> _Suite:
    """Check what was asked for, and make or open the directory. Raises UsageError, StoreError."""
    from ..catalog import discover as inventory
    from ..core.model.decisions import ACTING_MODES
    from ..trials.drill_findings import Drill
    from ..trials.judgement import find_missing_placeholders
    from ..trials.trial_runs import SuitePlan, SuiteSettings, default_faults, find_clashes

    steps, seeds = options["steps"], options["seeds"]
    healthy = max(seeds, options["healthy"] or seeds)
    fault_step = steps // 2 if options["at"] is None else options["at"]
    if fault_step >= steps:
        raise UsageError(f"the fault at step {fault_step} comes after the {steps} steps of a run")
    if lacking := find_missing_placeholders(argv, healthy):
        text = f"the command has no {' and no '.join(lacking)}"
        raise UsageError(text, hint=EXAMPLE)
    names = list(inventory.drill_facts())
    texts = list(dict.fromkeys(options["faults"] or default_faults(names)))
    drills = [Drill(text, inventory.parse_drill(f"{text}@{fault_step}").fault) for text in texts]
    if alike := find_clashes(drills):
        raise UsageError(f"the files of {alike[0]} would be called like those of another fault")
    acts = options["act"]
    plan = SuitePlan(
        supervise=__version__,
        command=argv,
        cwd=str(Path.cwd()),
        policy=policy.policy.digest,
        faults=texts,
        seeds=seeds,
        healthy=healthy,
        steps=steps,
        fault_step=fault_step,
        metric=options["metric"],
        acts=policy.policy.mode in ACTING_MODES if acts is None else acts,
    )
    directory = _opened(trial_directory(options["directory"], "suite"), plan)
    settings = SuiteSettings(
        directory=directory,
        scratch=directory / SCRATCH,
        argv=argv,
        cwd=Path.cwd(),
        policy=write_policy(directory, policy),
        fault_step=fault_step,
        steps=steps,
        jobs=options["jobs"],
        keep=options["keep"],
    )
    return _Suite(settings, drills, seeds, healthy, plan.acts, options["metric"], plan)


def _opened(path: Path, plan: SuitePlan) -> Path:
    """Make the directory of a suite, or open that of one with the same plan."""
    plan_path = path / PLAN
    try:
        if plan_path.exists():
            stored = json.loads(plan_path.read_bytes())
            fields = plain_json(plan)
            differs = sorted(name for name in fields if stored.get(name) != fields[name])
            if differs:
                text = f"{path} holds a suite with other {', '.join(differs)}"
                raise UsageError(text, hint="choose another directory with --dir DIR")
            return path
        make_empty(path)
        files.replace_file(plan_path, json_document(plan).encode(), durable=True)
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read or write {plan_path}: {error}") from error
    return path


def _run(suite: _Suite, policy: Isolated, log: TrialLog) -> SuiteReport:
    """Make the runs, and return the report."""
    from ..trials import trial_runs
    from ..trials.arms import cite_run
    from ..trials.trial_runs import SuiteRun, drop_refused, plan_waves

    settings = suite.settings
    planned = plan_waves(suite.drills, suite.seeds, suite.healthy, suite.acts)
    count, planned_count = 0, sum(map(len, planned))
    arms: dict[PlannedRun, FaultArm] = {}
    refused: dict[str, str] = {}
    limit: float | None = None
    with progress_line("runs of the suite") as report:
        report(0, planned_count)
        for wave in planned:
            seconds = []
            made = trial_runs.make_runs(settings, drop_refused(refused, wave), limit)
            for planned_run, outcome, new in made:
                arm = arms[planned_run] = _read(suite, planned_run, outcome.run)
                seconds.append(outcome.seconds)
                if planned_run.drill is not None and arm.refused:
                    refused[planned_run.drill.text] = arm.refused
                text = f"{planned_run.name}: {len(arm.arm.steps)} steps in {outcome.seconds:.0f} s"
                text = f"{text}, not injected: {arm.refused}" if arm.refused else text
                count += 1
                report(count, planned_count)
                echo(f"[{count}/{planned_count}] {text}", err=True)
                if new:
                    recorded_run = SuiteRun(
                        **asdict(cite_run(outcome.run)),
                        exit_code=outcome.code,
                        seconds=round(outcome.seconds, 1),
                    )
                    log.note("suite_run", text, recorded_run)
                    trial_runs.store_outcome(settings, planned_run, outcome)
            if limit is None:
                _check_healthy(suite, arms)
                limit = trial_runs.limit_of(seconds)
    if len(refused) == len(suite.drills):
        name, reason = next(iter(refused.items()))
        raise UsageError(f"no fault can be injected into this job; {name}: {reason}")
    return _report(suite, policy, arms, log.trial)


def _check_healthy(suite: _Suite, arms: Mapping[PlannedRun, FaultArm]) -> None:
    """Refuse a job whose healthy runs are no controls. Raises UsageError."""
    from ..trials.drill_findings import explain_unhealthy
    from ..trials.trial_runs import last_lines

    settings = suite.settings
    for planned_run, arm in sorted(arms.items(), key=lambda pair: pair[0].seed):
        if reason := explain_unhealthy(arm, suite.metric, settings.steps, settings.fault_step):
            output = settings.directory / f"{planned_run.name}.log"
            tail = last_lines(output, 3)
            text = f"the healthy run of seed {planned_run.seed} {reason}" + (
                f"; {tail}" if tail else ""
            )
            raise UsageError(text, hint=f"less {output}")


def _read(suite: _Suite, planned_run: PlannedRun, run: RunDir) -> FaultArm:
    from ..trials.arms import read_fault
    from ..trials.drill_findings import METRICS

    return read_fault(run, (suite.metric, *METRICS), planned_run.name)


def _report(
    suite: _Suite, policy: Isolated, arms: Mapping[PlannedRun, FaultArm], name: str
) -> SuiteReport:
    from ..trials import drill_findings
    from ..trials.suite_report import SuiteReport, fault_plot, fault_result
    from ..trials.trial_runs import PlannedRun, TrialPolicy

    document, metric, settings = policy.policy, suite.metric, suite.settings
    healthy = {
        seed: arms[PlannedRun(None, seed, suite.acts)] for seed in range(1, suite.healthy + 1)
    }
    runs = [
        drill_findings.Runs(
            drill, seed, arms[alone], arms.get(PlannedRun(drill, seed, True)), healthy[seed]
        )
        for drill in suite.drills
        for seed in range(1, suite.seeds + 1)
        if (alone := PlannedRun(drill, seed, False)) in arms
    ]
    reads = {
        rule.id: {m for n in document.detectors_of(rule) for m in document.detectors[n].metrics}
        for rule in document.rules
    }
    findings = [
        drill_findings.summarize_fault(planned_run, metric, settings.steps, reads)
        for planned_run in runs
    ]
    controls = [
        drill_findings.summarize_healthy_run(s, arm, metric, settings.steps)
        for s, arm in healthy.items()
    ]
    plots: dict[str, FaultPlot] = {}
    for run, finding in zip(runs, findings, strict=True):
        plot = fault_plot(run, finding, metric)
        if plot is not None:
            plots.setdefault(run.drill.text, plot)
    notes = [f"the policy ran without its {', '.join(policy.left_out)}"] if policy.left_out else []
    return SuiteReport(
        suite=name,
        command=list(settings.argv),
        policy=TrialPolicy(document.name, document.digest, policy.left_out),
        means=_meanings(suite.drills),
        metric=metric,
        steps=settings.steps,
        fault_step=settings.fault_step,
        seeds=list(range(1, suite.seeds + 1)),
        acts=suite.acts,
        notes=notes,
        rules={rule.id: document.digest_of(rule) for rule in document.rules},
        healthy=controls,
        faults=[fault_result(drill, findings) for drill in suite.drills],
        monitors=drill_findings.summarize_monitors(findings, controls),
        plots=plots,
    )


def _meanings(drills: Sequence[Drill]) -> dict[str, str]:
    """Return what each fault does, with all its parameters."""
    from ..catalog import discover as inventory

    texts = {}
    facts = inventory.drill_facts()
    for drill in drills:
        params = inventory.parse_drill(f"{drill.text}@0").params
        arguments = ", ".join(f"{name}={value}" for name, value in params.items())
        texts[drill.text] = facts[drill.name].does + (f" ({arguments})" if arguments else "")
    return texts


def _by_digest(report: SuiteReport) -> dict[str, MonitorResult]:
    """Return what each rule has shown, with its digest; of a rule without an alarm, nothing."""
    from ..trials.drill_findings import Monitor
    from ..trials.trial_runs import MonitorResult

    monitors = {monitor.rule: monitor for monitor in report.monitors}
    silent = Monitor("", "", {}, {}, 0, ())
    return {
        rule: MonitorResult(
            digest,
            (monitor := monitors.get(rule, silent)).delays,
            monitor.leads,
            monitor.false_alarms,
        )
        for rule, digest in report.rules.items()
    }


def _save(directory: Path, report: SuiteReport, log: TrialLog) -> None:
    """Write the reports, and the result to the log. Raises StoreError."""
    from ..trials.suite_report import render_suite, suite_page, summarize_suite
    from ..trials.trial_runs import RESULT, SuiteResult

    data = report.encode().encode()
    try:
        files.replace_file(directory / DOCUMENT, data, durable=True)
        files.replace_file(directory / PAGE, suite_page(report).encode(), durable=False)
        files.replace_file(directory / TABLES, render_suite(report).encode(), durable=False)
    except OSError as error:
        raise StoreError(f"cannot write to {directory}: {error.strerror}") from error
    result = SuiteResult(
        DOCUMENT,
        hashlib.sha256(data).hexdigest(),
        report.policy,
        len(report.healthy),
        {fault.fault: fault.runs for fault in report.faults},
        _by_digest(report),
    )
    log.note(RESULT, summarize_suite(report), result)


def _print(report: SuiteReport) -> None:
    from ..trials.suite_report import (
        FAULT_HEADER,
        MONITORS,
        READING,
        describe_limits,
        describe_undetected,
        fault_rows,
        monitor_rows,
        summarize_suite,
    )

    echo(summarize_suite(report), "")
    print_table(list(fault_rows(report)), FAULT_HEADER)
    echo("", *textwrap.wrap(READING, 100), "")
    print_table(list(monitor_rows(report)), MONITORS)
    for title, texts in (
        ("Undetected faults", describe_undetected(report)),
        ("Limits", describe_limits(report)),
    ):
        if texts:
            echo("", f"{title}:")
        for text in texts:
            echo(f"  {text}")


def _fails(report: SuiteReport, on: str) -> bool:
    from ..trials.arms import PAGES

    wrong = any(
        run.acts or any(alarm.severity in PAGES for alarm in run.alarms) for run in report.healthy
    )
    missed = any(
        seed.harmed and seed.page is None for fault in report.faults for seed in fault.seeds
    )
    return on != "nothing" and (wrong or (on == "undetected" and missed))


HEADER = ("drill", "moves", "what it does")


@click.group(name="drill", no_args_is_help=True)
def drill_command() -> None:
    """Try faults on a job: list them, or run a suite of them.

    One fault at a time is `supervise --policy P --drill FAULT@STEP -- COMMAND`.
    """


drill_command.add_command(drill_suite_command)


@drill_command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_(as_json: bool) -> None:
    """List the faults that `--drill FAULT@STEP` injects.

    A drill breaks your own job on purpose, at one step, to see what the policy does about it. A
    parameter goes before the step; `rank=K` strikes one rank only.

    \b
    Examples:
      supervise drill list
      supervise -p nano --drill lr_spike:factor=10,steps=5@150 -- python train.py

    Exit codes: 0.
    """
    from ..catalog import discover

    faults = discover.drill_facts()
    if as_json:
        echo_json(list(faults.values()))
    else:
        print_table(
            [(name, fault.moves or "-", fault.does) for name, fault in faults.items()], HEADER
        )


@drill_command.command()
@click.argument("name", metavar="NAME")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show(name: str, as_json: bool) -> None:
    """Explain a fault and its parameters.

    \b
    Examples:
      supervise drill show lr_spike

    Exit codes: 0; 64 no such fault.
    """
    from ..catalog import discover
    from ..catalog.diagnostics import did_you_mean
    from ..errors import UsageError

    faults = discover.drill_facts()
    if name not in faults:
        raise UsageError(f"no fault {name!r}", hint=did_you_mean(name, faults))
    if as_json:
        echo_json(faults[name])
    else:
        print_table(_lines(faults[name]))


def _lines(fault: DrillFacts) -> list[tuple[str, str]]:
    lines = [("drill", fault.drill), ("does", fault.does), ("moves", fault.moves or "-")]
    for name, parameter in fault.parameters.items():
        lines.append((name, f"{parameter.meaning} (default {parameter.default})"))
    pairs = (f"{name}={parameter.default}" for name, parameter in fault.parameters.items())
    arguments = ",".join(pairs)
    spelled = f"{fault.drill}:{arguments}@150" if arguments else f"{fault.drill}@150"
    return [*lines, ("use", f"supervise --policy nano --drill {spelled} -- COMMAND")]


FAULT, FAULT_STEP, STEPS = "lr_spike", 150, 320
NOTICE_STEPS = 40  # the fault lasts 20 steps; a later incident has another cause


@click.command(name="demo")
@click.option("--run-dir", type=click.Path(path_type=Path), metavar="D", help="Keep the run here.")
def demo_command(run_dir: Path | None) -> int:
    """Break a small training run and watch its recovery.

    Trains a small GPT and multiplies its learning rate by 30 at step 150. Takes one to three
    minutes on one core and needs torch in this environment.

    \b
    Examples:
      supervise demo
      supervise demo --run-dir runs/demo

    Exit codes: 0 the fault was detected and the recovery verified; 1 otherwise; 64 no torch.
    """
    if find_spec("torch") is None:
        raise UsageError(
            f"the demo needs torch, which {sys.executable} does not have",
            hint="pip install 'supervise-train[torch]', or in a checkout: make demo",
        )
    path = run_dir or Path("runs") / f"demo-{system.wall_time()[:19].replace(':', '')}"
    if (path / "run.json").exists():
        raise UsageError(f"{path} holds a run already", hint="use another --run-dir, or none")
    train = shipped.shipped_folder("examples") / "nano" / "train.py"
    drill = f"{FAULT}@{FAULT_STEP}"
    job = [_near(sys.executable), _near(train), "--steps", str(STEPS), "--log-every", "25"]
    args = ["--policy", "nano", "--drill", drill, "--run-dir", str(path), "--"]
    args += [*job, "--out", str(path / "checkpoints")]
    echo(f"$ supervise {shlex.join(args)}", bold=True)
    code = _supervise(*args)
    if not (path / "run.json").exists():
        return code  # `run` printed the error
    if code == 128 + signal.SIGINT:
        click.get_current_context().meta[RESUMING] = ["demo"]
        raise KeyboardInterrupt

    incident = _incident(list(audit.read_audit(RunDir.open(path).audit_path)))
    if incident is None:
        echo("", "the fault was not detected", fg="red")
    card = [] if incident is None else [["why", str(path), incident]]
    lines = [_show(args) for args in (*card, ["audit", "verify", str(path)], ["replay", str(path)])]
    recovered = incident is not None and _has_recovered(path, incident)
    if code:
        echo(f"the job ended with exit code {code}", fg="red")
    _print_next(path, drill, job)
    return int(not (recovered and all(lines) and code == 0))


def _near(path: str | Path) -> str:
    """Return a path below this directory without it."""
    near = os.path.relpath(path)
    return str(path) if near.startswith(os.pardir) else near


def _show(args: list[str]) -> bool:
    """Print a command and what it prints; return whether it succeeded."""
    echo("", f"$ supervise {shlex.join(args)}", bold=True)
    return _supervise(*args) == 0


def _supervise(*args: str) -> int:
    """Run a command line of ours on this terminal and return its exit code."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-m", "supervise", *args], env=environ) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue  # the child received it too, and waits for the job


def _incident(records: list[dict[str, Any]]) -> str | None:
    """Return the id of the incident that the fault opened or joined."""
    reach = range(FAULT_STEP, FAULT_STEP + NOTICE_STEPS)
    for record in records:
        grew = record["kind"] == "incident" and record["data"].get("what") != "closed"
        if grew and record["step"] in reach:
            return str(record["incident"])
    return None


def _has_recovered(run: Path, incident: str) -> bool:
    """Return whether the card of an incident says that its recovery is proven."""
    document = json.loads(
        (run / "incidents" / incident / incident_views.DOCUMENT).read_text("utf-8")
    )
    return bool(document["final"] and document["state"] == Status.RECOVERED)


def _print_next(path: Path, drill: str, job: list[str]) -> None:
    """Print where the run is and which commands to try next."""
    target = shlex.quote(str(path))
    ours = Path(sys.executable).with_name("supervise")
    on_path = shutil.which("supervise") == str(ours) or not ours.exists()
    program = "supervise" if on_path else os.path.relpath(ours)
    echo("", f"the run is in {target}; next:")
    for line in (
        f"{program} audit show {target}",
        f"{program} export {target} --csv --metrics train_loss_raw,learning_rate,grad_global_norm",
        f"{program} --policy nano --mode shadow --drill {drill} -- {shlex.join(job)}",
    ):
        echo(f"  {line}")
