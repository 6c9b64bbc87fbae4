"""`supervise drill suite`: faults, seeds and healthy runs of a job, and what the policy detects."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import __version__
from ..errors import StoreError, UsageError
from ..store import files
from ._output import document as as_json
from ._output import print_table, printable
from ._params import JobCommand
from ._trials import SCRATCH, make_empty, outside_notes, own_errors, place_of, write_policy

if TYPE_CHECKING:
    from ..catalog.loader import Isolated
    from ..fault_suite.choice import PlannedRun
    from ..fault_suite.fault_arm import FaultArm
    from ..fault_suite.findings import Drill
    from ..store.run_directory import RunDir
    from ..trials.suite_run import SuiteSettings
    from ..trials.trial_log import TrialLog

LEAST = 200  # steps: rules know no usual value before some tens, and a fault needs time to show
EXAMPLE = "supervise drill suite --steps 400 -- python train.py --out {out} --seed {seed}"
PLAN, DOCUMENT, PAGE, TABLES = "plan.json", "suite.json", "suite.html", "suite.md"
VERDICTS = (0, 1)  # exit codes


@click.command(name="suite", cls=JobCommand, context_settings={"allow_interspersed_args": False})
@click.option("--policy", "-p", default="nano", show_default=True, metavar="P", help="To prove.")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="FAULT",
    help="As --drill takes it, without the step. Default: all that a short run can show.",
)
@click.option("--seeds", type=click.IntRange(1, 20), default=3, show_default=True, metavar="N")
@click.option(
    "--healthy",
    type=click.IntRange(1, 50),
    metavar="N",
    help="Healthy runs; at least one per seed, the default.",
)
@click.option(
    "--steps", type=click.IntRange(LEAST), required=True, help="Length of each run, in steps."
)
@click.option(
    "--at", type=click.IntRange(64), metavar="STEP", help="Of the fault. Default: half of --steps."
)
@click.option(
    "--metric", default="train_loss_raw", show_default=True, help="Loss per step; lower is better."
)
@click.option(
    "--act/--no-act",
    default=None,
    help="Also make each run with the policy acting. Default: if its mode is approve or enforce.",
)
@click.option("--jobs", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Of the suite; an interrupted one goes on. Default: runs/suite-<time>-<id>.",
)
@click.option("--keep", is_flag=True, help="Keep what the runs write to {out}.")
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON document.")
@click.option(
    "--fail-on",
    type=click.Choice(("nothing", "false", "undetected")),
    default="false",
    show_default=True,
    help="false: a page or an action in a healthy run; undetected: also a harm without a page.",
)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD...")
@click.pass_context
def command(ctx: click.Context, /, argv: Sequence[str], **options: Any) -> None:
    """Inject faults into short runs of a job, and show what the policy makes of them.

    For each fault and seed the job runs twice: without actions, which shows what the fault costs
    and which alarm is first, and with actions, which shows what they save. Healthy runs show false
    alarms, and the band that the loss of a faulty run leaves.

    {out} in the command stands for a scratch directory, {seed} for 1 to N, {steps} for the length.
    No message is sent, the job is started once each, W&B and the hubs are offline. A suite that was
    interrupted goes on with the same --dir.

    DIR has the suite as HTML, Markdown and JSON, the runs, and an audit log. A policy that asks for
    approval acts at once here.

    \b
    Examples:
      supervise drill suite --steps 400 -- python train.py --out {out} --seed {seed}
      supervise drill suite --policy my.yaml --fault lr_spike:factor=10 --fault bad_batch \\
        --seeds 5 --steps 400 --jobs 2 -- python train.py --out {out} --seed {seed}

    Exit codes: 0; 1 as --fail-on says; 64 wrong usage, a run that cannot be started, a healthy run
    that fails, or no fault that can be injected; 65 invalid policy; 70 an error of our own.
    """
    if not argv:
        raise UsageError("no command given", hint=EXAMPLE)
    with own_errors(VERDICTS):
        from ..catalog.loader import isolated
        from ..trials import trial_log

        policy = isolated(options["policy"])
        suite = _suite(list(argv), options, policy)
        directory = suite.settings.directory
        with trial_log.opened(directory / trial_log.LOG, trial_log.SUITE) as log:
            log.note("suite_plan", f"{len(suite.drills)} faults, {suite.seeds} seeds", suite.plan)
            whole = _made(suite, policy, log)
            _keep(directory, whole, log)
        click.echo(f"kept in {directory}", err=True)
        if options["json_wanted"]:
            click.echo(as_json(whole))
        else:
            _print(whole)
        ctx.exit(1 if _fails(whole, options["fail_on"]) else 0)


@dataclass(frozen=True, slots=True)
class _Suite:
    """What is to be made. `plan`: what must be the same where a suite goes on."""

    settings: SuiteSettings
    drills: Sequence[Drill]
    seeds: int
    healthy: int
    acts: bool
    metric: str
    plan: Mapping[str, Any]


def _suite(argv: list[str], options: Mapping[str, Any], policy: Isolated) -> _Suite:
    """Check what was asked for, and make or open the directory. Raises UsageError, StoreError."""
    from ..canary.trial_plan import missing
    from ..catalog import discover as inventory
    from ..core.model.decisions import ACTING_MODES
    from ..fault_suite.choice import by_default, clashes
    from ..fault_suite.findings import Drill
    from ..trials.suite_run import SuiteSettings

    steps, seeds = options["steps"], options["seeds"]
    healthy = max(seeds, options["healthy"] or seeds)
    at = steps // 2 if options["at"] is None else options["at"]
    if at >= steps:
        raise UsageError(f"the fault at step {at} comes after the {steps} steps of a run")
    if lacking := missing(argv, healthy):
        text = f"the command has no {' and no '.join(lacking)}"
        raise UsageError(text, hint=EXAMPLE)
    names = [each["drill"] for each in inventory.drill_facts()]
    texts = list(dict.fromkeys(options["faults"] or by_default(names)))
    drills = [Drill(text, inventory.parse_drill(f"{text}@{at}")["fault"]) for text in texts]
    if alike := clashes(drills):
        raise UsageError(f"the files of {alike[0]} would be called like those of another fault")
    acts = options["act"]
    plan = {
        "supervise": __version__,
        "command": argv,
        "cwd": str(Path.cwd()),
        "policy": policy.policy.digest,
        "faults": texts,
        "seeds": seeds,
        "healthy": healthy,
        "steps": steps,
        "at": at,
        "metric": options["metric"],
        "acts": policy.policy.mode in ACTING_MODES if acts is None else acts,
    }
    directory = _opened(place_of(options["directory"], "suite"), plan)
    settings = SuiteSettings(
        directory=directory,
        scratch=directory / SCRATCH,
        argv=argv,
        cwd=Path.cwd(),
        policy=write_policy(directory, policy),
        at=at,
        steps=steps,
        jobs=options["jobs"],
        keep=options["keep"],
    )
    return _Suite(settings, drills, seeds, healthy, plan["acts"], options["metric"], plan)


def _opened(path: Path, plan: Mapping[str, Any]) -> Path:
    """Make the directory of a suite, or open that of one with the same plan."""
    kept = path / PLAN
    try:
        if kept.exists():
            known = json.loads(kept.read_bytes())
            differs = sorted(name for name in plan if known.get(name) != plan[name])
            if differs:
                text = f"{path} holds a suite with other {', '.join(differs)}"
                raise UsageError(text, hint="choose another directory with --dir DIR")
            return path
        make_empty(path)
        files.replace(kept, as_json(plan).encode(), durable=True)
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read or write {kept}: {error}") from error
    return path


def _made(suite: _Suite, policy: Isolated, log: TrialLog) -> dict[str, Any]:
    """Make the runs, and return the document."""
    from ..fault_suite.choice import waves, without_refused
    from ..trials import suite_run
    from ..trials.recorded_arm import cite

    settings = suite.settings
    planned = waves(suite.drills, suite.seeds, suite.healthy, suite.acts)
    count, whole = 0, sum(map(len, planned))
    arms: dict[PlannedRun, FaultArm] = {}
    refused: dict[str, str] = {}
    outside: dict[str, list[str]] = {}
    limit: float | None = None
    for wave in planned:
        seconds = []
        for one, outcome, new in suite_run.make(settings, without_refused(refused, wave), limit):
            arm = arms[one] = _read(suite, one, outcome.run)
            seconds.append(outcome.seconds)
            if one.drill is not None and arm.refused:
                refused[one.drill.text] = arm.refused
            if outcome.outside:
                outside[one.name] = outcome.outside
            text = f"{one.name}: {len(arm.arm.steps)} steps in {outcome.seconds:.0f} s"
            text = f"{text}, not injected: {arm.refused}" if arm.refused else text
            count += 1
            click.echo(f"[{count}/{whole}] {text}", err=True)
            if new:
                about = {"exit_code": outcome.code, "seconds": round(outcome.seconds, 1)}
                log.note(
                    "suite_run", text, {**about, "outside": outcome.outside, **cite(outcome.run)}
                )
                suite_run.keep(settings, one, outcome)
        if limit is None:
            _check_healthy(suite, arms)
            limit = suite_run.limit_of(seconds)
    if len(refused) == len(suite.drills):
        name, why = next(iter(refused.items()))
        raise UsageError(f"no fault can be injected into this job; {name}: {why}")
    return _document(suite, policy, arms, outside, log.trial)


def _check_healthy(suite: _Suite, arms: Mapping[PlannedRun, FaultArm]) -> None:
    """Refuse a job whose healthy runs are no controls. Raises UsageError."""
    from ..fault_suite.findings import unhealthy
    from ..trials.arm_run import last_lines

    settings = suite.settings
    for one, arm in sorted(arms.items(), key=lambda pair: pair[0].seed):
        if why := unhealthy(arm, suite.metric, settings.steps, settings.at):
            output = settings.directory / f"{one.name}.log"
            shown = last_lines(output, 3)
            text = f"the healthy run of seed {one.seed} {why}" + (f"; {shown}" if shown else "")
            raise UsageError(text, hint=f"less {output}")


def _read(suite: _Suite, one: PlannedRun, run: RunDir) -> FaultArm:
    from ..fault_suite.unaffected import METRICS
    from ..trials.recorded_fault import read_fault

    return read_fault(run, (suite.metric, *METRICS), one.name)


def _document(
    suite: _Suite,
    policy: Isolated,
    arms: Mapping[PlannedRun, FaultArm],
    outside: Mapping[str, Sequence[str]],
    name: str,
) -> dict[str, Any]:
    from ..fault_suite import findings
    from ..fault_suite.choice import PlannedRun
    from ..fault_suite.suite_document import plot_of, suite_document, summary

    whole, metric, settings = policy.policy, suite.metric, suite.settings
    healthy = {
        seed: arms[PlannedRun(None, seed, suite.acts)] for seed in range(1, suite.healthy + 1)
    }
    runs = [
        findings.Runs(
            drill, seed, arms[alone], arms.get(PlannedRun(drill, seed, True)), healthy[seed]
        )
        for drill in suite.drills
        for seed in range(1, suite.seeds + 1)
        if (alone := PlannedRun(drill, seed, False)) in arms
    ]
    reads = {
        rule.id: {m for n in whole.detectors_of(rule) for m in whole.detectors[n].metrics}
        for rule in whole.rules
    }
    found = [findings.finding(one, metric, settings.steps, reads) for one in runs]
    controls = [findings.healthy(s, arm, metric, settings.steps) for s, arm in healthy.items()]
    plots: dict[str, Any] = {}
    for one, shown in zip(runs, found, strict=True):
        if one.drill.text not in plots and (plot := plot_of(one, shown, metric)) is not None:
            plots[one.drill.text] = plot
    left = [f"the policy ran without its {', '.join(policy.left_out)}"] if policy.left_out else []
    about = {
        "suite": name,
        "command": list(settings.argv),
        "policy": {"name": whole.name, "digest": whole.digest, "without": policy.left_out},
        "means": _meanings(suite.drills),
        "metric": metric,
        "steps": settings.steps,
        "at": settings.at,
        "seeds": list(range(1, suite.seeds + 1)),
        "acts": suite.acts,
        "notes": [*left, *outside_notes(outside)],
        "rules": {rule.id: whole.digest_of(rule) for rule in whole.rules},
    }
    monitors = findings.monitors(found, controls)
    made = suite_document(about, suite.drills, found, controls, monitors, plots)
    return {**made, "summary": summary(made)}


def _meanings(drills: Sequence[Drill]) -> dict[str, str]:
    """Return what each fault does, with all its parameters."""
    from ..catalog import discover as inventory

    found = {}
    known = {each["drill"]: each["does"] for each in inventory.drill_facts()}
    for drill in drills:
        params = inventory.parse_drill(f"{drill.text}@0")["params"]
        shown = ", ".join(f"{name}={value}" for name, value in params.items())
        found[drill.text] = f"{known[drill.name]} ({shown})" if shown else known[drill.name]
    return found


def _by_digest(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each rule has shown, with its digest; of a rule without an alarm, nothing."""
    shown = {one["rule"]: one for one in whole["monitors"]}
    none = {"delays": {}, "leads": {}, "false_alarms": 0}
    return {
        rule: {"digest": digest, **{name: shown.get(rule, none)[name] for name in none}}
        for rule, digest in whole["rules"].items()
    }


