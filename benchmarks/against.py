"""The cost of the probe in two trees, measured alternately in one run: `overhead.py --against REV`.

A turn is two jobs at once, each under the probe, the supervisor and the policy `nano` of one tree;
the job itself is that of this checkout. They train by turns, a few steps each (`--baton` of
`step_job.py`), so that both see the same noise of the machine, and who begins changes. Both trees
are copied to a temporary folder: what is edited meanwhile is not measured, nothing is left behind.

Two costs of a step: "own" is the CPU time that the probe tells in its frames, "added" what a step
with it takes longer than one without. Own time is precise and does not see calls that only pass
through the probe; added time sees all and is noisy. The ratio is the geometric mean of own time's
ratios over all turns, and the ratio of the sums for added time; the interval is a bootstrap over
turns. "not more expensive": own time's interval ends below 1 + margin, and that of added time does
not lie above it. "more expensive": one of them lies above. Else "inconclusive": more turns are
needed.
"""

from __future__ import annotations

import io
import math
import os
import random
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PARTS = ("probes", "supervisor", "policies", "runbooks")
DRAWS = 2000
FEWEST = 6  # turns; a bootstrap of fewer promises too much
ENOUGH = 4096  # bytes, more than a job has turns
NOT_MORE, MORE, INCONCLUSIVE = range(3)
VERDICTS = ("not more expensive", "more expensive", "inconclusive")


class Cost(NamedTuple):
    """Of one step, in seconds of CPU time."""

    own: float
    added: float


def checkout(rev: str, folder: Path) -> str:
    """Check out a commit's probe and supervisor into a folder; return the short name."""
    git = ["git", "-C", str(ROOT)]
    name = ["rev-parse", "--verify", "--quiet", "--short", f"{rev}^{{commit}}"]
    found = subprocess.run([*git, *name], capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"overhead.py: {rev} is not a commit of this repository")
    packed = subprocess.run([*git, "archive", rev, *PARTS], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return found.stdout.strip()


def own_ratio(turns: Sequence[tuple[Cost, ...]]) -> float:
    """Return how many times the own time of the second one the first one's is."""
    return math.exp(fmean(math.log(now.own / was.own) for now, was in turns))


def added_ratio(turns: Sequence[tuple[Cost, ...]]) -> float:
    """Return the same for added time, which may be below zero in a turn."""
    return sum(now.added for now, _ in turns) / sum(was.added for _, was in turns)


Ratio = Callable[[Sequence[tuple[Cost, ...]]], float]


def interval(turns: Sequence[tuple[Cost, ...]], ratio: Ratio) -> tuple[float, float]:
    """Return where 95 % of the ratios of drawn turns lie."""
    draw = random.Random(0)
    found = sorted(ratio(draw.choices(turns, k=len(turns))) for _ in range(DRAWS))
    return found[int(0.025 * DRAWS)], found[int(0.975 * DRAWS)]


def verdict(own: tuple[float, float], added: tuple[float, float], margin: float) -> int:
    """Return the verdict from the intervals of both ratios."""
    if max(own[0], added[0]) > 1 + margin:
        return MORE
    return NOT_MORE if own[1] <= 1 + margin else INCONCLUSIVE


def row(name: str, turns: Sequence[tuple[Cost, ...]], margin: float) -> int:
    """Print the row of one kind of job; return the verdict."""
    cells, intervals = "", []
    for column, ratio in enumerate((own_ratio, added_ratio)):
        low, high = interval(turns, ratio)
        intervals.append((low, high))
        was, now = (1e6 * median(each[place][column] for each in turns) for place in (1, 0))
        cells += f"{was:9.0f}{now:7.0f}{ratio(turns):8.3f}  {low:.3f} .. {high:.3f}"
    found = verdict(*intervals, margin) if len(turns) >= FEWEST else INCONCLUSIVE
    print(f"{name:20}{cells}  {VERDICTS[found]}", flush=True)
    return found


def turn(measure: Callable[..., Cost], trees: Sequence[Path], first: int) -> tuple[Cost, ...]:
    """Measure both trees at once, with one baton between the jobs."""
    with tempfile.TemporaryDirectory(dir=trees[0].parent) as folder:
        fifos = [Path(folder) / f"baton{at}" for at in range(2)]
        for fifo in fifos:
            os.mkfifo(fifo)
        ends = [os.open(fifo, os.O_RDWR) for fifo in fifos]

        def run(at: int) -> Cost:
            try:
                baton = ["--baton", str(fifos[at]), str(fifos[1 - at])]
                return measure(Path(folder) / f"run{at}", trees[at], *baton)
            finally:
                os.write(ends[1 - at], b"." * ENOUGH)  # the other one goes on alone

        os.write(ends[first], b".")
        try:
            with ThreadPoolExecutor(2) as pool:
                return tuple(pool.map(run, range(2)))
        finally:
            for end in ends:
                os.close(end)


def compare(
    rev: str, names: Sequence[str], turns: int, margin: float, measure: Callable[..., Cost]
) -> int:
    """Print the table; return the worst verdict, as an exit code.

    Args:
        measure: takes the name of the kind, a run directory that is not there yet, the tree, and
            further arguments of the job.
    """
    with tempfile.TemporaryDirectory(prefix="supervise-against-") as folder:
        trees = Path(folder) / "this-checkout", Path(folder) / "the-other"
        short = checkout(rev, trees[1])
        for part in PARTS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, trees[0] / part, ignore=ignored)
        head = "was    now   ratio  95 % interval"
        print(
            f"this checkout against {short}: CPU time of the probe per step, us, medians of "
            f"{turns} turns; margin {margin:.0%}\n"
            f"{'':20}{'own':>9}{'':29}{'added':>10}\n{'':20}{head:>40}{head:>38}"
        )
        found = []
        for name in names:
            costs = [turn(partial(measure, name), trees, number % 2) for number in range(turns)]
            found.append(row(name, costs, margin))
    worst = max(found, key=(NOT_MORE, INCONCLUSIVE, MORE).index)
    print(f"{VERDICTS[worst]} (exit code {worst})")
    return worst
