"""The cost of supervision for the job: steps with and without the probe, and one published frame.

    python benchmarks/overhead.py [--pairs 400] [--only KIND ...]
    python benchmarks/overhead.py --against REV [--turns 12] [--only KIND ...]

Part 1 trains each kind of job in one process under `supervise`, where the probe is switched on and
off for single steps, in pairs of random order (`step_job.py`). So both ways see the same noise of
the machine and lie in the same memory. What the probe adds is the interquartile mean of the
differences, its interval a bootstrap over pairs: 400 of them resolve a thousandth of a step on a
quiet machine, half a percent beside busy neighbours. Samples fall into few steps and so not into
that, but into the mean of the probe's own time: CPU time that it tells in its frames. Own time is
what must keep the promise. A bare step of the example takes at least 50 ms of CPU, since the number
of its sequences is chosen for that. Savepoints are left out: `savepoints.py` measures them.

The light set is measured beside its floor, the barest probe that Python can have (`floor.py`), in
the same process and the same rounds.

Part 2 publishes 1000 steps a second to a supervisor that reads them: none may be lost.

Part 3 runs `publish.py` once per logger and round, the loggers by turns.

Exit code 1 when the probe takes more than its share, or a frame is lost.

With `--against REV` none of that: the probe of this checkout, changes that are not committed
included, is compared with that of a commit (`against.py`).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import against
import yaml
from publish import LOGGERS
from step_job import STEADY, WARM_UP, enough_sequences

from supervise.core.model import Gap
from supervise.store import RunDir, read_audit, read_journal, read_rows

HERE = Path(__file__).parent
ROOT = HERE.parent
STEP_JOB = str(HERE / "step_job.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
SETS = ("attention", "activations", "routing", "routers", "weights", "gradients", "checksums")
MAX_OF_WANDB = 0.1  # of its CPU time on the calling thread
LEAST = 0.05  # seconds of CPU time of a bare step
CPU, WALL = 0, 1  # columns of what a step took
DRAWS = 1000  # of the bootstrap
NEVER = 1_000_000  # steps between savepoints: no job gets there
RATE, SECONDS = 1000, 30  # of part 2

Round = dict[str, list[float]]  # way -> CPU and wall time of its step, in seconds


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
    "nano, light set": Kind([STEP_JOB, "nano", "--light", "--floor"], most_us=150),
    "nano, all sampled": Kind([STEP_JOB, "nano"], sampled=True, share=0.01),
    "bfloat16 autocast": Kind([STEP_JOB, "bf16"]),
    "compiled, aot_eager": Kind([STEP_JOB, "compile"]),
    "Trainer": Kind([STEP_JOB, "trainer"]),
    "2 ranks, gloo": Kind([*TORCHRUN, STEP_JOB, "ddp"]),
}


def under(run_dir: Path, sampled: bool, tree: Path = ROOT) -> list[str]:
    """Return the supervisor's command line up to the job's own; the policy is that of the tree."""
    nano = tree / "policies" / "nano.yaml"
    policy = yaml.safe_load(nano.read_text(encoding="utf-8"))
    policy["savepoints"]["every"] = NEVER
    if not sampled:
        policy["sampling"] = dict.fromkeys(SETS, 0)
    path = run_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(policy), encoding="utf-8")
    flags = ["-q", "--policy", str(path), "--run-dir", str(run_dir)]
    return [sys.executable, "-m", "supervise", "run", *flags, "--"]


class Found(NamedTuple):
    """The measurements of a job: its rounds and own times, in seconds."""

    rounds: list[Round]
    own: list[float]
    floor_own: list[float]


def train(
    kind: Kind, pairs: int, sequences: int, run_dir: Path, tree: Path = ROOT, *more: str
) -> Found:
    """Run a job of this kind under the `supervise` of a tree, which also reads its own run."""
    size = ["--rounds", str(pairs), "--sequences", str(sequences), *more]
    environ = {**ENVIRON, "PYTHONPATH": f"{tree / 'probes'}{os.pathsep}{tree / 'supervisor'}"}

    def call(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
        if done.returncode:
            where = "" if tree == ROOT else f" with {tree.name}"
            said = done.stderr[-2000:]
            raise SystemExit(f"overhead.py: {' '.join(kind.argv)} failed{where}\n{said}")
        return done.stdout

    answer = call(*under(run_dir, kind.sampled, tree), sys.executable, *kind.argv, *size)
    export = ["-m", "supervise", "export", str(run_dir), "--csv", "--metrics", "probe_self_time"]
    own = [
        float(row["probe_self_time"])
        for row in csv.DictReader(call(sys.executable, *export).splitlines())
        if row["rank"] == "0" and WARM_UP < int(row["step"]) < WARM_UP + STEADY
        if row["probe_self_time"]
    ]
    # Not by `read_records`: records of another commit have the types of that one.
    log = read_audit(RunDir.open(run_dir).audit_path)
    acted = sum(record["kind"] == "commit" for record in log)
    if acted or not own:
        why = f"{acted} actions" if acted else "no own time in its frames"
        raise SystemExit(f"overhead.py: {' '.join(kind.argv)}: {why}")
    return Found(own=own, **json.loads(answer.splitlines()[-1]))


def extra(rounds: Sequence[Round], way: str, column: int) -> float:
    """Return the added time of a step over a bare one: the interquartile mean."""
    longer = sorted(each[way][column] - each["bare"][column] for each in rounds)
    quarter = len(longer) // 4
    return fmean(longer[quarter : len(longer) - quarter])


def ratio(rounds: Sequence[Round], way: str, column: int) -> float:
    """Return the ratio of a step's time to that of a bare one."""
    return 1 + extra(rounds, way, column) / median(each["bare"][column] for each in rounds)


