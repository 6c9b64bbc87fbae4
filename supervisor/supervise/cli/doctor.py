"""`supervise doctor`: what will work here, found out by trying it.

Given a job's command it starts the job's interpreter, never the job: a few steps of a tiny model,
with the probe injected as in a run. What arrives then is what is listed; see
`_metric_availability.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from platform import python_version
from statistics import median
from typing import Any

import click

from .. import __version__
from ..app.launcher import SLOTS
from ..catalog.inventory import shipped
from ..job import environment, shared_memory
from ._job import JobCommand
from ._metric_availability import REPORTED, arrived, outlook, script_of, world_size
from ._probe_check import STEPS, Trial, attempt, find_interpreter

OLDEST_PROBE = (3, 9)

# How the answers about metrics are shown: a head, and which answers stand below it.
SECTIONS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("metrics in every frame", lambda answer: answer == "yes"),
    ("metrics now and then", lambda answer: answer.startswith("yes, ")),
    (
        "metrics that depend on the job",
        lambda answer: answer.startswith(("only", "every")) and answer != REPORTED,
    ),
    ("not here", lambda answer: answer.startswith("no: ")),
    (
        "where the job reports it: supervise_probe.report(id=number)",
        lambda answer: answer == REPORTED,
    ),
)


@dataclass
class Check:
    """One line: `ok`, `note` (works less well), `fail` (does not work)."""

    name: str
    status: str
    detail: str


@click.command(name="doctor", cls=JobCommand, context_settings={"allow_interspersed_args": False})
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
    tier, trial, measured = None, None, dict[str, str]()
    if argv:
        tier, reason = environment.tier(argv)
        world = world_size(argv, os.environ)
        found = shutil.which(argv[0])
        if found is None:
            checks.append(Check("command", "fail", f"{argv[0]}: command not found"))
        elif reason is not None:
            checks.append(Check("command", "note", f"tier {tier}, no probe: {reason}"))
        else:
            interpreter = find_interpreter(argv)
            checks.append(_command(argv, f"tier {tier}; its Python: {interpreter}"))
            trial = attempt(interpreter)
            checks += _judge(trial, world)
        measured = outlook(trial, reason, world)
    broken = any(check.status == "fail" for check in checks)
    if as_json:
        listed = [asdict(check) for check in checks]
        document = {"ok": not broken, "checks": listed, "tier": tier, "metrics": measured}
        click.echo(json.dumps(document | _told(trial)))
    else:
        _show(checks, measured, bool(argv))
    return int(broken)


def _command(argv: tuple[str, ...], text: str) -> Check:
    """Look for the script that the command names: a Python without it ends before any step."""
    script = script_of(argv)
    if script is not None and not Path(script).exists():
        return Check("command", "fail", f"{script}: no such file, so it ends before a step; {text}")
    return Check("command", "ok", text)


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
    root = shared_memory.base(os.environ)
    try:
        slots = shared_memory.slots(root, SLOTS)
        size = slots * shared_memory.SLOT_BYTES
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


def _told(trial: Trial | None) -> dict[str, Any]:
    """Return what the trial itself showed: the ids that came, and what the probe said."""
    if trial is None:
        return {"seen": [], "probe_s": None, "status": {}}
    cost = median(trial.cost_s) if trial.cost_s else None
    return {"seen": sorted(arrived(trial)), "probe_s": cost, "status": trial.status}


def _judge(trial: Trial, world: int | None) -> Iterator[Check]:
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
    if "trained" not in trial.lines:
        yield Check("probe", "fail", f"the trial ended before its last step: {trial.error}")
        return
    off = [f"{k} {how}" for k, how in trial.status.get("collectors", {}).items() if how != "on"]
    text = f"{STEPS} steps tried, {len(trial.names)} columns arrived"
    yield Check("probe", "note" if off else "ok", "; ".join([text, *off]))
    if trial.cost_s:
        yield Check("cost", "ok", _cost(trial.cost_s))
    yield _rollback(str(trial.status.get("rollback", "unknown")), world)


def _cost(spent: list[float]) -> str:
    return (
        f"{median(spent) * 1e6:.0f} us of CPU in a step without samples, on this machine as it is "
        "now; more with the number of weights"
    )


def _rollback(told: str, world: int | None) -> Check:
    """Tell what keeps a rollback from working, as far as that can be known before the job runs."""
    if world is not None and world > 1:
        return Check("rollback", "note", f"not in a job of {world} ranks")
    if told != "ready":
        return Check("rollback", "note", told)
    ranks = "" if world == 1 else " and a single rank"
    return Check(
        "rollback", "ok", f"ready, for a training loop that is a `while`{ranks}, in mode enforce"
    )


def _show(checks: list[Check], measured: dict[str, str], asked: bool) -> None:
    colours = {"ok": "green", "note": "yellow", "fail": "red"}
    for check in checks:
        click.echo(f"{click.style(f'{check.status:4}', colours[check.status])}  ", nl=False)
        click.echo(f"{check.name:14} {check.detail}")
    if not asked:
        click.echo("      supervise doctor -- COMMAND looks into a job's own Python too")
        return
    groups: dict[str, list[str]] = {}
    for metric, answer in measured.items():
        groups.setdefault(answer, []).append(metric)
    if len(groups) == 1:
        click.echo(f"\nno metrics of single steps: {next(iter(groups)).removeprefix('no: ')}")
        return
    click.echo("\nintervals are the defaults; `sampling` in a policy changes them")
    for head, belongs in SECTIONS:
        found = {answer: ids for answer, ids in groups.items() if belongs(answer)}
        if found:
            click.echo(f"\n{head}")
        for answer, ids in found.items():
            _list(answer, ids, apart=len(found) > 1 or answer not in ("yes", REPORTED))


def _list(answer: str, ids: list[str], apart: bool) -> None:
    """Write the ids under the words that are peculiar to them."""
    words = answer.removeprefix("yes, ").removeprefix("no: ")
    if apart:
        click.echo(f"  {words}")
    indent = "    " if apart else "  "
    click.echo(
        textwrap.fill(
            ", ".join(ids),
            98,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
    )
