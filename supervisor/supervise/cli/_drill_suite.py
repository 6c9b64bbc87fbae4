"""`supervise drill suite`: faults, seeds and healthy runs of a job, and what the policy detects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import StoreError, UsageError
from ..store import files
from ._output import document as as_json
from ._output import print_table
from ._params import JobCommand
from ._trials import SCRATCH, make_empty, place_of, write_policy

if TYPE_CHECKING:
    from ..catalog.assembly.isolated import Isolated
    from ..fault_suite.choice import Wanted
    from ..fault_suite.fault_arm import FaultArm
    from ..fault_suite.findings import Drill
    from ..trials.suite_run import Workshop
    from ..trials.trial_log import TrialLog

LEAST = 200  # steps: rules know no usual value before some tens, and a fault needs time to show
EXAMPLE = "supervise drill suite --steps 400 -- python train.py --out {out} --seed {seed}"
PLAN, DOCUMENT, PAGE = "plan.json", "suite.json", "suite.html"
OUTSIDE = 3  # files written elsewhere that are named


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

    DIR has suite.json, suite.html, the runs, and an audit log.

    \b
    Examples:
      supervise drill suite --steps 400 -- python train.py --out {out} --seed {seed}
      supervise drill suite --policy my.yaml --fault lr_spike:factor=10 --fault bad_batch \\
        --seeds 5 --steps 400 --jobs 2 -- python train.py --out {out} --seed {seed}

    Exit codes: 0; 1 as --fail-on says; 64 wrong usage, or a run that cannot be started; 65 invalid
    policy.
    """
    if not argv:
        raise UsageError("no command given", hint=EXAMPLE)
    from ..catalog.assembly.isolated import isolated
    from ..trials import trial_log

    policy = isolated(options["policy"])
    suite = _suite(list(argv), options, policy)
    with trial_log.opened(suite.shop.directory / trial_log.LOG, trial_log.SUITE) as log:
        log.note("suite_plan", f"{len(suite.drills)} faults, {suite.seeds} seeds", suite.plan)
        whole = _made(suite, policy, log)
        data = as_json(whole).encode()
        digest = hashlib.sha256(data).hexdigest()
        cited: dict[str, Any] = {"document": DOCUMENT, "sha256": digest}
        cited |= {"policy": whole["policy"], "monitors": _by_digest(whole)}
        _keep(suite.shop.directory, whole, data)
        log.note(trial_log.RESULT, whole["summary"], cited)
    click.echo(f"kept in {suite.shop.directory}", err=True)
    if options["json_wanted"]:
        click.echo(as_json(whole))
    else:
        _print(whole)
    ctx.exit(1 if _fails(whole, options["fail_on"]) else 0)


@dataclass(frozen=True, slots=True)
class _Suite:
    """What is to be made. `plan`: what must be the same where a suite goes on."""

    shop: Workshop
    drills: Sequence[Drill]
    seeds: int
    healthy: int
    acts: bool
    metric: str
    plan: Mapping[str, Any]


