"""How often the canary gate passes and fails candidates that are known; writes `canary.md`.

    python benchmarks/canary.py [--seeds 20] [--jobs 2] [--out benchmarks/.canary]

The example and two programs of the proving ground. Per seed a program trains a baseline and
candidates on the same batches, from other initializations: the same program (A/A), in half of the
seeds twice, which makes two A/A pairs more; one whose loss is 0.05 nat higher, and one with a tenth
of the learning rate. A run that has ended is not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from supervise.cli import invoke
from supervise.store import skim_run

HERE = Path(__file__).resolve().parent
PROGRAMS_OF_THE_GROUND = HERE / "proving" / "programs"


@dataclass(frozen=True)
class Program:
    """A job. `rate`: its option for the learning rate, and the value that it has."""

    name: str
    script: Path
    rate: tuple[str, float]
    options: tuple[str, ...] = ()


PROGRAMS = (
    Program(
        "the example",
        HERE.parent / "examples" / "nano" / "train.py",
        ("--lr", 2e-3),
        ("--checkpoint-every", "100000", "--threads", "1"),
    ),
    Program("lstm_sgd", PROGRAMS_OF_THE_GROUND / "lstm_sgd.py", ("--rate", 4.0)),
    Program("cnn_batchnorm", PROGRAMS_OF_THE_GROUND / "cnn_batchnorm.py", ("--rate", 0.05)),
)
ARMS = {  # initialization, shift in nats, factor of the learning rate
    "baseline": (0, 0.0, 1.0),
    "the same program (A/A)": (1, 0.0, 1.0),
    "the same program once more": (2, 0.0, 1.0),
    "loss +0.05 nat": (3, 0.05, 1.0),
    "a tenth of the learning rate": (4, 0.0, 0.1),
}
BASELINE, SAME, AGAIN, *WORSE = ARMS
VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "VOID")
STEPS, CALIBRATED, SEEDS = 300, 4, 3
METHOD = (
    "verdicts of `supervise canary compare` with its defaults (margin 0.03 nat, alpha 5 %, 50 "
    "steps of warm-up), after 300 steps. Both arms of a pair read the same batches and start from "
    "different weights. Each pair is in one comparison of a row; half of the A/A pairs share a run "
    "with another one. The A/A pairs that calibrate a comparison are those of the next four seeds. "
    "`3 seeds`: three pairs together, which need no calibration."
)


def folder(out: Path, program: Program, arm: str, seed: int) -> Path:
    """Return the directory of a run."""
    return out / program.script.stem / f"{list(ARMS).index(arm)}-{seed}"


def train(out: Path, program: Program, arm: str, seed: int) -> None:
    """Make a run, unless it is there."""
    run = folder(out, program, arm, seed)
    if (run / "audit.log").is_file() and skim_run(run / "audit.log").end is not None:
        return
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    init, shift, factor = ARMS[arm]
    option, rate = program.rate
    job = [sys.executable, str(HERE / "canary_job.py"), str(program.script), str(init), str(shift)]
    job += ["--seed", str(seed), "--steps", str(STEPS), option, str(rate * factor)]
    job += ["--out", str(run.with_suffix(".out")), *program.options]
    watch = [sys.executable, "-m", "supervise", "--policy", "observe", "--run-dir", str(run), "--"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # `jobs` at a time, each on a core of its own
    with run.with_suffix(".log").open("wb") as log:
        subprocess.run([*watch, *job], stdout=log, stderr=log, check=True, env=env)
    shutil.rmtree(run.with_suffix(".out"), ignore_errors=True)
    print(run, flush=True)


def compare(*argv: object) -> tuple[str, float]:
    """Return verdict and effect of `supervise canary compare`."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        invoke(["canary", "compare", *map(str, argv), "--json"])
    found = json.loads(text.getvalue())
    return found["verdict"], found["effect"]["mean"]


def pairs_of(arm: str, seeds: int) -> Iterator[tuple[str, str, int]]:
    """Yield the pairs of a candidate: the arm of the baseline, that of the candidate, the seed."""
    yield from ((BASELINE, arm, seed) for seed in range(seeds))
    if arm == SAME:
        for first in (BASELINE, SAME):
            yield from ((first, AGAIN, seed) for seed in range(seeds // 2))


def ways(
    out: Path, program: Program, arm: str, seeds: int
) -> Iterator[tuple[str, list[list[object]]]]:
    """Yield how candidates are judged, and the arguments of each comparison."""

    def pair(a: str, b: str, seed: int) -> list[object]:
        return [folder(out, program, a, seed), folder(out, program, b, seed)]

    pairs = list(pairs_of(arm, seeds))
    calibrated: list[list[object]] = []
    for a, b, seed in pairs:
        others = [(seed + n) % seeds for n in range(1, CALIBRATED + 1)]
        noise = [arg for n in others for arg in ("--calibrate", *pair(BASELINE, SAME, n))]
        calibrated.append([*pair(a, b, seed), *noise])
    yield "one pair", [pair(*one) for one in pairs]
    yield f"one pair, {CALIBRATED} A/A pairs of other seeds", calibrated
    threes = [
        pairs[at : at + SEEDS]
        for at in range(0, len(pairs) - SEEDS + 1, SEEDS)
        if len({seed for _, _, seed in pairs[at : at + SEEDS]}) == SEEDS
    ]
    yield f"{SEEDS} seeds", [[path for one in three for path in pair(*one)] for three in threes]


def rows(out: Path, program: Program, seeds: int) -> Iterator[str]:
    """Judge the runs of a program, and yield the rows of the table."""
    for arm in (SAME, *WORSE):
        for way, comparisons in ways(out, program, arm, seeds):
            found = [compare(*argv) for argv in comparisons]
            counts = Counter(verdict for verdict, _ in found)
            cells = " | ".join(str(counts[verdict]) for verdict in VERDICTS)
            low, high = min(e for _, e in found), max(e for _, e in found)
            yield f"| {program.name} | {arm} | {way} | {cells} | {low:+.3f} to {high:+.3f} |"


def table(out: Path, programs: Sequence[Program], seeds: int) -> str:
    """Judge all runs and return the page."""
    command = f"python benchmarks/canary.py --seeds {seeds}"
    lines = [
        "# The canary gate on known candidates",
        "",
        textwrap.fill(f"`{command}`: {METHOD}", 100, break_on_hyphens=False),
        "",
        f"| program | candidate | judged from | {' | '.join(VERDICTS)} | effect, nat |",
        f"|---|---|---|{'---|' * len(VERDICTS)}---|",
        *(row for program in programs for row in rows(out, program, seeds)),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Make what runs are missing, and the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--out", type=Path, default=HERE / ".canary")
    parser.add_argument("--only", action="append", help="programs, by the name of their script")
    args = parser.parse_args()
    if args.seeds <= CALIBRATED:
        parser.error(f"--seeds must be more than {CALIBRATED}")
    programs = [p for p in PROGRAMS if args.only is None or p.script.stem in args.only]
    out = args.out.absolute()
    wanted = [
        (program, arm, seed)
        for program in programs
        for seed in range(args.seeds)
        for arm in ARMS
        if arm != AGAIN or seed < args.seeds // 2
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda one: train(out, *one), wanted))
    page = table(out, programs, args.seeds)
    print(page)
    if args.only is None:
        (HERE / "canary.md").write_text(page)


if __name__ == "__main__":
    main()
