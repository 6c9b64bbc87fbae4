"""What supervision costs the job: steps with and without the probe, and one published frame.

    python benchmarks/overhead.py [--pairs 12] [--block 18] [--only KIND ...]

Part 1, for each kind of job, keeps two processes alive, one under `supervise` and the same without,
and lets them train by turns, a block of about a second each, the order changing every time. So both
see the same noise of the machine, the bare one holds nothing of ours, and the supervisor runs
beside as it does in life. The ratio is the median over pairs of blocks, its interval a bootstrap
over pairs. On a busy machine it cannot resolve one percent, which is why it is printed and the
probe's own CPU time (in its frames) is what must keep the promise.

Part 2 publishes 1000 steps a second to a supervisor that reads them: none may be lost.

Part 3 runs `publish.py` once per logger and round, the loggers by turns.

Exit code 1 when the probe takes more than its share, or a frame is lost.
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
from typing import NamedTuple

from publish import LOGGERS

from supervise.core.values import Gap
from supervise.report import receipt
from supervise.store import audit, history, journal
from supervise.store.rundir import RunDir

HERE = Path(__file__).parent
POLICY = HERE.parent / "policies" / "nano.yaml"
STEP_JOB = str(HERE / "step_job.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}
SETS = ("attention", "activations", "routing", "weights", "gradients")
MAX_OF_WANDB = 0.1  # of its CPU time on the calling thread
WARM_UP = 100  # steps of each process before the first block: costs are judged every 64
SETTLE = 3  # steps at the start of a block that find cold caches: the other process ran
RATE, SECONDS = 1000, 30  # of part 2


class Kind(NamedTuple):
    """One kind of job.

    Attributes:
        argv: behind the interpreter.
        sampled: whether what is sampled is on, at its default intervals.
        share: of the step's CPU time, that the probe may take.
        most_us: that it may take at most, whatever the step.
    """

    argv: list[str]
    sampled: bool = False
    share: float = 0.005
    most_us: float = float("inf")


KINDS = {
    "nano": Kind([STEP_JOB, "nano"]),
    "nano, light set": Kind([STEP_JOB, "nano", "--light"], most_us=150),
    "nano, all sampled": Kind([STEP_JOB, "nano"], sampled=True, share=0.01),
    "bfloat16 autocast": Kind([STEP_JOB, "bf16"]),
    "compiled, aot_eager": Kind([STEP_JOB, "compile"]),
    "Trainer": Kind([STEP_JOB, "trainer"]),
    "2 ranks, gloo": Kind([*TORCHRUN, STEP_JOB, "ddp"]),
}


class Worker:
    """A process of `step_job.py`, idle until it is told to train."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = argv
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=ENVIRON,
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


def under(run_dir: Path, sampled: bool) -> list[str]:
    """Return the supervisor's command line up to the job's own."""
    policy = run_dir.with_suffix(".yaml")
    text = POLICY.read_text(encoding="utf-8")
    if not sampled:
        text += "\nsampling: {" + ", ".join(f"{name}: 0" for name in SETS) + "}\n"
    policy.write_text(text, encoding="utf-8")
    flags = ["-q", "--policy", str(policy), "--run-dir", str(run_dir)]
    return [sys.executable, "-m", "supervise", "run", *flags, "--"]


def compare(name: str, pairs: int, block: int, run_dir: Path) -> bool:
    """Print one row of part 1; return whether the probe keeps to its share."""
    kind = KINDS[name]
    job = [sys.executable, *kind.argv]
    workers = {"bare": Worker(job), "probed": Worker([*under(run_dir, kind.sampled), *job])}
    for worker in workers.values():
        worker.train(WARM_UP)
    blocks: dict[str, list[list[tuple[float, float]]]] = {"bare": [], "probed": []}
    for pair in range(pairs):
        for each in ("bare", "probed") if pair % 2 else ("probed", "bare"):
            blocks[each].append(workers[each].train(block)[SETTLE:])
    for worker in workers.values():
        worker.close()
    wall, low, high = interval(ratios(blocks, 0))
    cpu = median(ratios(blocks, 1))

    run = RunDir.open(run_dir)
    own = [
        values["probe_self_time"]
        for rank, _, step, _, values in history.frames(run)
        if rank == 0 and step > WARM_UP + SETTLE and "probe_self_time" in values
    ]
    acted = receipt.outcome(audit.read(run.audit_path))["actions"]
    if not own or acted:
        raise SystemExit(f"overhead.py: {len(own)} frames, {acted} actions; see {run_dir}")
    bare = median(cpu for steps in blocks["bare"] for _, cpu in steps)
    share, most = fmean(own) / bare, 1e6 * median(own)
    kept = share <= kind.share and most <= kind.most_us
    print(
        f"{name:22}{1e3 * bare:8.1f}{most:8.0f}{1e6 * fmean(own):8.0f}{share:9.2%}{kind.share:8.1%}"
        f"{cpu:9.4f}{wall:9.4f}   {low:.4f} .. {high:.4f}  {'PASS' if kept else 'FAIL'}",
        flush=True,
    )
    return kept


