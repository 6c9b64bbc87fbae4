"""`supervise doctor`: check this machine and, given a command, the job's Python.

It starts the job's interpreter, and the job only with `--wiring`: `_job_check.py` trains a tiny
model there, reports which metrics to expect, and what the script's text says of its checkpoints.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from platform import python_version
from statistics import median
from typing import Any

import click

from .. import __version__
from ..catalog import shipped
from ..catalog.loader import failure_classes
from ..catalog.sections import VERSION as POLICY_FORMAT
from ..catalog.yaml_document import inline_yaml
from ..core import host_health
from ..core.frames import LOSS
from ..core.job_recipes import Recipe
from ..core.model.policy import HostHealth
from ..errors import InputError, UsageError
from ..runtime import environment
from ..runtime.host import MATMUL_S, HealthGate, Start
from ..runtime.launcher import SLOTS
from ..store.audit import read_audit
from ..store.run_directory import FORMAT as RUN_FORMAT
from ..store.run_records import read_rows
from ..trials.trial_runs import ArmSpec, run_arm
from ._job_check import (
    ALWAYS,
    REPORTED,
    STEPS,
    Availability,
    ProbeCheck,
    Section,
    announced_metrics,
    check_probe,
    find_interpreter,
    inspect_script,
    list_metric_availability,
    script_of,
    world_size,
)
from ._output import echo, echo_json, progress_line
from ._params import PROGRAM, JobCommand

HEALTH_S = 150.0  # longer than all parts of a look together may take
OLDEST_PROBE = (3, 9)
# Steps of the job that show its wiring, 16-bit updates too; of which counts need the least.
WIRING_STEPS, LEAST_STEPS = 24, 8
WIRING_S = 600.0  # for them
FORMATS = {"policy": POLICY_FORMAT, "probe": environment.PROBE_FORMAT, "run directory": RUN_FORMAT}


@dataclass
class Check:
    """One line: `ok`, `note` (works less well), `fail` (does not work)."""

    name: str
    status: str
    detail: str


@click.command(name="doctor", cls=JobCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="D",
    help="Directory for runs. Default: runs.",
)
@click.option(
    "--health",
    is_flag=True,
    help="Also test this host, as `run` does before a relaunch; devices compute for 5 s.",
)
@click.option(
    "--wiring",
    is_flag=True,
    help=f"Start COMMAND for {WIRING_STEPS} steps; report weights that should train and do not.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def doctor_command(
    run_dir: Path | None, health: bool, wiring: bool, as_json: bool, argv: tuple[str, ...]
) -> int:
    """Check this machine and the job's Python.

    Given COMMAND, it says whether the job can be started again from a checkpoint. It lists every
    metric, and whether it will be measured in this job. Only --wiring starts the job.

    With --health it also looks at memory, disk and driver. On each device that is not in use, the
    job's Python multiplies matrices and compares the product with the known one. In a scheduler's
    prolog this keeps jobs off a broken host.

    --wiring starts the job, to see if each weight that should train is in an optimizer and gets a
    gradient; frozen weights are left out. The job makes its first 24 steps, only observed, and
    writes its usual files; then it is asked to end.

    \b
    Examples:
      supervise doctor
      supervise doctor --wiring -- python train.py --out /tmp/trial
      supervise doctor -- torchrun --nproc-per-node 8 train.py
      supervise doctor --health -- python train.py

    Exit codes: 0 all works; 1 something is broken; 64 wrong usage.
    """
    checks = [*_check_machine(run_dir or Path("runs"))]
    tier, probed, measured = None, None, dict[str, Availability]()
    if argv:
        tier, reason = environment.forecast_tier(argv)
        facts, probed = check_job(argv)
        checks += facts
        measured = list_metric_availability(probed, reason, world_size(argv, os.environ))
    if health:
        checks += _check_health(argv)
    if wiring:
        if not argv:
            raise UsageError("no command given", hint=f"{PROGRAM} doctor --wiring -- COMMAND")
        checks += _check_wiring(argv)
    broken = any(check.status == "fail" for check in checks)
    if as_json:
        listed = [asdict(check) for check in checks]
        whole = {"ok": not broken, "formats": FORMATS, "checks": listed, "tier": tier}
        answers = {metric: str(answer) for metric, answer in measured.items()}
        echo_json(whole | {"metrics": answers} | _probe_facts(probed))
    else:
        print_checks(checks)
        _print_metrics(measured, bool(argv))
    return int(broken)


def check_job(argv: tuple[str, ...]) -> tuple[list[Check], ProbeCheck | None]:
    """Check the command, its script and its Python; the second result is that of the probe."""
    _, reason = environment.forecast_tier(argv)
    if shutil.which(argv[0]) is None:
        return [Check("command", "fail", f"{argv[0]}: command not found")], None
    if reason is not None:
        return [Check("command", "note", f"no probe: {reason}")], None
    interpreter = find_interpreter(argv)
    checks = [_check_script(argv, f"its Python: {interpreter}")]
    if checks[0].status == "ok":
        facts = inspect_script(script_of(argv), argv)
        good, text = facts.check_resumability()
        checks.append(Check("checkpoints", "ok" if good else "note", text))
    with progress_line(
        "the job's Python, its torch, and the probe on a tiny model", is_counted=False
    ):
        probed = check_probe(interpreter)
    return [*checks, *probe_checks(probed, world_size(argv, os.environ))], probed


def _check_script(argv: tuple[str, ...], text: str) -> Check:
    """Check that the script of the command exists."""
    script = script_of(argv)
    if script is not None and not Path(script).exists():
        return Check("command", "fail", f"{script}: no such file; {text}")
    return Check("command", "ok", text)


def _check_machine(runs: Path) -> Iterator[Check]:
    """Check this machine."""
    policies = shipped.shipped_names("policies")
    yield Check("supervise", "ok", f"{__version__} on Python {python_version()}")
    yield Check("formats", "ok", ", ".join(f"{name} {text}" for name, text in FORMATS.items()))
    yield Check(
        "policies",
        "ok" if "nano" in policies else "fail",
        f"{', '.join(policies) or 'none'} in {shipped.shipped_folder('policies')}",
    )
    yield _shared_memory()
    yield _run_directory(runs)
    if shutil.which("py-spy"):
        yield Check("py-spy", "ok", f"{shutil.which('py-spy')}{_ptrace()}")
    else:
        yield Check(
            "py-spy", "note", "not installed (optional): the probe reports the stacks of a hung job"
        )


def _check_health(argv: tuple[str, ...]) -> Iterator[Check]:
    """Look for faults of this host, as before a job is started again on it."""
    statuses = {host_health.BAD: "fail", host_health.UNDECIDED: "note"}
    settings = HostHealth(matmul=MATMUL_S)
    gate = HealthGate(lambda: settings, os.environ, lambda: None, failure_classes)
    is_program = bool(argv) and shutil.which(argv[0]) is not None
    start = Start(Path.cwd(), python=find_interpreter(argv) if is_program else None)
    for finding in gate.check_host(start, HEALTH_S, alive=False):
        yield Check(finding.check, statuses.get(finding.verdict, "ok"), finding.text)


def _check_wiring(argv: tuple[str, ...]) -> Iterator[Check]:
    """Let the job make its first steps, observed, and return what the rules say of its wiring."""
    with (
        tempfile.TemporaryDirectory(prefix="supervise-wiring-") as folder,
        progress_line(f"the first {WIRING_STEPS} steps of the job", is_counted=False),
    ):
        spec = ArmSpec(
            name="job",
            argv=argv,
            cwd=Path.cwd(),
            out=Path(folder, "out"),
            steps=WIRING_STEPS,
            warmup=0,
            policy="nano",
            options=["--mode", "observe"],
            limit_s=WIRING_S,
        )
        outcome = run_arm(spec, Path(folder), os.environ)
        rows = list(read_rows(outcome.run))
        records = list(read_audit(outcome.run.audit_path))
        sent = [r["data"]["message"] for r in records if r["kind"] == "notify_intent"]
        messages = [m for m in sent if str(m["facts"].get("rule", "")).startswith("wiring.")]
    for message in messages:
        yield Check("wiring", "fail", f"{message['title']}; {message['next']}")
    bad = [row.step for row in rows if not math.isfinite(row.values.get(LOSS, 0.0))]
    if bad:
        text = f"NaN or Inf in {len(bad)} of {len(rows)} steps, first in step {bad[0]}"
        yield Check("loss", "fail", text)
    if len(rows) < LEAST_STEPS:
        yield Check("wiring", "note", f"{len(rows)} steps were seen, {LEAST_STEPS} are needed")
    elif not messages:
        yield Check("wiring", "ok", f"no fault of it in {len(rows)} steps")


def _shared_memory() -> Check:
    """Allocate a segment as the probe does; a sparse file would not prove that the space exists."""
    root = environment.shared_memory_base(os.environ)
    try:
        slots = environment.fitting_slots(root, SLOTS)
        size = slots * environment.SLOT_BYTES
        with tempfile.NamedTemporaryFile(dir=root, prefix="supervise-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        free = shutil.disk_usage(root).free
    except OSError as error:
        return Check("shared memory", "fail", f"{root}: {error.strerror}; the probe cannot run")
    text = f"{root}: {free / 1e6:,.0f} MB free, a rank takes {size / 1e6:.1f} MB"
    if slots < SLOTS:
        return Check("shared memory", "note", f"{text}; low: {slots} frames per rank, not {SLOTS}")
    return Check("shared memory", "ok", text)


def _run_directory(runs: Path) -> Check:
    """Write into the run directory, or its first parent that exists."""
    directory = runs.absolute()
    while not directory.exists():
        directory = directory.parent
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
    except OSError as error:
        return Check("run directory", "fail", f"cannot write in {directory}: {error.strerror}")
    return Check("run directory", "ok", f"{runs.absolute()} is writable")


def _ptrace() -> str:
    """Return a note if py-spy cannot read a process that is not its child."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    limited = scope.exists() and scope.read_text().strip() != "0" and os.geteuid() != 0
    return "; needs root here (kernel.yama.ptrace_scope)" if limited else ""


