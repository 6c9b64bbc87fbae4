"""`supervise doctor`: what will work here, found out by trying it.

Given a job's command it starts the job's interpreter, never the job: four steps of a model of 300
weights, with the probe injected as in a run. What arrives then is what is listed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from platform import python_version

import click

from .. import __version__
from ..catalog import metrics, shipped
from ..job import environment, shm
from ._trial import Trial, attempt, find_interpreter
from .run import SLOTS

OLDEST_PROBE = (3, 9)

# Metrics that a job has or has not, whatever the machine.
DEPENDS = {
    "loss_scale": "only under a torch.amp.GradScaler",
    "input_time": "only where batches come from a DataLoader",
    "batch_fingerprint": "only where the batch passes a DataLoader or the model's own call",
    "forward_time": "only where the model is called as a torch.nn.Module",
    "tokens_per_update": "only where cross_entropy or nll_loss is called, or the job reports it",
    "tokens_seen": "only with tokens_per_update",
    "tokens_per_sec": "only with tokens_per_update",
}


@dataclass
class Check:
    """One line: `ok`, `note` (works less well), `fail` (does not work)."""

    name: str
    status: str
    detail: str


@click.command(name="doctor", context_settings={"allow_interspersed_args": False})
@click.option("--run-dir", type=click.Path(path_type=Path), metavar="D", help="Where runs will be.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(run_dir: Path | None, as_json: bool, argv: tuple[str, ...]) -> int:
    """Tell what will work on this machine and, given COMMAND, in the job's own Python.

    The job itself is not started. Exit code 1 when something is broken.

    \b
    Examples:
      supervise doctor
      supervise doctor -- torchrun --nproc-per-node 8 train.py
    """
    checks = [*_here(run_dir or Path("runs"))]
    tier, measured = None, dict[str, str]()
    if argv:
        tier, reason = environment.tier(argv)
        trial = None
        found = shutil.which(argv[0])
        if found is None:
            checks.append(Check("command", "fail", f"{argv[0]}: command not found"))
        elif reason is not None:
            checks.append(Check("command", "note", f"tier {tier}, no probe: {reason}"))
        else:
            interpreter = find_interpreter(argv)
            checks.append(Check("command", "ok", f"tier {tier}; its Python: {interpreter}"))
            trial = attempt(interpreter)
            checks += _judge(trial)
        measured = _measured(trial, reason)
    broken = any(check.status == "fail" for check in checks)
    if as_json:
        listed = [asdict(check) for check in checks]
        document = {"ok": not broken, "checks": listed, "tier": tier, "metrics": measured}
        click.echo(json.dumps(document))
    else:
        _show(checks, measured, bool(argv))
    return int(broken)


def _here(runs: Path) -> Iterator[Check]:
    """Look at this machine."""
    policies = shipped.names("policies")
    yield Check("supervise", "ok", f"{__version__} on Python {python_version()}")
    yield Check(
        "policies",
        "ok" if "nano" in policies else "fail",
        f"{', '.join(policies) or 'none'} in {shipped.folder('policies')}",
    )
    yield _shared_memory()
    yield _run_directory(runs)
    if shutil.which("py-spy"):
        yield Check("py-spy", "ok", f"{shutil.which('py-spy')}{_ptrace()}")
    else:
        yield Check(
            "py-spy", "note", "optional, not installed: stacks of a hung job come from its probe"
        )


def _shared_memory() -> Check:
    """Allocate a segment as the probe does; a sparse file would promise what is not there."""
    root = shm.base(os.environ)
    try:
        slots = shm.slots(root, SLOTS)
        size = slots * shm.SLOT_BYTES
        with tempfile.NamedTemporaryFile(dir=root, prefix="supervise-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        free = shutil.disk_usage(root).free
    except OSError as error:
        return Check("shared memory", "fail", f"{root}: {error.strerror}; the probe stays off")
    text = f"{root}: {free / 1e6:,.0f} MB free, a rank takes {size / 1e6:.1f} MB"
    if slots < SLOTS:
        return Check("shared memory", "note", f"{text}; scarce: {slots} frames, not {SLOTS}")
    return Check("shared memory", "ok", text)


def _run_directory(runs: Path) -> Check:
    """Write where the run directory, or its first parent that exists, is."""
    place = runs.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
    except OSError as error:
        return Check("run directory", "fail", f"cannot write in {place}: {error.strerror}")
    return Check("run directory", "ok", f"{runs.absolute()} can be written")


def _ptrace() -> str:
    """Say whether py-spy may look into a process that is not its child."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    limited = scope.exists() and scope.read_text().strip() != "0" and os.geteuid() != 0
    return "; needs root here (kernel.yama.ptrace_scope)" if limited else ""


