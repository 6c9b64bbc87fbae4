"""Whether a rank that stands still or falls behind is named, where, and when; writes `hangs.md`.

    python benchmarks/hangs.py [--only TEXT] [--keep FOLDER]

Each row is a job of `hangs_job.py` under torchrun, gloo and the policy `large`, one at a time, with
a webhook on this machine. What must be said stands beside the job. A message counts whose first
rank is the one in trouble and that says what it does and where, or what it is slow at; of a stopped
process, how to let it go on; `after` is the time, or the steps, from the trouble to that message,
`first` to the first of all. Exit code 1: no such message before the deadline.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deaths import leaves, receiver
from hangs_job import BEGINS, HANGS, Hang

HERE = Path(__file__).resolve()
JOB = "hangs_job.py"
TABLE = HERE.with_name("hangs.md")
START_S, END_S, LATE_S = 90.0, 60.0, 60.0  # LATE_S: behind the deadline, to show how late it is
POLICY = """\
version: supervise/v1
policy: hangs
extends: large
notify: {webhook: {url_env: HOOK}}
"""
SHOWN = 230  # characters of a message in the table


@dataclass(frozen=True)
class Told:
    """One message: seconds and steps since the trouble began, and all its texts."""

    after_s: float
    after: int
    title: str
    verdict: str
    text: str

    def names(self, rank: int) -> bool:
        """Return whether the first rank in it is this one."""
        found = re.search(r"\branks? (\d+)", f"{self.title} {self.verdict}")
        return found is not None and int(found[1]) == rank


def watch(name: str, hang: Hang, home: Path) -> list[Told]:
    """Run one job until its message has come or is late; return all messages of the trouble."""
    home.mkdir()
    shutil.copy(HERE.with_name(JOB), home)
    (home / "policy.yaml").write_text(POLICY)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(hang.ranks), JOB, name]
    words = ["--policy", "policy.yaml", "--run-dir", "run", "--", *torchrun]
    inherited = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    with receiver() as (url, received), (home / "out.txt").open("w") as out:
        env = {**inherited, "HOOK": url, "OMP_NUM_THREADS": "1"}
        supervise = subprocess.Popen(
            [sys.executable, "-m", "supervise", *words],
            cwd=home,
            env=env,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
        )
        pid = 0
        try:
            until = time.monotonic() + START_S
            while not (home / "began").exists() and time.monotonic() < until:
                time.sleep(0.05)
            began = json.loads((home / "began").read_text())
            pid, at = began["pid"], began["at"]
            if hang.sent:
                os.kill(pid, hang.sent)
            told: list[Told] = []
            while time.time() < at + hang.within_s + LATE_S:
                told = [message(body, at) for body in list(received) if body["received"] > at]
                if any(good(each, hang) for each in told):
                    break
                time.sleep(0.1)
        finally:
            end(supervise, pid)
    (home / "webhook.json").write_text(json.dumps(received, indent=1))
    return told


def end(supervise: subprocess.Popen[bytes], pid: int) -> None:
    """End the job, its rank in trouble first, which may not hear of it."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, signal.SIGKILL)
    if supervise.poll() is None:
        supervise.terminate()
    supervise.wait(END_S)


def message(body: dict[str, Any], at: float) -> Told:
    data = body["data"]
    text = " ".join(map(str, leaves(data)))
    title = data["title"]
    return Told(body["received"] - at, data["step"] + 1 - BEGINS, title, data["verdict"], text)


def good(told: Told, hang: Hang) -> bool:
    return told.names(hang.rank) and hang.says in told.text and hang.where in told.text


def row(hang: Hang, told: list[Told]) -> tuple[str, bool]:
    """Return a line of the table, and whether the message came in time."""
    found = next((each for each in told if good(each, hang)), None)
    named = any(each.names(hang.rank) for each in told)
    place = any(hang.where in each.text for each in told)
    limit = f"{hang.within} steps" if hang.within else f"{hang.within_s:.0f} s"
    shown = found or (told[0] if told else None)
    cells = [hang.does, str(hang.ranks), "yes" if named else "**no**"]
    cells.append(("yes" if place else "**no**") if hang.where else "–")
    cells += [amount(told[0], hang) if told else "never", amount(found, hang) if found else "never"]
    cells += [limit, words(shown) if shown else ""]
    in_time = found is not None and (
        found.after <= hang.within if hang.within else found.after_s <= hang.within_s
    )
    cells[5] = cells[5] if in_time else f"**{cells[5]}**"
    return f"| {' | '.join(cells)} |", in_time


def amount(told: Told, hang: Hang) -> str:
    return f"{told.after} steps" if hang.within else f"{told.after_s:.1f} s"


def words(told: Told) -> str:
    text = " ".join(f"{told.title}: {told.verdict}".removeprefix("inc-1: ").split())
    text = re.sub(r"\b(kill -CONT) \d+", r"\1 PID", text).replace("|", "\\|")
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def rows(home: Path, only: str) -> Iterator[tuple[str, bool]]:
    for name, hang in HANGS.items():
        if only in f"{name} {hang.does}":
            yield row(hang, watch(name, hang, home / name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows with this text")
    parser.add_argument("--keep", type=Path, help="folder for what the jobs write")
    asked = parser.parse_args()
    home = asked.keep or Path(tempfile.mkdtemp(prefix="supervise-hangs-"))
    home.mkdir(exist_ok=True)
    lines, good_ones = [], 0
    for line, in_time in rows(home, asked.only):
        lines.append(line)
        good_ones += in_time
        print(line, flush=True)
    text = "\n".join(
        [
            "# Ranks that stand still or fall behind\n",
            "Written by `python benchmarks/hangs.py`, whose docstring says what counts. Steps of",
            f"about 0.05 s; {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}. A stall is one",
            "after 120 s without a heartbeat; the evidence of all ranks may take 30 s more.\n",
            "| one rank is | of | named | its place | first | after | deadline | message |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
            f"\n{good_ones} of {len(lines)} are named with their place before the deadline.",
        ]
    )
    if not asked.only:
        TABLE.write_text(text + "\n", encoding="utf-8")
    if asked.keep is None:
        shutil.rmtree(home, ignore_errors=True)
    return 0 if good_ones == len(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
