"""`supervise demo`: inject a fault into a real training run and show the recovery.

Everything shown is read from the run directory; the run starts through the ordinary command line.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..catalog.inventory import shipped
from ..errors import UsageError
from ..inputs import clock
from ..store import audit, history
from ..store.run_directory import RunDir

FAULT, FAULT_STEP, STEPS = "lr_spike", 150, 320
NOTICE_STEPS = 40  # the fault lasts 20 steps; a later incident has another cause
COLUMNS = 72
BARS = "▁▂▃▄▅▆▇█"
STYLES = {"fault": "red", "detected": "yellow", "decided": "cyan", "done": "cyan"}


@click.command(name="demo")
@click.option("--run-dir", type=click.Path(path_type=Path), metavar="D", help="Keep the run here.")
def command(run_dir: Path | None) -> int:
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
    path = run_dir or Path("runs") / f"demo-{clock.wall()[:19].replace(':', '')}"
    if (path / "run.json").exists():
        raise UsageError(f"{path} holds a run already", hint="use another --run-dir, or none")
    console = Console(highlight=False)
    train = shipped.folder("examples") / "nano" / "train.py"
    drill = f"{FAULT}@{FAULT_STEP}"
    job = [sys.executable, str(train), "--steps", str(STEPS), "--log-every", "25"]
    args = ["--policy", "nano", "--drill", drill, "--run-dir", str(path), "--"]
    args += [*job, "--out", str(path / "checkpoints")]
    console.print(Text(f"$ supervise {shlex.join(args)}", style="bold"))
    code = _supervise(*args)
    if not (path / "run.json").exists():
        return code  # `run` printed the error

    run = RunDir.open(path)
    records = list(audit.read(run.audit_path))
    recovered = _print_story(console, records, run)
    verified = True
    for args in (["audit", "verify", str(path)], ["replay", str(path)]):
        console.print(Text(f"\n$ supervise {shlex.join(args)}", style="bold"))
        verified &= _supervise(*args) == 0
    if code:
        console.print(f"[red]the job ended with exit code {code}[/]")
    _print_next(console, path, drill, job)
    return int(not (recovered and verified and code == 0))


def _supervise(*args: str) -> int:
    """Run a command line of ours on this terminal and return its exit code."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-m", "supervise", *args], env=environ) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue  # the child received it too, and waits for the job


def _print_story(console: Console, records: list[dict[str, Any]], run: RunDir) -> bool:
    """Print what was detected, decided and verified; return whether the run recovered."""
    story = Table.grid(padding=(0, 2))
    for what, record, text in _story(records):
        story.add_row(
            Text(what, style=STYLES.get(what, "green")), f"step {record['step']}", Text(text)
        )
    console.rule("what happened")
    console.print(story)
    losses = _losses(run)
    console.print("\ntraining loss by step; a new line after each rollback")
    for attempt, line in _sparks(losses):
        console.print(Text(f"  {attempt}  {line}"))
    incident = _incident(records)
    if incident is None:
        console.print("\n[red]the fault was not detected[/]")
        return False
    mine = [one for one in records if one.get("incident") == incident]
    kinds = {(one["kind"], one["data"].get("what")) for one in mine}
    band = next((one["data"]["band"] for one in mine if one["data"].get("band")), None)
    last = fmean(list(losses.values())[-25:])
    back = band is not None and last < band["limit"]
    if band is not None:
        reach = range(FAULT_STEP, FAULT_STEP + NOTICE_STEPS)
        worst = max(loss for (_, step), loss in losses.items() if step in reach)
        console.print(
            f"  loss {band['level']:.2f} before, {worst:.2f} at worst, "
            f"{last:.2f} over the last 25 steps"
        )
    answers = {
        "detected": True,
        "contained": ("verify", "passed") in kinds,
        "verified": ("incident", "closed") in kinds,
        "loss back in its band": back,
    }
    marks = (
        f"[{'green' if yes else 'red'}]{'yes' if yes else 'NO'}[/]" for yes in answers.values()
    )
    console.print("\n" + ", ".join(f"{a}: {m}" for a, m in zip(answers, marks, strict=True)))
    return all(answers.values())