def _judge(trial: Trial) -> Iterator[Check]:
    """Tell how far the trial came."""
    if not trial.lines:
        yield Check("python", "fail", trial.error)
        return
    version = tuple(int(part) for part in trial.lines[0].split("."))
    old = version < OLDEST_PROBE
    text = f"{trial.lines[0]}{', older than the probe can be (3.9)' if old else ''}"
    yield Check("python", "fail" if old else "ok", text)
    if len(trial.lines) == 1:
        missing = trial.error.startswith("ModuleNotFoundError: No module named 'torch'")
        text = "not there; a job without it is seen from outside only" if missing else trial.error
        yield Check("torch", "note" if missing else "fail", text)
        return
    yield Check("torch", "ok", trial.lines[1])
    if not trial.names:
        why = trial.error if trial.entered else "something keeps PYTHONPATH from the job's Python"
        yield Check("probe", "fail", f"it did not report: {why}")
        return
    off = [f"{k} {how}" for k, how in trial.status.get("collectors", {}).items() if how != "on"]
    text = f"four steps tried, {len(trial.names)} metrics arrived"
    yield Check("probe", "note" if off else "ok", "; ".join([text, *off]))
    rollback = str(trial.status.get("rollback", "unknown"))
    ready = rollback == "ready"
    text = "ready, for a training loop that is a `while`" if ready else rollback
    yield Check("rollback", "ok" if ready else "note", text)


def _measured(trial: Trial | None, reason: str | None) -> dict[str, str]:
    """Return for each metric `yes`, or why not, or on what it depends."""
    if trial is None:
        reason = reason or "the command cannot be started"
    elif not trial.names:
        reason = "there is no torch" if len(trial.lines) == 1 else "the probe did not report"
    if reason is not None:
        return dict.fromkeys(metrics.known(), f"no: {reason}")
    arrived = {re.sub(r"\.\d+$", ".<i>", name) for name in trial.names} if trial else set()
    return {
        metric: DEPENDS.get(metric, "yes" if metric in arrived else "no: it did not arrive")
        for metric in metrics.known()
    }


def _show(checks: list[Check], measured: dict[str, str], asked: bool) -> None:
    colours = {"ok": "green", "note": "yellow", "fail": "red"}
    for check in checks:
        click.echo(f"{click.style(f'{check.status:4}', colours[check.status])}  ", nl=False)
        click.echo(f"{check.name:14} {check.detail}")
    if not asked:
        click.echo("      supervise doctor -- COMMAND looks into a job's own Python too")
        return
    certain = [metric for metric, answer in measured.items() if answer == "yes"]
    if not certain:
        click.echo(f"\nno metrics of single steps: {next(iter(measured.values()))[4:]}")
        return
    click.echo("\nmetrics in every frame")
    click.echo(textwrap.fill(", ".join(certain), 98, initial_indent="  ", subsequent_indent="  "))
    click.echo("\nother metrics")
    for metric, answer in measured.items():
        if answer != "yes":
            click.echo(f"  {metric:18} {answer}")
