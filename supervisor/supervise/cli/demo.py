"""`supervise demo`: break a real training run on purpose, and show how it was saved.

Everything shown is read from the run directory that the run left behind; the run itself is started
through the command line, as anybody would.
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

FAULT, FAULT_STEP, STEPS = "lr_spike", 150, 400
NOTICE_STEPS = 40  # the fault lasts 20 steps; what is noticed later than this is something else
COLUMNS = 72
BARS = "▁▂▃▄▅▆▇█"
STYLES = {"broken": "red", "seen": "yellow", "decided": "cyan", "done": "cyan"}


@click.command(name="demo")
@click.option("--run-dir", type=click.Path(path_type=Path), metavar="D", help="Keep the run here.")
def command(run_dir: Path | None) -> int:
    """Train a small GPT, multiply its learning rate by 30 at step 150, and watch it being saved.

    Takes one to three minutes on one core and needs torch in this environment. Exit code 0 only if
    the fault was detected, contained and verified.

    \b
    Examples:
      supervise demo
      supervise demo --run-dir runs/demo
    """
    if find_spec("torch") is None:
        raise UsageError(
            f"the demo trains a model, and {sys.executable} has no torch",
            hint="pip install 'supervise-train[torch]', or in a checkout: make demo",
        )
    path = run_dir or Path("runs") / f"demo-{clock.wall()[:19].replace(':', '')}"
    if (path / "run.json").exists():
        raise UsageError(f"{path} holds a run already", hint="name another --run-dir, or none")
    console = Console(highlight=False)
    train = shipped.folder("examples") / "nano" / "train.py"
    drill = f"{FAULT}@{FAULT_STEP}"
    job = [sys.executable, str(train), "--steps", str(STEPS), "--log-every", "25"]
    words = ["--policy", "nano", "--drill", drill, "--run-dir", str(path), "--"]
    words += [*job, "--out", str(path / "checkpoints")]
    console.print(Text(f"$ supervise {shlex.join(words)}", style="bold"))
    code = _supervise(*words)
    if not (path / "run.json").exists():
        return code  # it has said why

    run = RunDir.open(path)
    records = list(audit.read(run.audit_path))
    saved = _tell(console, records, run)
    proved = True
    for words in (["audit", "verify", str(path)], ["replay", str(path)]):
        console.print(Text(f"\n$ supervise {shlex.join(words)}", style="bold"))
        proved &= _supervise(*words) == 0
    if code:
        console.print(f"[red]the job ended with exit code {code}[/]")
    _next(console, path, drill, job)
    return int(not (saved and proved and code == 0))


def _supervise(*words: str) -> int:
    """Run a command line of ours on this terminal and return its exit code."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-m", "supervise", *words], env=environ) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue  # it was told as well, and lets the job end first


def _tell(console: Console, records: list[dict[str, Any]], run: RunDir) -> bool:
    """Print what was seen, decided and verified; return whether the fault was dealt with."""
    story = Table.grid(padding=(0, 2))
    for what, record, text in _story(records):
        story.add_row(
            Text(what, style=STYLES.get(what, "green")), f"step {record['step']}", Text(text)
        )
    console.rule("what happened")
    console.print(story)
    losses = _losses(run)
    console.print("\ntraining loss, step by step; a new line where the run went back")
    for attempt, line in _sparks(losses):
        console.print(Text(f"  {attempt}  {line}"))
    incident = _incident(records)
    if incident is None:
        console.print("\n[red]the fault was not noticed[/]")
        return False
    about = [one for one in records if one.get("incident") == incident]
    kinds = {(one["kind"], one["data"].get("what")) for one in about}
    band = next((one["data"]["band"] for one in about if one["data"].get("band")), None)
    last = fmean(list(losses.values())[-25:])
    back = band is not None and last < band["limit"]
    if band is not None:
        console.print(
            f"  loss {band['level']:.2f} before, {max(_after_fault(losses)):.2f} at worst, "
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
    """Yield (kind, record, sentence) of all that a reader wants to know."""
    verbs: dict[str, str] = {}
    for one in records:
        data: Mapping[str, Any] = one.get("data") or {}
        what = data.get("what")
        if one["kind"] == "note" and what == "drill":
            yield "broken", one, one["reason"]
        elif one["kind"] == "incident" and what != "closed":
            yield "seen", one, one["reason"]
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
    """Say what an action came to."""
    if verb == "pause":
        return f"pause: held after step {result.get('paused_step')}"
    if verb == "snapshot":
        return f"snapshot: evidence in {result.get('path')}"
    if verb == "rollback":
        return f"rollback: from step {result.get('from_step')} back to {result.get('step')}"
    if verb == "resume":
        return f"resume: held for {result.get('held_s', 0.0):.1f} s in all"
    return verb


def _incident(records: list[dict[str, Any]]) -> str | None:
    """Return the id of the incident that the fault opened, or joined."""
    reach = range(FAULT_STEP, FAULT_STEP + NOTICE_STEPS)
    for one in records:
        grew = one["kind"] == "incident" and one["data"].get("what") != "closed"
        if grew and one["step"] in reach:
            return str(one["incident"])
    return None


def _losses(run: RunDir) -> dict[tuple[int, int], float]:
    """Return the loss by (attempt, step), in the order in which it was seen."""
    return {
        (attempt, step): values["train_loss_raw"]
        for rank, attempt, step, _, values in history.frames(run)
        if rank == 0 and "train_loss_raw" in values
    }


def _after_fault(losses: Mapping[tuple[int, int], float]) -> list[float]:
    reach = range(FAULT_STEP, FAULT_STEP + NOTICE_STEPS)
    return [loss for (_, step), loss in losses.items() if step in reach]


def _sparks(losses: Mapping[tuple[int, int], float]) -> Iterator[tuple[int, str]]:
    """Yield (attempt, line): a bar for each few steps, as high as their worst loss."""
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


def _next(console: Console, path: Path, drill: str, job: list[str]) -> None:
    """Print where the run is and what to try, as it can be typed here."""
    where = shlex.quote(str(path))
    ours = Path(sys.executable).with_name("supervise")
    on_path = shutil.which("supervise") == str(ours) or not ours.exists()
    program = "supervise" if on_path else os.path.relpath(ours)
    console.print(f"\nthe run is in {where}; now try")
    for line in (
        f"{program} audit show {where}",
        f"{program} export {where} --csv --metrics train_loss_raw,learning_rate,grad_global_norm",
        f"{program} --policy nano --mode shadow --drill {drill} -- {shlex.join(job)}",
    ):
        console.print(Text(f"  {line}"), soft_wrap=True)
