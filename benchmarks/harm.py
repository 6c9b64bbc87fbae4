"""False alarms and delays of the kind `harm` on simulated noise; writes `harm.md`.

    python benchmarks/harm.py [--rows 1000000] [--jobs 2]

The loss is 2.4 and its spread 1.7 % of it, so that the margin of 2 % filters little. Rows are in
runs of 10 000: the start of a run is where the least is known. Delays are of a step of 4 or 8
spreads at a row, median and 85 % of 20 runs each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import accumulate
from multiprocessing import Pool
from pathlib import Path

import numpy as np

from supervise.core.model import BREACH
from supervise.detectors import Harm

LEVEL, SPREAD, RUN, FIRST = 2.4, 0.0408, 10_000, 300
STEPS, PLACES, SEEDS, PATIENCE = (4.0, 8.0), (60, 400, 2000), 20, 300
Noise = Callable[[np.random.Generator, int], np.ndarray]


def autoregression(share: float, part: float = 1.0) -> Noise:
    """Return noise whose values keep a share of the one before, times `part`."""
    own = np.sqrt(1.0 - share * share)

    def draw(rng: np.random.Generator, rows: int) -> np.ndarray:
        drawn = rng.standard_normal(rows).tolist()
        return part * np.array(list(accumulate(drawn, lambda x, e: share * x + own * e)))

    return draw


def white(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.standard_normal(rows)


def power_law(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Return white noise on a fall of 1.2 nats in the first 60 rows."""
    return white(rng, rows) + 4.8 / SPREAD / np.sqrt(np.arange(rows) + 10.0)


NOISES: dict[str, Noise] = {
    "white": white,
    "AR(1) 0.5": autoregression(0.5),
    "AR(1) 0.9": autoregression(0.9),
    "AR(1) 0.95": autoregression(0.95),
    "Student's t, 3 degrees": lambda rng, rows: rng.standard_t(3, rows) / np.sqrt(3.0),
    "smoothed at 0.9": autoregression(0.9, np.sqrt(0.1 / 1.9)),
    "two levels, 10 % at +6": lambda rng, rows: white(rng, rows) + 6.0 * (rng.random(rows) < 0.1),
    "white + AR(1) 0.98": lambda rng, rows: (
        (white(rng, rows) + autoregression(0.98)(rng, rows)) / np.sqrt(2.0)
    ),
    "a power law, steep at row 60": power_law,
}


def fed(
    rng: np.random.Generator, noise: Noise, rows: int, level: str, at: int, by: float
) -> list[int]:
    """Return the rows at which a detector begins to breach, in one run."""
    x = LEVEL + SPREAD * noise(rng, rows)
    x[at:] += SPREAD * by
    feed = Harm("loss", level=level).start().feed
    codes = [feed(value, step) & 3 for step, value in enumerate(x.tolist())]
    return [i for i, code in enumerate(codes) if code == BREACH and codes[i - 1] != BREACH]


def delays(noise: Noise, by: float, at: int) -> str:
    """Return median and 85 % of the rows until a step is established."""
    found = []
    for seed in range(SEEDS):
        begun = fed(np.random.default_rng(seed), noise, at + PATIENCE, "established", at, by)
        found.append(next((row - at for row in begun if row >= at), PATIENCE))
    ends = sorted(found)[SEEDS // 2], sorted(found)[SEEDS * 17 // 20]
    return " / ".join("–" if each == PATIENCE else str(each) for each in ends)


def row_of(given: tuple[str, int]) -> str:
    """Return the table's row of one noise."""
    name, rows = given
    noise, counts, early, used = NOISES[name], [0, 0], 0, 0.0
    for place, level in enumerate(("established", "suspected")):
        rng = np.random.default_rng(5)
        for _ in range(rows // RUN):
            began = time.process_time()
            found = fed(rng, noise, RUN, level, RUN, 0.0)
            used += time.process_time() - began
            counts[place] += len(found)
            early += sum(row < FIRST for row in found) if place == 0 else 0
    cells = [delays(noise, by, at) for by in STEPS for at in PLACES]
    cost = 1e6 * used / (2 * rows)
    return f"| {name} | {counts[0]} ({early}) | {counts[1]} | {' | '.join(cells)} | {cost:.1f} |"


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    head = ["noise", f"established (in the first {FIRST} rows of a run)", "suspected"]
    head += [f"{by:g} at {at}" for by in STEPS for at in PLACES] + ["µs a row"]
    lines = [
        "# Harm on simulated noise",
        "",
        f"Written by `python benchmarks/harm.py`, {given.rows}",
    ]
    lines[-1] += " rows of each noise; what the columns are is in its docstring."
    lines += ["", f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    with Pool(given.jobs) as pool:
        for line in pool.imap(row_of, [(name, given.rows) for name in NOISES]):
            print(line, flush=True)
            lines.append(line)
    Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