def _suite(argv: list[str], options: Mapping[str, Any], policy: Isolated) -> _Suite:
    """Check what was asked for, and make or open the directory. Raises UsageError, StoreError."""
    from ..canary.trial_plan import missing
    from ..catalog.inventory import drills as inventory
    from ..core.model.decisions import ACTING_MODES
    from ..fault_suite.choice import by_default
    from ..fault_suite.findings import Drill
    from ..trials.suite_run import Workshop

    steps, seeds = options["steps"], options["seeds"]
    healthy = max(seeds, options["healthy"] or seeds)
    at = steps // 2 if options["at"] is None else options["at"]
    if at >= steps:
        raise UsageError(f"the fault at step {at} comes after the {steps} steps of a run")
    if lacking := missing(argv, healthy):
        text = f"the command has no {' and no '.join(lacking)}"
        raise UsageError(text, hint=EXAMPLE)
    names = [each["drill"] for each in inventory.describe()]
    texts = list(dict.fromkeys(options["faults"] or by_default(names)))
    drills = [Drill(text, inventory.parse(f"{text}@{at}")["fault"]) for text in texts]
    acts = options["act"]
    plan = {
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
    shop = Workshop(
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
    return _Suite(shop, drills, seeds, healthy, plan["acts"], options["metric"], plan)


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
    from ..fault_suite.choice import refusing, waves
    from ..trials import suite_run

    first, second, third = waves(suite.drills, suite.seeds, suite.healthy, suite.acts)
    count = _Count(len(first) + len(second) + len(third))
    arms: dict[Wanted, FaultArm] = {}
    refused: dict[str, str] = {}
    outside: dict[str, list[str]] = {}
    limit: float | None = None
    for wave in (first, second, third):
        seconds = []
        for wanted, outcome, new in suite_run.made(suite.shop, refusing(refused, wave), limit):
            arm = _read(suite, wanted, outcome.run)
            arms[wanted] = arm
            seconds.append(outcome.seconds)
            if wanted.drill is not None and arm.refused:
                refused[wanted.drill.text] = arm.refused
            if outcome.outside:
                outside[wanted.name] = outcome.outside
            text = f"{wanted.name}: {arm.made} steps in {outcome.seconds:.0f} s"
            text = f"{text}, not injected: {arm.refused}" if arm.refused else text
            click.echo(f"[{count.next()}] {text}", err=True)
            if new:
                about = {"exit_code": outcome.code, "seconds": round(outcome.seconds, 1)}
                cited = _cite(outcome.run)
                log.note("suite_run", text, {**about, "outside": outcome.outside, **cited})
        limit = limit or suite_run.limit_of(seconds)
    return _document(suite, policy, arms, outside, log.trial)


class _Count:
    """Counts runs for the progress on stderr."""

    def __init__(self, whole: int) -> None:
        self._whole = whole
        self._ended = 0

    def next(self) -> str:
        """Count one more, and return "3/12"."""
        self._ended += 1
        return f"{self._ended}/{self._whole}"


def _cite(run: Any) -> dict[str, Any]:
    from ..trials.recorded_arm import cite

    return cite(run)


def _read(suite: _Suite, wanted: Wanted, run: Any) -> FaultArm:
    from ..fault_suite.unaffected import METRICS
    from ..trials.recorded_fault import read_fault

    return read_fault(run, (suite.metric, *METRICS), wanted.name)


def _document(
    suite: _Suite,
    policy: Isolated,
    arms: Mapping[Wanted, FaultArm],
    outside: Mapping[str, Sequence[str]],
    name: str,
) -> dict[str, Any]:
    from ..fault_suite import findings
    from ..fault_suite.choice import Wanted
    from ..fault_suite.suite_document import plot_of, suite_document, summary

    whole, metric = policy.policy, suite.metric
    healthy = {seed: arms[Wanted(None, seed, suite.acts)] for seed in range(1, suite.healthy + 1)}
    runs = [
        findings.Runs(drill, seed, arms[silent], arms.get(Wanted(drill, seed, True)), healthy[seed])
        for drill in suite.drills
        for seed in range(1, suite.seeds + 1)
        if (silent := Wanted(drill, seed, False)) in arms
    ]
    found = [findings.finding(one, metric, suite.shop.steps) for one in runs]
    controls = [findings.healthy(s, arm, metric, suite.shop.steps) for s, arm in healthy.items()]
    plots: dict[str, Any] = {}
    for one, shown in zip(runs, found, strict=True):
        if one.drill.text not in plots and (plot := plot_of(one, shown, metric)) is not None:
            plots[one.drill.text] = plot
    reads = {
        rule.id: {m for n in whole.detectors_of(rule) for m in whole.detectors[n].metrics}
        for rule in whole.rules
    }
    notes = [
        f"{run} wrote outside of its directory: {', '.join(list(paths)[:OUTSIDE])}"
        for run, paths in outside.items()
    ]
    left = [f"the policy ran without its {', '.join(policy.left_out)}"] if policy.left_out else []
    about = {
        "suite": name,
        "command": list(suite.shop.argv),
        "policy": {"name": whole.name, "digest": whole.digest, "without": policy.left_out},
        "metric": metric,
        "steps": suite.shop.steps,
        "at": suite.shop.at,
        "seeds": list(range(1, suite.seeds + 1)),
        "acts": suite.acts,
        "notes": [*left, *notes],
        "rules": {rule.id: whole.digest_of(rule) for rule in whole.rules},
    }
    monitors = findings.monitors(suite.drills, found, controls, reads)
    made = suite_document(about, suite.drills, found, controls, monitors, plots)
    return {**made, "summary": summary(made)}


def _by_digest(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each rule has shown, with its digest; of a rule without an alarm, nothing."""
    shown = {one["rule"]: one for one in whole["monitors"]}
    none = {"delays": {}, "leads": {}, "false_alarms": 0}
    return {
        rule: {"digest": digest, **{name: shown.get(rule, none)[name] for name in none}}
        for rule, digest in whole["rules"].items()
    }


def _keep(directory: Path, whole: Mapping[str, Any], data: bytes) -> None:
    from ..fault_suite.suite_page import suite_page

    try:
        files.replace(directory / DOCUMENT, data, durable=True)
        files.replace(directory / PAGE, suite_page(whole).encode(), durable=False)
    except OSError as error:
        raise StoreError(f"cannot write to {directory}: {error.strerror}") from error


def _print(whole: Mapping[str, Any]) -> None:
    from ..fault_suite.suite_document import (
        FAULTS,
        MONITORS,
        doubts,
        fault_rows,
        monitor_rows,
        undetected,
    )

    click.echo(f"{whole['summary']}\n")
    print_table(list(fault_rows(whole)), FAULTS)
    click.echo("\nUndetected faults:")
    for text in undetected(whole) or ["nothing that was tried"]:
        click.echo(f"  {text}")
    click.echo("")
    print_table(list(monitor_rows(whole)), MONITORS)
    if texts := doubts(whole):
        click.echo("\nLimits of this suite:")
        for text in texts:
            click.echo(f"  {text}")


def _fails(whole: Mapping[str, Any], on: str) -> bool:
    from ..fault_suite.fault_arm import PAGES

    wrong = any(
        one["acts"] or any(alarm["severity"] in PAGES for alarm in one["alarms"])
        for one in whole["healthy"]
    )
    missed = any(
        seed["harmed"] and seed["page"] is None for one in whole["faults"] for seed in one["seeds"]
    )
    return on != "nothing" and (wrong or (on == "undetected" and missed))