def _probe_facts(check: ProbeCheck | None) -> dict[str, Any]:
    """Return the metrics, the cost and the status of the probe check."""
    if check is None:
        return {"seen": [], "probe_s": None, "status": {}}
    cost = median(check.cost_s) if check.cost_s else None
    return {"seen": sorted(announced_metrics(check)), "probe_s": cost, "status": check.status}


def probe_checks(check: ProbeCheck, world: int | None) -> Iterator[Check]:
    """Yield a check per stage of the probe check."""
    if not check.lines:
        yield Check("python", "fail", check.error)
        return
    version = tuple(int(part) for part in check.lines[0].split("."))
    old = version < OLDEST_PROBE
    text = f"{check.lines[0]}{', but the probe needs 3.9' if old else ''}"
    yield Check("python", "fail" if old else "ok", text)
    if len(check.lines) == 1:
        missing = check.error.startswith("ModuleNotFoundError: No module named 'torch'")
        text = (
            "not installed; without torch only exit, output and signals are watched"
            if missing
            else check.error
        )
        yield Check("torch", "note" if missing else "fail", text)
        return
    yield Check("torch", "ok", check.lines[1])
    if not check.names:
        reason = check.error if check.entered else "PYTHONPATH does not reach the job's Python"
        yield Check("probe", "fail", f"no report: {reason}")
        return
    if "trained" not in check.lines:
        yield Check("probe", "fail", f"training ended early: {check.error}")
        return
    off = [
        f"{k} {state}" for k, state in check.status.get("collectors", {}).items() if state != "on"
    ]
    text = f"{len(check.names)} metrics in {STEPS} steps of a tiny model"
    yield Check("probe", "note" if off else "ok", "; ".join([text, *off]))
    if check.cost_s:
        yield Check("cost", "ok", _cost(check.cost_s))
    yield _rollback(str(check.status.get("rollback", "unknown")), world)


