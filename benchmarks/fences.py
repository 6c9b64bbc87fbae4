"""A thousand commands to four ranks, whose supervisor and whose ranks are killed meanwhile.

    python benchmarks/fences.py [--actions N] [--ranks N] [--seed S]
    python benchmarks/fences.py --idle     what a step pays while no command waits, `fence_cost.py`

The ranks are processes with the commands of a real probe over a real segment, in lockstep as by an
all-reduce each step, without torch; the supervisor is the part that fences. A hundred commands go
to one gang. At seeded moments the supervisor is killed, and the next one performs the open command
again under its key, as `adopt` does; in every fourth gang a rank is killed, and the gang with it.
Each command sets another number, so the ranks' own logs say what each of them did at which step.

`apart`: commands that two ranks carried out at different steps. `partial`: that some ranks of a
living gang carried out and others did not. `doubled`: that a rank carried out twice. All must be 0.
`wait`: how long a rank stood at the fence, in ms; `whole`: from the order to all answers.

Exit code 1 when one of the three is not 0, or fewer commands than asked for had an outcome.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fence_cost

from supervise.errors import ActionError
from supervise.runtime import Control, Segments

HERE = Path(__file__).resolve()
RANK = HERE.parents[1] / "tests" / "support" / "fenced_rank.py"
PER_GANG = 100
SCALE = 1e4  # no rate is multiplied by more than 100
STEP_S = 0.003
DEADLINE_S = 20.0
KILLED_AFTER_S = 0.0, 0.6  # a supervisor, from its first command on: some 50 commands


def supervise(folder: Path, commands: list[int]) -> None:
    """Give the commands, the open one first, and write down what became of each."""
    segments = Segments(folder / "shm", folder / "probe", time.monotonic_ns)
    job: Any = SimpleNamespace(returncode=None, tree=None)
    control = Control(job, segments, lambda *_: {}, lambda *_: {})
    segments.poll()
    control.resume_after_crash(None, None)
    results = os.open(folder / "results", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(**row: Any) -> None:
        os.write(results, (json.dumps(row) + "\n").encode())

    def give() -> None:
        for number in commands:
            write(began=number)
            args = {"value": number / SCALE, "rewarm_steps": 0}
            since = time.monotonic()
            try:
                seen = control.command("lr_scale", args, key=str(number), deadline_s=DEADLINE_S)
            except ActionError as error:
                write(number=number, error=str(error), inconsistent=error.inconsistent)
            else:
                whole_ms = (time.monotonic() - since) * 1e3
                write(number=number, wait_ms=seen["wait_ms"], whole_ms=whole_ms)

    giver = threading.Thread(target=give, daemon=True)
    giver.start()
    while giver.is_alive():
        segments.poll()
        control.run_pending_work(time.monotonic_ns())
        time.sleep(0.002)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return what the supervisors of a gang wrote down; a line that was cut short is left out."""
    path = folder / "results"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def run_gang(
    folder: Path, numbers: list[int], ranks: int, chance: random.Random, *, dies: bool
) -> dict[str, Any]:
    """Give `numbers` to one gang under one supervisor after the other; return what was seen."""
    for name in ("shm", "probe"):
        (folder / name).mkdir()
    argv = [sys.executable, str(RANK), str(folder), str(ranks), str(STEP_S), "{}"]
    gang = subprocess.Popen(argv, start_new_session=True)
    while len(list((folder / "shm").glob("*.seg"))) < ranks:
        time.sleep(0.02)
    fatal = chance.randrange(len(numbers)) if dies else len(numbers)  # commands before a rank dies
    kills, left = 0, numbers
    while len(numbers) - len(left) < fatal and left:
        one = subprocess.Popen([sys.executable, str(HERE), "--of", str(folder), *map(str, left)])
        given = len(rows_of(folder))
        while one.poll() is None and len(rows_of(folder)) == given:
            time.sleep(0.005)  # it gives no command yet
        try:
            one.wait(chance.uniform(*KILLED_AFTER_S))
        except subprocess.TimeoutExpired:
            one.send_signal(signal.SIGKILL)
            one.wait()
            kills += 1
        ended = {row["number"] for row in rows_of(folder) if "number" in row}
        left = [number for number in numbers if number not in ended]
    if left:
        pids = [int(path.name.split(".")[1]) for path in (folder / "shm").glob("*.seg")]
        os.kill(chance.choice(pids), signal.SIGKILL)
    else:
        time.sleep(0.2)  # whatever a rank would still do
    os.killpg(gang.pid, signal.SIGKILL)
    gang.wait()
    logs = [(folder / f"log.{rank}").read_text().split("\n") for rank in range(ranks)]
    return {"rows": rows_of(folder), "logs": logs, "kills": kills, "died": bool(left), "left": left}