def _story(records: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (stage, record, sentence) for each event of the recovery."""
    verbs: dict[str, str] = {}
    for one in records:
        data: Mapping[str, Any] = one.get("data") or {}
        what = data.get("what")
        if one["kind"] == "note" and what == "drill":
            yield "fault", one, one["reason"]
        elif one["kind"] == "incident" and what != "closed":
            yield "detected", one, one["reason"]
        elif one["kind"] == "state" and data.get("event") == "run":
            yield "decided", one, one["reason"].partition(": ")[0]
        elif one["kind"] == "intent":
            verbs[data["action"]["id"]] = data["action"]["verb"]
        elif one["kind"] == "commit":
            yield "done", one, _effect(verbs.get(data["action"]["id"], "?"), data["result"])
        elif one["kind"] == "verify" and what in ("passed", "failed"):
            yield ("contained" if what == "passed" else "failed"), one, one["reason"]
        elif one["kind"] == "incident":
            yield "verified", one, one["reason"]


def _effect(verb: str, result: Mapping[str, Any]) -> str:
    """Return the effect of an action as text."""
    if verb == "pause":
        return f"pause: after step {result.get('paused_step')}"
    if verb == "snapshot":
        return f"snapshot: evidence in {result.get('path')}"
    if verb == "rollback":
        return f"rollback: from step {result.get('from_step')} back to {result.get('step')}"
    if verb == "resume":
        return f"resume: paused for {result.get('held_s', 0.0):.1f} s in all"
    return verb


def _incident(records: list[dict[str, Any]]) -> str | None:
    """Return the id of the incident that the fault opened or joined."""
    reach = range(FAULT_STEP, FAULT_STEP + NOTICE_STEPS)
    for one in records:
        grew = one["kind"] == "incident" and one["data"].get("what") != "closed"
        if grew and one["step"] in reach:
            return str(one["incident"])
    return None


def _losses(run: RunDir) -> dict[tuple[int, int], float]:
    """Return the loss by (attempt, step), in the order of the frames."""
    return {
        (row.attempt, row.step): row.values["train_loss_raw"]
        for row in history.rows(run)
        if row.rank == 0 and "train_loss_raw" in row.values
    }


def _sparks(losses: Mapping[tuple[int, int], float]) -> Iterator[tuple[int, str]]:
    """Yield (attempt, line): a bar for every few steps, as high as their largest loss."""
    cells: dict[int, dict[int, float]] = {}
    for (attempt, step), loss in losses.items():
        column = step * COLUMNS // STEPS
        row = cells.setdefault(attempt, {})
        row[column] = max(row.get(column, loss), loss)
    finite = [v for row in cells.values() for v in row.values() if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    for attempt, row in cells.items():
        line = "".join(_bar(row.get(column), low, high) for column in range(max(row) + 1))
        yield attempt, line


def _bar(value: float | None, low: float, high: float) -> str:
    if value is None:
        return " "
    if not math.isfinite(value):
        return "!"
    return BARS[round((value - low) / max(high - low, 1e-9) * (len(BARS) - 1))]


def _print_next(console: Console, path: Path, drill: str, job: list[str]) -> None:
    """Print where the run is and which commands to try next."""
    where = shlex.quote(str(path))
    ours = Path(sys.executable).with_name("supervise")
    on_path = shutil.which("supervise") == str(ours) or not ours.exists()
    program = "supervise" if on_path else os.path.relpath(ours)
    console.print(f"\nthe run is in {where}; next:")
    for line in (
        f"{program} audit show {where}",
        f"{program} export {where} --csv --metrics train_loss_raw,learning_rate,grad_global_norm",
        f"{program} --policy nano --mode shadow --drill {drill} -- {shlex.join(job)}",
    ):
        console.print(Text(f"  {line}"), soft_wrap=True)
