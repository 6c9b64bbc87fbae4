"""What supervision costs the job: step time with and without the probe, and one published frame.

    python benchmarks/overhead.py [--pairs 24] [--block 23]

Part 1 keeps two processes alive, the example under `supervise --policy nano` and the same without,
and lets them train by turns, a block of about a second each, the order changing every time. So both
see the same noise of the machine, the bare one holds nothing of ours, and the supervisor runs
beside as it does in life. The ratio is the median over pairs of blocks, its interval a bootstrap
over pairs. On a busy machine it cannot resolve one percent, which is why it is printed and the
probe's own CPU time (in its frames) is what must keep the promise.

Part 2 runs `publish.py` once per logger and round, the loggers by turns.

Exit code 1 when the probe takes more than its share.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from publish import LOGGERS

from supervise.report import receipt
from supervise.store import audit, history
from supervise.store.rundir import RunDir

HERE = Path(__file__).parent
JOB = [sys.executable, str(HERE / "step_job.py")]
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}
MAX_SHARE = 0.02  # of the step's CPU time, with defaults
MAX_OF_WANDB = 0.1  # of its CPU time on the calling thread
WARM_UP = 40  # steps of each process before the first block
SETTLE = 3  # steps at the start of a block that find cold caches: the other process ran


class Worker:
    """A process of `step_job.py`, idle until it is told to train."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = argv
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRON
        )

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Run so many steps; return (wall, CPU of the training thread) of each, in seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(steps, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"overhead.py: {' '.join(self.argv)} died")
        return [(wall, cpu) for wall, cpu in json.loads(line)]

    def close(self) -> None:
        """Let it end."""
        self.process.communicate(timeout=60)


def interval(ratios: Sequence[float], rounds: int = 4000) -> tuple[float, float, float]:
    """Return the median and its 95 % percentile-bootstrap interval."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return median(ratios), medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def step_time(pairs: int, block: int, run_dir: Path) -> bool:
    """Print part 1; return whether the probe keeps to its share."""
    under = [sys.executable, "-m", "supervise", "-q", "--policy", "nano", "--run-dir", str(run_dir)]
    workers = {"bare": Worker(JOB), "probed": Worker([*under, "--", *JOB])}
    for worker in workers.values():
        worker.train(WARM_UP)
    blocks: dict[str, list[list[tuple[float, float]]]] = {"bare": [], "probed": []}
    for pair in range(pairs):
        for name in ("bare", "probed") if pair % 2 else ("probed", "bare"):
            blocks[name].append(workers[name].train(block)[SETTLE:])
    for worker in workers.values():
        worker.close()

    print(
        f"step of examples/nano, {pairs} pairs of blocks of {block} steps (first {SETTLE} left out)"
    )
    print(f"{'':24}{'bare':>10}{'probed':>10}{'ratio':>9}   95 % interval")
    for column, title in enumerate(("wall, median ms", "thread CPU, median ms")):
        bare, probed = (
            [median(step[column] for step in steps) for steps in blocks[name]]
            for name in ("bare", "probed")
        )
        ratio, low, high = interval([b / a for a, b in zip(bare, probed, strict=True)])
        print(
            f"{title:24}{1e3 * median(bare):10.2f}{1e3 * median(probed):10.2f}"
            f"{ratio:9.4f}   {low:.4f} .. {high:.4f}"
        )

    run = RunDir.open(run_dir)
    own = [
        values["probe_self_time"]
        for _, _, step, _, values in history.frames(run)
        if step >= WARM_UP and (step - WARM_UP) % block >= SETTLE and "probe_self_time" in values
    ]
    acted = receipt.outcome(audit.read(run.audit_path))["actions"]
    if not own or acted:
        raise SystemExit(f"overhead.py: {len(own)} frames, {acted} actions; see {run_dir}")
    bare_cpu = fmean(cpu for steps in blocks["bare"] for _, cpu in steps)
    share = fmean(own) / bare_cpu
    print(
        f"probe's own CPU per step: median {1e3 * median(own):.2f} ms, mean {1e3 * fmean(own):.2f} "
        f"ms (with savepoints), worst {1e3 * max(own):.2f} ms, over {len(own)} steps"
    )
    return promise(f"the probe takes {share:.2%} of a step's CPU", share, MAX_SHARE)


def promise(sentence: str, value: float, limit: float) -> bool:
    """Print PASS or FAIL and return which."""
    kept = value <= limit
    print(f"{'PASS' if kept else 'FAIL'}  {sentence}; promised: at most {limit:.0%}")
    return kept


def publishing(rounds: int) -> None:
    """Print part 2."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in LOGGERS}
    missing: dict[str, str] = {}
    for _ in range(rounds):
        for name in LOGGERS:
            if name in missing:
                continue
            command = [sys.executable, str(HERE / "publish.py"), name]
            done = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, check=False)
            if done.returncode:
                missing[name] = (done.stderr.strip().splitlines() or ["?"])[-1]
            else:
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"\none frame of 32 metrics, microseconds, median of {rounds} rounds")
    print(f"{'':24}{'CPU p50':>10}{'CPU p99':>10}{'wall p50':>10}{'wall p99':>10}{'all CPU':>10}")
    columns = ("cpu_p50", "cpu_p99", "wall_p50", "wall_p99", "all")
    for name, results in found.items():
        if name in missing:
            print(f"{name:24}skipped: {missing[name]}")
            continue
        cells = (median(result[column] for result in results) for column in columns)
        print(f"{name:24}" + "".join(f"{cell:10.1f}" for cell in cells))
    print("CPU: of the calling thread; all CPU: with the logger's threads and ended processes")
    if missing:
        print("make bench installs what is missing")
    else:
        ours, theirs = (
            median(result["cpu_p50"] for result in found[name])
            for name in ("supervise probe", "wandb offline")
        )
        promise(f"a frame costs {ours / theirs:.1%} of wandb's", ours / theirs, MAX_OF_WANDB)


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--block", type=int, default=23, help="steps; no multiple of 25")
    parser.add_argument("--rounds", type=int, default=3, help="of part 2; 0 leaves it out")
    args = parser.parse_args()
    import torch

    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores "
        f"({platform.machine()}), load {os.getloadavg()[0]:.1f}, one thread\n"
    )
    with tempfile.TemporaryDirectory(prefix="supervise-overhead-") as folder:
        kept = step_time(args.pairs, args.block, Path(folder) / "run")
    if args.rounds:
        publishing(args.rounds)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