def judge(seen: dict[str, Any], found: Counter[str]) -> None:
    """Count what the ranks of one gang did otherwise than the others."""
    done = [
        [(round(float(line.split()[2]) * SCALE), int(line.split()[0])) for line in log if line]
        for log in seen["logs"]
    ]
    steps = [dict(each) for each in done]
    found["doubled"] += sum(len(each) - len(dict(each)) for each in done)
    open_ones = set(seen["left"][:1])  # under way when a rank was killed: the gang died of it
    for number in {value for each in steps for value in each}:
        at = [each[number] for each in steps if number in each]
        found["apart"] += len(set(at)) > 1
        found["partial"] += len(at) < len(steps) and number not in open_ones
    ended = {row["number"]: row for row in seen["rows"] if "number" in row}
    found["carried out"] += sum("wait_ms" in row for row in ended.values())
    found["refused"] += sum("error" in row for row in ended.values())
    found["supervisors killed"] += seen["kills"]
    found["ranks killed"] += seen["died"]
    # What a supervisor has told as done was done, by all.
    found["partial"] += sum(
        "wait_ms" in row and any(n not in each for each in steps) for n, row in ended.items()
    )


def share(values: list[float], part: float) -> float:
    """Return the value that this part of them does not pass."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def main() -> int:
    if sys.argv[1:2] == ["--of"]:
        supervise(Path(sys.argv[2]), [int(each) for each in sys.argv[3:]])
        return 0
    parser = argparse.ArgumentParser()
    parser.add_argument("--actions", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--idle", action="store_true")
    wanted = parser.parse_args()
    if wanted.idle:
        return int(not fence_cost.report())
    chance, found = random.Random(wanted.seed), Counter[str]()
    rows: list[dict[str, Any]] = []
    given, gangs = 0, 0
    while given < wanted.actions:
        numbers = list(range(given + 1, min(given + PER_GANG, wanted.actions) + 1))
        with tempfile.TemporaryDirectory() as folder:
            seen = run_gang(Path(folder), numbers, wanted.ranks, chance, dies=gangs % 4 == 3)
        judge(seen, found)
        rows += [row for row in seen["rows"] if "wait_ms" in row]
        given += len(numbers) - len(seen["left"]) + bool(seen["left"])
        gangs += 1
    waits, wholes = ([row[name] for row in rows] for name in ("wait_ms", "whole_ms"))
    print(f"{given} commands to {wanted.ranks} ranks in {gangs} gangs, seed {wanted.seed}\n")
    for name in ("carried out", "refused", "supervisors killed", "ranks killed"):
        print(f"{name:20} {found[name]:6}")
    for name in ("apart", "partial", "doubled"):
        print(f"{name:20} {found[name]:6}")
    for name, values in (("wait ms", waits), ("whole ms", wholes)):
        numbers_of = "  ".join(f"{share(values, part):8.2f}" for part in (0.5, 0.99, 1.0))
        print(f"{name:20} {numbers_of}   median, p99, worst")
    return int(any(found[name] for name in ("apart", "partial", "doubled")))


if __name__ == "__main__":
    sys.exit(main())
