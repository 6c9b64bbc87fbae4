"""`supervise demo`: inject a fault into a real training run and show the recovery.

Everything shown is what the ordinary commands print.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from .. import system
from ..catalog import shipped
from ..errors import UsageError
from ..report.incident_report import Status
from ..report.incident_views import DOCUMENT
from ..store import audit
from ..store.run_directory import RunDir
from ._output import echo

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

    Exit codes: 0 the fault was detected, contained and verified; 1 it was not; 64 no torch.
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
    document = json.loads((run / "incidents" / incident / DOCUMENT).read_text("utf-8"))
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
