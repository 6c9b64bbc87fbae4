"""What the probe's share costs in short steps: the recordings of `record.py --step-ms N`, scored.

    python benchmarks/proving/short_steps.py FOLDER=N [FOLDER=N ...] [--jobs 2]

Each run stands beside the committed one of the same program, fault and seed, which was made at the
program's own speed, before the probe had a share. The losses of both have to be the same, so that
the harm is the same, measured as in `score.py` with all that is committed.

The probe's allowance is its share times the step. Where a program's own steps were longer than N
ms, its share was less by as much. A busy machine lengthens steps after that was measured, so the
table has what the probe was allowed in fact, as ms of a step with the whole share. Writes
`short_steps.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from grid import HARMLESS, HEALTHY, PROGRAMS, Program
from record import SHARE
from score import RECORDINGS, Tally, add, harms, losses, outcomes_of

from supervise.lab import BacktestOutcome

TABLE = Path(__file__).with_suffix(".md")
POLICY = "nano"
COUNTS = (
    ("acted in time", lambda t: f"{t.acted}/{t.harmed}"),
    ("paged in time", lambda t: f"{t.paged}/{t.harmed}"),
    ("acted in healthy runs and harmless twins", lambda t: f"{t.false_actions}/{t.healthy}"),
    ("acted on faults without harm, or with little", lambda t: f"{t.needless_actions}/{t.spared}"),
    ("messages per 1000 rows not harmed", lambda t: f"{1000 * t.messages / max(1, t.rows):.1f}"),
)
HEAD = """# The proving ground in short steps

Written by `python benchmarks/proving/short_steps.py`, whose docstring says what is compared. Each
count is followed by that of the committed recordings of the same runs.

"""


@dataclass
class Length:
    """A program at one length of a step: what `nano` made of its runs, and of the committed ones.

    Attributes:
        allowed_ms: the step whose whole share the probe had.
        lost: harmed runs that only the committed recording had acted on in time, each with the
            rules that acted there. gained: the other way round.
        needless: runs without harm that were acted on only here.
        differ: runs with other losses than the committed ones; counted where they are healthy or
            a harmless twin, whose fault may have struck another value.
    """

    here: Tally = field(default_factory=Tally)
    committed: Tally = field(default_factory=Tally)
    allowed_ms: float = 0.0
    lost: list[str] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)
    gained: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)


def same(mine: list[float], other: list[float]) -> bool:
    """Whether two runs have the same losses; NaN is one value."""
    return len(mine) == len(other) and all(
        a == b or (a != a and b != b) for a, b in zip(mine, other, strict=True)
    )


def rules_of(outcome: BacktestOutcome) -> str:
    """Return the rules that ordered an action, with their steps."""
    return ", ".join(f"{a.rule} at {a.step}" for a in outcome.actions if a.touches_job)


def compare(
    length: Length,
    program: Program,
    folder: Path,
    outcomes: list[BacktestOutcome],
    committed: list[BacktestOutcome],
) -> None:
    """Count the runs of one program at one length."""
    known = json.loads((folder / f"{program.name}.json").read_text())
    length.allowed_ms = median(run["step_ms"] * run["share"] / SHARE for run in known.values())
    here, there = (losses(each / f"{program.name}.parquet") for each in (folder, RECORDINGS))
    found, before = harms(program), {outcome.run: outcome for outcome in committed}
    for outcome in outcomes:
        run = outcome.run
        if run not in before or not same(here[run], there[run]):
            length.differ.append(f"{program.name} {run}")
            if run not in before or known[run]["fault"] not in (HEALTHY, *HARMLESS):
                continue
        missed = length.here.missed, length.committed.missed
        numbers = [len(each) for each in missed]
        add(length.here, outcome, found.get(run))
        add(length.committed, before[run], found.get(run))
        late, late_before = (len(m) > n for m, n in zip(missed, numbers, strict=True))
        harm = found.get(run)
        text = f"{program.name} {run}: {rules_of(outcome) or 'nothing'}"
        text += f"; committed: {rules_of(before[run]) or 'nothing'}"
        if harm is not None and harm.harmed:
            text += f"; harm {harm.row}, half {harm.half}"
        elif rules_of(outcome) and not rules_of(before[run]):
            length.needless.append(text)
        if late and not late_before:
            length.lost.append(text)
        elif late_before and not late:
            length.gained.append(text)


def text_of(lengths: Mapping[tuple[float, str], Length]) -> Iterator[str]:
    """Yield the lines of the table and of the lists."""
    yield (
        "| step asked for | program | allowed as in | runs | "
        + " | ".join(t for t, _ in COUNTS)
        + " |"
    )
    yield "| --- " * (4 + len(COUNTS)) + "|"
    for (step_ms, name), each in lengths.items():
        runs = each.here.harmed + each.here.healthy + each.here.spared
        cells = [f"{step_ms:g} ms", name, f"{each.allowed_ms:.1f} ms", f"{runs}"]
        cells += [f"{count(each.here)}, {count(each.committed)}" for _, count in COUNTS]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for title, lists in (
        ("Other losses than committed", [each.differ for each in lengths.values()]),
        ("Acted on in time only in the committed recording", [e.lost for e in lengths.values()]),
        ("Acted on in time only here", [each.gained for each in lengths.values()]),
        ("Acted on without harm only here", [each.needless for each in lengths.values()]),
    ):
        items = [
            f"- {step_ms:g} ms, {item}"
            for (step_ms, _), items in zip(lengths, lists, strict=True)
            for item in items
        ]
        yield f"{title}: {'' if items else 'none.'}".rstrip()
        yield ""
        if items:
            yield from items
            yield ""


def main() -> int:
    """Score, print, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER=N", help="recordings and their ms")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    pairs = (each.rpartition("=") for each in options.folders)
    folders = [(Path(name), float(ms)) for name, _, ms in pairs]
    work = [
        (folder, step_ms, program)
        for folder, step_ms in folders
        for program in PROGRAMS
        if (folder / f"{program.name}.parquet").exists()
    ]
    lengths = {(step_ms, program.name): Length() for _, step_ms, program in work}
    runs = defaultdict(set)
    for folder, _, program in work:
        runs[program].update(json.loads((folder / f"{program.name}.json").read_text()))
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as workers:
        before = {
            program: workers.submit(outcomes_of, program, [POLICY], runs=sorted(names))
            for program, names in runs.items()
        }
        scored = [workers.submit(outcomes_of, p, [POLICY], folder=f) for f, _, p in work]
        for (folder, step_ms, program), outcomes in zip(work, scored, strict=True):
            length, committed = lengths[step_ms, program.name], before[program].result()
            compare(length, program, folder, outcomes.result(), committed)
    text = "\n".join(text_of(lengths))
    print(text)
    TABLE.write_text(HEAD + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