def _keep(directory: Path, whole: Mapping[str, Any], log: TrialLog) -> None:
    """Write the reports, and the result to the log. Raises StoreError."""
    from ..fault_suite.suite_markdown import markdown
    from ..fault_suite.suite_page import suite_page
    from ..trials.trial_log import RESULT

    data = as_json(whole).encode()
    try:
        files.replace(directory / DOCUMENT, data, durable=True)
        files.replace(directory / PAGE, suite_page(whole).encode(), durable=False)
        files.replace(directory / TABLES, markdown(whole).encode(), durable=False)
    except OSError as error:
        raise StoreError(f"cannot write to {directory}: {error.strerror}") from error
    cited = {
        "document": DOCUMENT,
        "sha256": hashlib.sha256(data).hexdigest(),
        "policy": whole["policy"],
        "healthy": len(whole["healthy"]),
        "faults": {one["fault"]: one["runs"] for one in whole["faults"]},
        "monitors": _by_digest(whole),
    }
    log.note(RESULT, whole["summary"], cited)


def _print(whole: Mapping[str, Any]) -> None:
    from ..fault_suite.suite_document import (
        FAULTS,
        MONITORS,
        READING,
        fault_rows,
        limits,
        monitor_rows,
        undetected,
    )

    click.echo(f"{whole['summary']}\n")
    print_table(list(fault_rows(whole)), FAULTS)
    click.echo("\n" + "\n".join(textwrap.wrap(READING, 100)) + "\n")
    print_table(list(monitor_rows(whole)), MONITORS)
    for title, texts in (("Undetected faults", undetected(whole)), ("Limits", limits(whole))):
        if texts:
            click.echo(f"\n{title}:")
        for text in texts:
            click.echo(printable(f"  {text}"))


def _fails(whole: Mapping[str, Any], on: str) -> bool:
    from ..fault_suite.fault_arm import PAGES

    wrong = any(
        one["acts"] or any(alarm["severity"] in PAGES for alarm in one["alarms"])
        for one in whole["healthy"]
    )
    missed = any(
        seed["harmed"] and not any(one["severity"] in PAGES for one in seed["detections"])
        for fault in whole["faults"]
        for seed in fault["seeds"]
    )
    return on != "nothing" and (wrong or (on == "undetected" and missed))
