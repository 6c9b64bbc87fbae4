"""Hundreds of commands to ranks that train, whose supervisor is killed meanwhile.

    python benchmarks/fenced_training.py [--shape ddp|fsdp2] [--ranks N] [--commands N] [--seed S]
                                         [--limit SECONDS]

The job is that of `ranks.py`, under torchrun and gloo; the commands are an operator's: `lr`,
`savepoint`, `rollback`, `pause` and `resume`, one after the other, in an order drawn from the seed.
After every fiftieth the supervisor is killed, and `supervise adopt` takes over.

`apart`: steps behind which two ranks of a replicated model hold other bits. `changed`: rollbacks
behind which a rank holds other bits than it held behind the step that it went back to. Both must be
0, and are of all ranks and all steps. `beyond`: rollbacks whose ranks were not at the same step.

Exit code 1 when one of them is not 0, not half of the commands were carried out, or not all were
given within `--limit` seconds: then those that were are judged. Each kill is printed with its time,
so that a slow machine can be told from a command without an answer.
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
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from ranks import JOB, REPLICAS

from supervise.store import read_audit

COMMANDS = ("lr", "lr", "savepoint", "rollback", "rollback", "pause")
KILL_EVERY = 50
ENDLESS = 10**6  # steps; the job is stopped before
SUPERVISE = (sys.executable, "-m", "supervise")
LIMIT_S = 1800.0
END_S = 60.0  # until a job that was stopped has to be over


class OverdueError(Exception):
    """The time is over; the message says what was waited for."""


class Training:
    """A job of several ranks, and whoever supervises it just now."""

    def __init__(self, folder: Path, shape: str, ranks: int, limit_s: float) -> None:
        self.run, self._folder, self._ranks = folder / "run", folder, ranks
        self._deadline_s = time.monotonic() + limit_s
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(ranks), str(JOB), shape, str(folder), str(ENDLESS)]
        run = ("run", "-q", "--policy", "nano", "--run-dir", str(self.run), "--", *torchrun)
        self._supervisor = self._start(*run)

    def _start(self, *args: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        out = (self._folder / "out.txt").open("ab")
        return subprocess.Popen([*SUPERVISE, *args], stdout=out, stderr=out, env=env)

    def wait_for_step(self, step: int) -> None:
        """Return once all ranks have made so many steps."""
        while min(len(rows) for rows in self.bits()) < step:
            if self._supervisor.poll() is not None:
                raise SystemExit((self._folder / "out.txt").read_text())
            if self._left_s() == 0.0:
                raise OverdueError(f"step {step} of all ranks")
            time.sleep(0.5)

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def order(self, *words: str) -> str:
        """Give a command, again while nobody supervises; return what came of it."""
        command = [*SUPERVISE, words[0], "--json", str(self.run), *words[1:]]
        for _ in range(30):
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=self._left_s()
                )
            except subprocess.TimeoutExpired as error:
                raise OverdueError(f"an answer to `{' '.join(words)}`") from error
            if done.stdout:
                return str(json.loads(done.stdout)["outcome"])
            time.sleep(1.0)
        raise SystemExit(done.stderr)

    def replace_supervisor(self) -> None:
        """Kill the supervisor, and let another one take over."""
        self._supervisor.send_signal(signal.SIGKILL)
        self._supervisor.wait()
        self._supervisor = self._start("adopt", str(self.run))

    def end(self) -> None:
        """Stop the job, by force where it does not end."""
        self._deadline_s = time.monotonic() + END_S
        with suppress(OverdueError, subprocess.TimeoutExpired):
            self.order("stop")
            self._supervisor.wait(self._left_s())
            return
        self._supervisor.terminate()  # passed on to the job
        try:
            self._supervisor.wait(END_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()

    def bits(self) -> list[dict[int, list[str]]]:
        """Return per rank, by step, the digests of its weights and moments."""
        found = []
        for rank in range(self._ranks):
            path = self._folder / f"bits.{rank}"
            lines = path.read_text().splitlines() if path.exists() else []
            rows = [line.split() for line in lines]
            found.append({int(row[0]): row[1:] for row in rows if len(row) == 3})
        return found


def judge(training: Training, shape: str) -> Counter[str]:
    """Compare what the ranks held, step by step, and behind each rollback."""
    found: Counter[str] = Counter(apart=0, changed=0, beyond=0)
    bits = training.bits()
    common = set.intersection(*map(set, bits))
    found["steps"] = len(common)
    if shape in REPLICAS:
        found["apart"] = sum(len({tuple(held[step]) for held in bits}) > 1 for step in common)
    for record in read_audit(training.run / "audit.log"):
        result = record["data"].get("result") or {} if record["kind"] == "commit" else {}
        if "from_step" not in result:
            continue
        found["rollbacks"] += 1
        back, at = result["step"], result["ack_step"]
        found["beyond"] += at not in common
        found["changed"] += sum(held.get(back) != held.get(at) for held in bits)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="ddp", choices=("ddp", "fsdp2"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--commands", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS")
    given = parser.parse_args()
    chance, outcomes, kills = random.Random(given.seed), Counter[str](), 0
    number, overdue, began_s = 0, "", time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder), given.shape, given.ranks, given.limit)
        try:
            training.wait_for_step(60)
            while number < given.commands:
                word = chance.choice(COMMANDS)
                words = ("lr", f"{chance.uniform(0.5, 1.0):.3f}") if word == "lr" else (word,)
                for order in (words, ("resume",)) if word == "pause" else (words,):
                    outcomes[training.order(*order)] += 1
                    number += 1
                if number // KILL_EVERY > kills:
                    kills = number // KILL_EVERY
                    training.replace_supervisor()
                    passed_s = time.monotonic() - began_s
                    print(f"{number} commands, {kills} killed, {passed_s:.0f} s", flush=True)
        except OverdueError as error:
            overdue = str(error)
        training.end()
        found = judge(training, given.shape)
    if overdue:
        print(
            f"not complete: {number} of {given.commands} commands in {given.limit:g} s, which ran "
            f"out before {overdue}; --limit allows more"
        )
    print(f"{given.shape}, {given.ranks} ranks, {number} commands, {kills} killed")
    print(f"outcomes: {dict(outcomes)}")
    print(f"found: {dict(found)}")
    wrong = found["apart"] or found["changed"] or found["beyond"]
    return int(bool(wrong) or bool(overdue) or 2 * outcomes["done"] < given.commands)


if __name__ == "__main__":
    sys.exit(main())
