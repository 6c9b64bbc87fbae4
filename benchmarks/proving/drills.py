"""Check that each drill moves the metric that it names, at its default size; writes `drills.md`.

    python benchmarks/proving/drills.py

Judged are the recorded runs of seed 0 whose drill has its default sizes; how long it lasts is no
size. A value is taken as its distance from the undisturbed run of the same seed: from the median of
its 17 samples around, so that a loss that falls makes no band wide. The band is of the rows around
the fault: 32 of the same run before it, and of the undisturbed run those and the rows after it. It
reaches over their range, and over six median absolute deviations on both sides. The metric has
moved when a value after the fault lies outside or is not finite. A fault that lasts is given until
it ends, any other one 30 rows. Exit code 1: a drill moves its metric in fewer than ten of the
programs in which it can act, and not in all of them.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grid import HEALTHY, PROGRAMS
from pyarrow import parquet

from supervise_probe import faults

HERE = Path(__file__).resolve().parent
RECORDINGS, TABLE = HERE / "recordings", HERE / "drills.md"
NO_SIZES = ("steps", "seed", "token", "rank")
BEFORE, AFTER, AROUND, SPREADS, ENOUGH = 32, 30, 17, 6.0, 10
TO_NORMAL = 1.4826  # from the median absolute deviation to the standard deviation
HEAD = """# What drills move

Written by `python benchmarks/proving/drills.py` from the recordings of seed 0; its docstring says
what counts as moved. `memory_creep` is not judged: growth of memory is measured over a minute, and
these programs are shorter. `same_batch`, `hang`, `crash`, `blackout` and `bad_checkpoint` have no
size. `data_order`, `eval_mismatch`, `guard_off` and `schedule_restart` came after these recordings.

| drill | metric | moved in | not in |
| --- | --- | --- | --- |
"""

Rows = Mapping[str, list[dict[str, Any]]]  # run -> its rows of rank 0


def is_default(drill: Mapping[str, Any]) -> bool:
    """Whether the sizes of a drill are its default ones; words are no sizes."""
    known = faults.fault_classes()[drill["fault"]].PARAMS
    sizes = {k: v for k, (v, _) in known.items() if k not in NO_SIZES and not isinstance(v, str)}
    return all(drill["params"][name] == value for name, value in sizes.items())


def has_moved(rows: Rows, name: str, twin: str, metric: str, drill: Mapping[str, Any]) -> bool:
    """Whether a metric left its band behind a fault."""
    row = drill["step"]
    end = row + max(AFTER, int(drill["params"].get("steps", 0)))

    def values(run: str, first: int, last: int) -> list[tuple[int, float]]:
        found = (each for each in rows[run] if first <= each["step"] < last)
        return [(r["step"], r[metric]) for r in found if r.get(metric) is not None]

    before, usual = values(name, row - BEFORE, row), values(twin, row - BEFORE, end)
    usual = [(step, value) for step, value in usual or before if math.isfinite(value)]
    if not usual:
        return False

    def distance(step: int, value: float) -> float:
        near = sorted(usual, key=lambda each: abs(each[0] - step))[:AROUND]
        return value - statistics.median(each for _, each in near)

    band = [distance(*each) for each in (*before, *usual)]
    reach = SPREADS * TO_NORMAL * statistics.median(map(abs, band))
    low, high = min(*band, -reach), max(*band, reach)
    return any(not low <= distance(*each) <= high for each in values(name, row, end))


def main() -> int:
    """Judge, print and write the table."""
    moved: dict[tuple[str, str], list[str]] = defaultdict(list)
    still: dict[tuple[str, str], list[str]] = defaultdict(list)
    for program in PROGRAMS:
        about = RECORDINGS / f"{program.name}.json"
        if program.kept_aside or program.healthy_only or not about.exists():
            continue
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for each in parquet.read_table(about.with_suffix(".parquet")).to_pylist():
            if each["rank"] == 0:
                rows[each["run"]].append(each)
        for name, run in json.loads(about.read_text()).items():
            drill = run["drill"]
            if not drill or run["seed"] or not is_default(drill):
                continue
            metric = faults.fault_classes()[drill["fault"]].moves(drill["params"])
            words = [f":{v}" for v in drill["params"].values() if isinstance(v, str)]
            which = f"{drill['fault']}{''.join(words)}", metric
            left = has_moved(rows, name, f"{HEALTHY}-{run['seed']}", metric, drill)
            for found, is_so in ((moved, left), (still, not left)):
                if is_so and program.name not in found[which]:
                    found[which].append(program.name)
    lines, bad = [], False
    for which in sorted({*moved, *still}):
        yes = moved[which]
        no = [name for name in still[which] if name not in yes]
        bad |= bool(no) and len(yes) < ENOUGH
        line = f"| `{which[0]}` | `{which[1]}` | {len(yes)} of {len(yes) + len(no)} "
        lines.append(f"{line}| {', '.join(no) or '–'} |")
    print("\n".join(lines))
    TABLE.write_text(HEAD + "\n".join(lines) + "\n")
    return bad


if __name__ == "__main__":
    sys.exit(main())