def added(rounds: Sequence[Round], way: str) -> str:
    """Return the table cells of the added CPU time and wall time."""
    cells = ""
    for column in (CPU, WALL):
        draw = random.Random(0)
        drawn = (draw.choices(rounds, k=len(rounds)) for _ in range(DRAWS))
        found = sorted(ratio(each, way, column) for each in drawn)
        low, high = found[int(0.025 * DRAWS)], found[int(0.975 * DRAWS)]
        cells += f"{1e6 * extra(rounds, way, column):8.0f}{ratio(rounds, way, column):8.4f}"
        cells += f"  {low:.4f} .. {high:.4f}"
    return cells


def compare(name: str, pairs: int, sequences: int, run_dir: Path) -> bool:
    """Print one row of part 1, and the floor; return whether the probe is within its limit."""
    kind = KINDS[name]
    rounds, own, floor = train(kind, pairs, sequences, run_dir)
    bare = median(each["bare"][CPU] for each in rounds)

    def cells(own: list[float]) -> str:
        return f"{1e6 * median(own):8.0f}{1e6 * fmean(own):6.0f}{fmean(own) / bare:7.2%}"

    kept = fmean(own) / bare <= kind.share and 1e6 * median(own) <= kind.most_us
    print(
        f"{name:20}{1e3 * bare:7.1f}{cells(own)}{kind.share:6.1%}{added(rounds, 'probe')}"
        f"  {'PASS' if kept else 'FAIL'}",
        flush=True,
    )
    if floor:
        print(f"{'  its floor':27}{cells(floor)}{'':6}{added(rounds, 'floor')}")
        print(f"{'  light set / floor':27}{median(own) / median(floor):8.1f}")
    elif not kept:
        enough_ms = 1e3 * fmean(own) / kind.share
        print(f"{'  within its limit':20}{enough_ms:7.1f}  or more of a bare step")
    return kept


def steps(names: Sequence[str], pairs: int, sequences: int, folder: Path) -> bool:
    """Print part 1."""
    print(
        f"steps of each kind of job, {pairs} pairs; "
        f"{sequences} sequences or {64 * sequences} tokens of the example\n"
        f"{'':20}{'bare':>7}{'own time, us':>14}{'of':>7}{'':6}"
        f"{'CPU time added':>18}{'':16}{'wall time added':>19}\n"
        f"{'':20}{'CPU ms':>7}{'median':>8}{'mean':>6}{'CPU':>7}{'limit':>6}"
        f"{'us':>8}{'ratio':>8}  {'95 % interval':16}{'us':>8}{'ratio':>8}  95 % interval"
    )
    kept = [
        compare(name, pairs, sequences, folder / f"run{number}")
        for number, name in enumerate(names)
    ]
    print("mean: with samples; light set: without the norm of the update, 150 us")
    return all(kept)


def cost(size: tuple[int, int], name: str, run_dir: Path, tree: Path, *more: str) -> against.Cost:
    """Return what the probe of a tree costs one step of this kind, in seconds of CPU time.

    Args:
        size: pairs of steps, and sequences of a step.
        more: arguments of the job.
    """
    kind = KINDS[name]
    argv = [word for word in kind.argv if word != "--floor"]
    rounds, own, _ = train(kind._replace(argv=argv), *size, run_dir, tree, *more)
    return against.Cost(fmean(own) if kind.sampled else median(own), extra(rounds, "probe", CPU))


def gaps(run_dir: Path, seconds: int) -> bool:
    """Print part 2; return whether every frame arrived."""
    script = [sys.executable, str(HERE / "publish.py"), "--stream", str(RATE), str(seconds)]
    subprocess.run([*under(run_dir, True), *script], env=ENVIRON, check=True)
    run = RunDir.open(run_dir)
    lost = sum(1 for _ in read_journal(run.journal_path, only=(Gap,)))
    found = [row.step for row in read_rows(run)]
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
    parser.add_argument("--pairs", type=int, help="of steps, of each kind of job: 400; a turn: 50")
    parser.add_argument("--sequences", type=int, help="of a step: as many as take 50 ms; a turn: 2")
    parser.add_argument("--only", nargs="*", choices=list(KINDS), help="kinds of jobs; none: skip")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of part 2; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=2, help="of part 3; 0 leaves it out")
    parser.add_argument("--against", metavar="REV", help="compare with the probe of this commit")
    parser.add_argument("--turns", type=int, default=12, help="of both trees, for each kind of job")
    parser.add_argument("--margin", type=float, default=0.03, help="of the cost, to be no dearer")
    args = parser.parse_args()
    import torch

    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores "
        f"({platform.machine()}), load {os.getloadavg()[0]:.1f}, one thread\n"
    )
    if args.against:
        measure = partial(cost, (args.pairs or 50, args.sequences or 2))
        names = args.only or list(KINDS)[:3]
        sys.exit(against.compare(args.against, names, args.turns, args.margin, measure))
    names = list(KINDS) if args.only is None else args.only
    kept = True
    with tempfile.TemporaryDirectory(prefix="supervise-overhead-") as folder:
        if names:
            sequences = args.sequences or enough_sequences(LEAST)
            kept = steps(names, args.pairs or 400, sequences, Path(folder))
        if args.seconds:
            kept = gaps(Path(folder) / "stream", args.seconds) and kept
    if args.rounds:
        publishing(args.rounds)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