def _cost(spent: list[float]) -> str:
    return (
        f"{median(spent) * 1e6:.0f} us of CPU per step without samples on this machine; it grows "
        "with the number of weights"
    )


def _rollback(status: str, world: int | None) -> Check:
    """Return what prevents a rollback, as far as it is known before the job runs."""
    if world is not None and world > 1:
        return Check("rollback", "note", f"not available with {world} ranks")
    if status != "ready":
        return Check("rollback", "note", status)
    ranks = "" if world == 1 else " with a single rank"
    return Check("rollback", "ok", f"ready in mode enforce{ranks}")


def print_checks(checks: list[Check]) -> None:
    """Print a line for each check."""
    colours = {"ok": "green", "note": "yellow", "fail": "red"}
    for check in checks:
        click.secho(f"{check.status:4}", fg=colours[check.status], nl=False)
        echo(f"  {check.name:14} {check.detail}")


def _print_metrics(measured: dict[str, Availability], requested: bool) -> None:
    if not requested:
        echo("      next: supervise doctor -- COMMAND also checks the job's Python")
        return
    groups: dict[Availability, list[str]] = {}
    for metric, answer in measured.items():
        groups.setdefault(answer, []).append(metric)
    if len(groups) == 1:
        echo("", f"no metrics per step: {next(iter(groups)).text}")
        return
    echo("", "intervals are defaults; `sampling` in a policy changes them")
    for section in Section:
        answers = {answer: ids for answer, ids in groups.items() if answer.section == section}
        if answers:
            echo("", section)
        for answer, ids in answers.items():
            _list(answer.text, ids, apart=len(answers) > 1 or answer not in (ALWAYS, REPORTED))


