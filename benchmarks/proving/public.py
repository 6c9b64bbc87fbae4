"""False messages of a policy on public recordings and on simulated noise; writes `public.md`.

    python benchmarks/proving/public.py FOLDER [--policy nano] [--rows 100000] [--jobs 2]

FOLDER holds recordings that are not ours to copy: `logs` with its labels, `field` and `faults`, of
which the healthy ones are judged; no policy says which losses are adversarial. Every log is
judged as it is, and again with every 2nd and every 5th row kept, as a job that logs less often
would have written it. A label of which no row is left is not counted.

The noises are losses around 2.4 with a spread of 1.7 %, in runs of 10 000 rows; they have nothing
else to be judged by. `phi`: autocorrelation of the first order. `t3`: Student's t with 3 degrees of
freedom. `smoothed`: an exponential mean, 0.9. `two levels`: one row in ten is 6 spreads up.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from pyarrow import parquet

from supervise.lab import Label, Score, read_labels, run_backtest, score_alarms

TABLE = Path(__file__).with_name("public.md")
RECORDED = ("logs", "field", "field, adversarial and value losses", "small GPT, every metric")
RUN_ROWS = 10_000
LEVEL, SPREAD = 2.4, 0.04
HEAD = """# False messages on public recordings and on noise

Written by `python benchmarks/proving/public.py`; its docstring says what is judged. Nothing here
was harmed for good, so an action, SEV0 or SEV1 outside of a label is false.

| recordings, {policy} | rows | actions | SEV0, SEV1 | SEV2 per 100 000 rows | labels told |
| --- | ---: | ---: | ---: | ---: | ---: |
"""
Noise = Callable[[np.random.Generator, int], np.ndarray]


def autocorrelated(phi: float, then: Noise | None = None) -> Noise:
    """Return noise x[t] = phi x[t-1] + e[t] of unit variance; `then` is added to it."""

    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        steps = random.standard_normal(count) * (1 - phi * phi) ** 0.5
        values, last = np.empty(count), random.standard_normal()
        for row in range(count):
            values[row] = last = phi * last + steps[row]
        return values + then(random, count) if then else values

    return draw


def smoothed(random: np.random.Generator, count: int) -> np.ndarray:
    """Return an exponential mean of independent noise; its spread is 0.23."""
    return autocorrelated(0.9)(random, count) * (0.1 / (1 - 0.81) ** 0.5)


def two_levels(random: np.random.Generator, count: int) -> np.ndarray:
    """Return noise of which one row in ten is 6 spreads up."""
    return random.standard_normal(count) + 6.0 * (random.random(count) < 0.1)


def white(random: np.random.Generator, count: int) -> np.ndarray:
    """Return independent noise."""
    return random.standard_normal(count)


NOISES: dict[str, Noise] = {
    "independent": white,
    "phi 0.5": autocorrelated(0.5),
    "phi 0.9": autocorrelated(0.9),
    "phi 0.95": autocorrelated(0.95),
    "t3": lambda random, count: random.standard_t(3, count) / 3**0.5,
    "smoothed": smoothed,
    "two levels": two_levels,
    "independent + phi 0.98": autocorrelated(0.98, white),
}


def write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write a recording as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def thinned(logs: Path, every: int, folder: Path) -> list[tuple[str, set[int]]]:
    """Write each log with every so-manieth row; return the runs and the steps they keep."""
    kept = []
    for path in sorted(logs.rglob("*.parquet")):
        rows = parquet.read_table(path).to_pylist()
        if "run" in rows[0]:  # many curves in one file, without a label
            continue
        name = path.relative_to(logs).with_suffix("")
        write(folder / f"{name}.csv", rows[::every])
        kept.append((str(name), {int(row["step"]) for row in rows[::every]}))
    return kept


def noise(name: str, rows: int, folder: Path) -> None:
    """Write runs of one noise."""
    random = np.random.default_rng(list(NOISES).index(name))
    for run in range(max(1, rows // RUN_ROWS)):
        values = LEVEL + SPREAD * NOISES[name](random, min(rows, RUN_ROWS))
        steps = [{"step": row, "loss": float(value)} for row, value in enumerate(values)]
        write(folder / f"{run}.csv", steps)


def judged(paths: Sequence[Path], policy: str, jobs: int, labels: Sequence[Label] = ()) -> Score:
    """Back-test the recordings."""
    outcomes = [each for one in run_backtest(paths, [policy], {}, jobs, []) for each in one]
    return score_alarms(policy, outcomes, labels)


def scores(data: Path, policy: str, rows: int, jobs: int) -> Iterator[tuple[str, Score]]:
    """Yield the score of each group of recordings."""
    logs, field = data / "logs", data / "field"
    labels = read_labels(logs / "incidents.csv")
    yield "logs", judged([logs], policy, jobs, labels)
    for every in (2, 5):
        with tempfile.TemporaryDirectory() as place:
            steps = dict(thinned(logs, every, Path(place)))
            (Path(place) / "incidents.csv").write_bytes((logs / "incidents.csv").read_bytes())
            left = [
                label
                for label in labels
                if any(label.start <= step <= label.end for step in steps.get(label.run, ()))
            ]
            yield f"logs, every {every} rows", judged([Path(place)], policy, jobs, left)
    recordings = sorted(field.glob("*.csv.gz"))
    losses = [path for path in recordings if path.name.split("__")[0] not in ("gan", "rl")]
    yield "field", judged(losses, policy, jobs)
    others = [path for path in recordings if path not in losses]
    yield "field, adversarial and value losses", judged(others, policy, jobs)
    healthy = sorted((data / "faults").glob("healthy_*.csv.gz"))
    yield "small GPT, every metric", judged(healthy, policy, jobs)
    for name in NOISES:
        with tempfile.TemporaryDirectory() as place:
            noise(name, rows, Path(place))
            yield f"noise: {name}", judged([Path(place)], policy, jobs)


def line(name: str, found: Score) -> str:
    """Return a row of the table."""
    told = [sum(counts) for counts in zip(*found.kinds.values(), strict=True)]
    labels = f"{told[0]}/{told[1]}" if told else "-"
    notices = 100_000 * found.false_notices / found.rows
    return (
        f"| {name} | {found.rows} | {found.false_actions} | {found.false_pages} | {notices:.0f} "
        f"| {labels} |"
    )


def bound(rows: int, actions: int) -> str:
    """Return the most false actions that so many rows leave room for.

    Source: the rule of three for none; else the upper end of a Poisson interval, approximated.
    """
    most = 3.0 if not actions else actions + 1.64 * actions**0.5 + 2.0
    return (
        f"\n{actions} actions in {rows} recorded rows (each log once): at 95 %, at most "
        f"{1e6 * most / rows:.0f} in 1 000 000 rows.\n"
    )


def main() -> int:
    """Judge, print, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--policy", default="nano")
    parser.add_argument("--rows", type=int, default=100_000, help="of each noise")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--false", action="store_true", help="count the false ones by rule")
    options = parser.parse_args()
    text = HEAD.format(policy=options.policy)
    print(text, end="")
    seen: list[Score] = []
    for name, found in scores(options.folder, options.policy, options.rows, options.jobs):
        seen += [found] if name in RECORDED else []
        row = line(name, found)
        print(row, flush=True)
        text += row + "\n"
        if options.false:
            rules = [(one.severity, one.rule) for one in found.false]
            print({rule: rules.count(rule) for rule in dict.fromkeys(rules)})
            print([(one.run, one.step) for one in found.missed])
    text += bound(sum(one.rows for one in seen), sum(one.false_actions for one in seen))
    if options.policy == "nano":
        TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
