"""What `skip_outliers` would skip, and what it is worth; writes `skips.md`.

    python benchmarks/proving/skips.py [--live]

From the recordings, by look-up: of the runs that bad batches (random, repeated, shuffled) harmed,
those whose first bad row is an outlier before its update; of the runs that something else harmed,
those with an outlier in the 30 rows from the fault on, which the probe batch has to tell apart; of
healthy and harmless runs, the rows that are outliers. Beside it the same of OLMo-core's rule: 6
standard deviations of the newest 128 rows, after 64, of the loss or the gradient norm.

`--live` also runs programs once more under `nano` with the safeguard, and prints final losses
beside those of the recordings of the same seed, where nobody acts (minutes).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grid import FAULTS, HARMLESS, HEALTHY, PROGRAMS, TOKENS, Program
from pyarrow import parquet
from score import RECORDINGS, harms

from supervise.store import RunDir, read_rows
from supervise_probe.safeguards.bad_steps import Limits, OutlierRule

TABLE = Path(__file__).with_name("skips.md")
WATCHED = 30  # rows from a fault on
SEED = 0  # of the live runs
LIVE = ("byte_gpt", "byte_gpt_noisy", "lstm_sgd", "hf_trainer")
POLICY = """version: supervise/v1
policy: skips
extends: nano
use: [probe]
safeguards: {skip_outliers: {}}
"""
HEAD = """# Skipping outliers

Written by `python benchmarks/proving/skips.py`, whose docstring says what is counted.

| program | bad batches told in their first row | OLMo-core | other harmed runs with an outlier \
| outliers in healthy and harmless rows | OLMo-core |
| --- | --- | --- | --- | --- | --- |
"""
HEAD_LIVE = """
Final losses against the undisturbed run of the same seed; `skipped`: updates.

| program | healthy: skipped | with it | one bad batch: skipped | with it | alone \
| 30 bad batches: skipped | with it | alone |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
Row = tuple[float, float | None]  # loss, gradient norm
Rule = Callable[[Sequence[Row]], set[int]]


@dataclass
class Tally:
    """Counts of one program."""

    bad: int = 0
    told: int = 0
    told_by_peer: int = 0
    others: int = 0
    outlying: int = 0
    rows: int = 0
    false: int = 0
    false_by_peer: int = 0


def ours(rows: Sequence[Row]) -> set[int]:
    """Return the rows that are outliers; what is skipped is not learned."""
    rule, found = OutlierRule(Limits()), set()
    for step, (loss, norm) in enumerate(rows):
        if math.isfinite(loss):
            known = norm if norm and math.isfinite(norm) else None
            if rule.explain_outlier(loss, known, follows=step - 1 in found):
                found.add(step)
            else:
                rule.applied(step, loss, known, usual=True)
    return found


def peers(rows: Sequence[Row]) -> set[int]:
    """Return what OLMo-core's SkipStepOptimizer would skip; it learns every row."""
    found: set[int] = set()
    for values in zip(*rows, strict=True):
        window: deque[float] = deque(maxlen=128)
        for step, value in enumerate(values):
            if value is None or not math.isfinite(value):
                continue
            if len(window) >= 64:
                limit = statistics.fmean(window) + 6.0 * statistics.stdev(window)
                found |= {step} if value > limit else set()
            window.append(value)
    return found


def series(program: Program) -> dict[str, list[Row]]:
    """Return loss and gradient norm of rank 0 by run; an absent loss is NaN."""
    names = ["run", "rank", "train_loss_raw", "grad_global_norm"]
    found: dict[str, list[Row]] = defaultdict(list)
    for run, rank, loss, norm in zip(
        *parquet.read_table(RECORDINGS / f"{program.name}.parquet", columns=names)
        .to_pydict()
        .values(),
        strict=True,
    ):
        if rank == 0:
            found[run].append((math.nan if loss is None else loss, norm))
    return found


def count(program: Program) -> Tally:
    """Look up what would be skipped in the recordings of a program."""
    known = json.loads((RECORDINGS / f"{program.name}.json").read_text())
    harm, tally = harms(program), Tally()
    for name, rows in series(program).items():
        fault, row = known[name]["fault"], known[name]["row"]
        mine, other = ours(rows), peers(rows)
        if fault == HEALTHY or fault in HARMLESS:
            tally.rows += len(rows)
            tally.false += len(mine)
            tally.false_by_peer += len(other)
        elif not harm[name].harmed:
            continue
        elif fault in TOKENS:
            tally.bad += 1
            tally.told += row in mine
            tally.told_by_peer += row in other
        else:
            tally.others += 1
            tally.outlying += bool(mine & {*range(row, row + WATCHED)})
    return tally


def line(name: str, tally: Tally) -> str:
    """Return a row of the first table."""
    return (
        f"| {name} | {tally.told}/{tally.bad} | {tally.told_by_peer}/{tally.bad} "
        f"| {tally.outlying}/{tally.others} | {tally.false} of {tally.rows} "
        f"| {tally.false_by_peer} of {tally.rows} |"
    )


def live(program: Program, fault: str, row: int) -> tuple[int, float]:
    """Run a program with the safeguard; return the updates skipped and the final loss."""
    with tempfile.TemporaryDirectory() as home:
        run, policy = Path(home) / "run", Path(home) / "skips.yaml"
        policy.write_text(POLICY)
        drill = [] if fault == HEALTHY else ["--drill", f"{FAULTS[fault]}@{row}"]
        script = str(Path(__file__).parent / "programs" / f"{program.name}.py")
        job = [sys.executable, script, f"--steps={program.steps}", f"--seed={SEED}"]
        watch = [sys.executable, "-m", "supervise", "-q", "--policy", str(policy)]
        done = subprocess.run(
            [*watch, "--run-dir", str(run), *drill, "--", *job],
            env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": home},
            cwd=home,
            capture_output=True,
            text=True,
            check=True,
        )
        frames = [row.values for row in read_rows(RunDir.open(run))]
        final = re.findall(r"^final_loss (\S+)", done.stdout, re.MULTILINE)[-1]
        return sum(bool(values.get("skipped_bad_steps")) for values in frames), float(final)


def live_lines(programs: Sequence[Program]) -> Iterator[str]:
    """Yield rows of the second table."""
    for program in programs:
        known = json.loads((RECORDINGS / f"{program.name}.json").read_text())
        healthy, cells = known[f"{HEALTHY}-{SEED}"]["final_loss"], []
        for fault in (HEALTHY, "random_batch", "random_batches"):
            about = known.get(f"{fault}-{SEED}")
            if about is None:
                cells += ["·"] * 3
                continue
            skipped, final = live(program, fault, about["row"])
            cells += [str(skipped), f"{final / healthy - 1:+.1%}"]
            if fault != HEALTHY:
                cells.append(f"{about['final_loss'] / healthy - 1:+.1%}")
        yield f"| {program.name} | {' | '.join(cells)} |"


def main() -> int:
    """Count, print, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--live", action="store_true", help="run programs, too")
    options = parser.parse_args()
    programs = [p for p in PROGRAMS if (RECORDINGS / f"{p.name}.parquet").exists()]
    text, total = HEAD, Tally()
    for program in programs:
        tally = count(program)
        text += line(program.name, tally) + "\n"
        for name, number in vars(tally).items():
            setattr(total, name, getattr(total, name) + number)
    text += line("all", total) + "\n"
    print(text, end="", flush=True)
    TABLE.write_text(text)
    if options.live:
        print(HEAD_LIVE, end="")
        for each in live_lines([p for p in programs if p.name in LIVE]):
            print(each, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