def _list(answer: str, ids: list[str], apart: bool) -> None:
    """Print the ids under their answer."""
    if apart:
        echo(f"  {answer or 'always'}")
    indent = "    " if apart else "  "
    wrapped = textwrap.TextWrapper(
        98, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    echo(*wrapped.wrap(", ".join(ids)))


DEFAULT_FILE = Path("supervise.yaml")
EXAMPLE = {"checkpoints": {"glob": ["out/*.pt"]}, "relaunch": {"args": ["--resume={checkpoint}"]}}
WAYS = "observe | shadow | approve | enforce"


@click.command(name="init", cls=JobCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "-p",
    "--policy",
    "base",
    metavar="NAME",
    help="Shipped policy to extend. Default: nano; large with several ranks.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=DEFAULT_FILE,
    metavar="FILE",
    help="File to write; it must not exist yet. Default: supervise.yaml.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def init_command(base: str | None, out: Path, as_json: bool, argv: tuple[str, ...]) -> int:
    """Write a policy for COMMAND, and check it.

    It extends a shipped policy. How the job resumes is read from its script and command; if neither
    shows it, the policy never restarts the job. Then policy, machine and command are checked as by
    `supervise doctor`, which runs the job's Python, but not the job.

    \b
    Examples:
      supervise init -- python train.py
      supervise init --policy medium --out policies/big.yaml -- python train.py

    Exit codes: 0 written; 1 a check failed (the file is still written, unless COMMAND or its script
    does not exist); 64 wrong usage, or the file exists.
    """
    from ..catalog import load_policy

    if not argv:
        raise UsageError("no command given", hint=f"{PROGRAM} init -- python train.py")
    name = base or ("nano" if world_size(argv, os.environ) == 1 else "large")
    if shipped.find_shipped("policies", name) is None:
        from ..catalog.diagnostics import did_you_mean

        hint = did_you_mean(name, shipped.shipped_names("policies"))
        raise UsageError(f"no shipped policy {name!r}", hint=hint)
    if out.exists():
        raise _exists(out)
    checks, _ = check_job(argv)
    if checks[0].status == "fail":  # a slip in the command: another one will be written for
        if as_json:
            echo_json({"ok": False, "policy": None, "checks": [asdict(check) for check in checks]})
            return 1
        print_checks(checks)
        echo("", f"{out} is not written: correct the command first")
        return 1
    facts = inspect_script(script_of(argv), argv)
    _write(out, "".join(f"{line}\n" for line in policy_lines(name, facts.recipe)))
    load_policy(out)
    broken = any(check.status == "fail" for check in checks)
    following = f"{PROGRAM} --policy {shlex.quote(str(out))} -- {shlex.join(argv)}"
    if as_json:
        listed = [asdict(check) for check in checks]
        echo_json({"ok": not broken, "policy": str(out), "checks": listed, "next": following})
        return int(broken)
    echo(f"{out}:")
    echo(*(f"  {line}" for line in out.read_text("utf-8").splitlines()), "")
    print_checks(checks)
    echo("", f"next: {following}")
    return int(broken)


def policy_lines(base: str, recipe: Recipe | None) -> Iterator[str]:
    """Yield the lines of a policy that extends `base`, the commented ones last."""
    from ..catalog import load_policy

    policy = load_policy(base)
    schema = shipped.shipped_folder("policies") / "policy.schema.json"
    yield f"# yaml-language-server: $schema={schema}"
    yield "version: supervise/v1"
    yield f"extends: {base}"
    yield f"mode: {policy.mode} # {WAYS}"
    if recipe is not None and recipe.works:
        yield f"job: # recognized as {recipe.name}{f'; {recipe.note}' if recipe.note else ''}"
        if recipe.glob:
            yield f"  checkpoints: {inline_yaml({'glob': [recipe.glob]})}"
        resume = {"args": [*recipe.args]} if recipe.resume == "args" else {"resume": recipe.resume}
        yield f"  relaunch: {inline_yaml(resume)}"
        if "restart" in policy.budgets:
            yield "  on_crash: restart # restart a crashed job, within the budget"
            yield "override:"
            remark = "restart a hung job from a verified checkpoint"
            yield f"  hang.stuck: {{run: restart-if-stuck}} # {remark}"
    else:
        note = f" {recipe.name}: {recipe.note}" if recipe else ""
        yield f"# How this job resumes is not known, so that nothing starts it again.{note}"
        yield f"# job: {inline_yaml(EXAMPLE)}"
    yield "# notify: {slack: {url_env: SLACK_URL, min_sev: SEV1}}"
    yield f"# remove: [data] # packs and rules: {PROGRAM} policy show {base}"


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def _exists(path: Path) -> UsageError:
    hint = f"{PROGRAM} policy check {shlex.quote(str(path))}, or --out another file"
    return UsageError(f"{path} exists, and is left as it is", hint=hint)