def ratios(blocks: dict[str, list[list[tuple[float, float]]]], column: int) -> list[float]:
    """Return probed / bare for each pair of blocks: of wall (0) or CPU time (1) of their steps."""
    bare, probed = (
        [median(step[column] for step in steps) for steps in blocks[name]]
        for name in ("bare", "probed")
    )
    return [b / a for a, b in zip(bare, probed, strict=True)]


def steps(names: Sequence[str], pairs: int, block: int, folder: Path) -> bool:
    """Print part 1."""
    print(
        f"steps of each kind of job, {pairs} pairs of blocks of {block} (first {SETTLE} left out)\n"
        f"{'':30}{'probe, us':>16}{'share of':>9}\n"
        f"{'':22}{'CPU ms':>8}{'median':>8}{'mean':>8}{'CPU':>9}{'limit':>8}"
        f"{'CPU x':>9}{'wall x':>9}   95 % interval"
    )
    kept = [
        compare(name, pairs, block, folder / f"run{number}") for number, name in enumerate(names)
    ]
    print("mean: with savepoints and samples; light set: without the norm of the update, 150 us")
    return all(kept)


def gaps(run_dir: Path, seconds: int) -> bool:
    """Print part 2; return whether every frame arrived."""
    script = [sys.executable, str(HERE / "publish.py"), "--stream", str(RATE), str(seconds)]
    subprocess.run([*under(run_dir, True), *script], env=ENVIRON, check=True)
    run = RunDir.open(run_dir)
    lost = sum(1 for _ in journal.read(run.journal_path, only=(Gap,)))
    found = [step for _, _, step, _, _ in history.frames(run)]
    whole = found == list(range(RATE * seconds))
    print(
        f"\n{len(found)} frames of 32 metrics at {RATE} steps/s: {lost} gaps  "
        f"{'PASS' if whole and not lost else 'FAIL'}"
    )
    return whole and not lost


def promise(sentence: str, value: float, limit: float) -> bool:
    """Print PASS or FAIL and return which."""
    kept = value <= limit
    print(f"{'PASS' if kept else 'FAIL'}  {sentence}; promised: at most {limit:.0%}")
    return kept


def publishing(rounds: int) -> None:
    """Print part 3."""
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
    if found["wandb offline"]:
        ours, theirs = (
            median(result["cpu_p50"] for result in found[name])
            for name in ("supervise probe", "wandb offline")
        )
        promise(f"a frame costs {ours / theirs:.1%} of wandb's", ours / theirs, MAX_OF_WANDB)


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--block", type=int, default=18, help="steps; no multiple of 25")
    parser.add_argument("--only", nargs="*", choices=list(KINDS), help="kinds of jobs; none: skip")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of part 2; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=2, help="of part 3; 0 leaves it out")
    args = parser.parse_args()
    import torch

    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores "
        f"({platform.machine()}), load {os.getloadavg()[0]:.1f}, one thread\n"
    )
    names = list(KINDS) if args.only is None else args.only
    kept = True
    with tempfile.TemporaryDirectory(prefix="supervise-overhead-") as folder:
        if names:
            kept = steps(names, args.pairs, args.block, Path(folder))
        if args.seconds:
            kept = gaps(Path(folder) / "stream", args.seconds) and kept
    if args.rounds:
        publishing(args.rounds)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
