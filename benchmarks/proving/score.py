"""Score policies on the recordings of the proving ground; writes `table.md` or `kept_aside.md`.

    python benchmarks/proving/score.py [--policy FILE ...] [--programs NAME ...] [--jobs 2]
                                       [--thinned 4]

Whether a fault did harm is measured, not declared. `lost` is the sum over the rows after the fault
of the loss minus that of the undisturbed run of the same seed: nats x steps. Rows whose batch the
fault replaced are left out: their loss tells of the batch, not of the weights. A run is harmed when
it ended non-finite, when its final loss is 1.5 % and two standard deviations of the healthy seeds
worse, or when it lost more than a remedy costs, and more than five times what the harmless twins of
its program did. A rollback of N steps costs N times what the undisturbed run had still to fall,
from the fault to its end; N is 25, the distance of `nano`'s savepoints. To hold a rate costs
nothing.

Of each policy and program the tables have: harmed runs in which an action was ordered in time,
before half of `lost` was lost, or within 3 rows; those with a page (SEV0 or SEV1) in time; actions
in healthy runs and harmless twins, where each is false, and in those whose fault did no harm or
less than a remedy costs, where nobody could know; messages per 1000 rows of all runs not harmed.

`--thinned N` leaves of the norm of the update and of the statistics of tokens what the probe takes
of them in short steps: behind the first two windows of its guard one step in N, and all for a while
behind what is unusual.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow
from grid import DATA_DRILLS, HARMLESS, HEALTHY, PROGRAMS, RATE_DRILLS, Program
from pyarrow import compute, parquet

from supervise.lab import BacktestOutcome, run_backtest
from supervise_probe.collectors.batch import BATCH_SANITY_METRICS
from supervise_probe.runtime.guard import WINDOW
from supervise_probe.sampling.sample_sets import ALARM_STEPS, Unrest

HERE = Path(__file__).resolve().parent
RECORDINGS, TABLE = HERE / "recordings", HERE / "table.md"
KEPT_ASIDE = HERE / "kept_aside.md"  # the same for programs that no rule was tuned on
PEERS = HERE.parents[1] / "policies" / "peers"
OURS = ("nano", "medium", "large", "moe")
AT_ONCE = 3  # rows; an answer as fast as that is in time whatever was lost
WORSE, SPREADS, TWINS = 0.015, 2.0, 5.0
STEPS_BACK = 25  # of a rollback, as `savepoints.every` of nano
PAGES = ("SEV0", "SEV1")
UPDATE = ("update_norm", "update_to_weight", "update_square_share", "weight_square_share")
RARE = (*UPDATE, *(spec.id for spec in BATCH_SANITY_METRICS))
LOOKED_AT = ["nan_inf_events", "grad_spike_score", "learning_rate", "update_norm", "train_loss_raw"]
HEAD = """# Policies on the proving ground

Written by `python benchmarks/proving/score.py` from the recordings; what the columns count, and
when a run counts as harmed, is in its docstring. Recorded: {runs} runs of {programs} programs.

"""


@dataclass(frozen=True)
class Harm:
    """What a fault did. `row`: where it began; `half`: the row where half of `lost` was lost.

    `slight`: something was lost, and less than a remedy costs. `first`: the step from which an
    action is an answer; of several ranks one may be a frame ahead of the one that counts steps.
    """

    harmed: bool
    slight: bool
    row: int
    first: int
    half: int
    lost: float
    worse: float  # final loss relative to the undisturbed run, minus 1


@dataclass
class Tally:
    """Counts of one policy on one program."""

    harmed: int = 0
    acted: int = 0
    paged: int = 0
    slight: int = 0
    healthy: int = 0
    false_actions: int = 0
    spared: int = 0
    needless_actions: int = 0
    messages: int = 0
    rows: int = 0
    missed: list[str] = field(default_factory=list)


def losses(path: Path) -> dict[str, list[float]]:
    """Return the losses of rank 0 by run; an absent loss is NaN."""
    columns = ["run", "rank", "step", "train_loss_raw"]
    found: dict[str, list[float]] = defaultdict(list)
    for row in parquet.read_table(path, columns=columns).to_pylist():
        if row["rank"] == 0:
            value = row["train_loss_raw"]
            found[row["run"]].append(math.nan if value is None else value)
    return found


def excess(run: list[float], twin: list[float], first: int) -> list[float]:
    """Return the running sum of what a run lost against its twin from `first` on, nats x steps."""
    total, sums = 0.0, []
    for mine, other in zip(run[first:], twin[first:], strict=False):
        total = math.inf if not math.isfinite(mine) else total + mine - other
        sums.append(total)
    return sums


def counted_from(run: Mapping[str, Any]) -> int:
    """Return the first row of a run whose loss tells of the weights, at or after its fault."""
    drill = run["drill"]
    steps = int(drill["params"]["steps"]) if drill["fault"] in DATA_DRILLS else 0
    return int(run["row"]) + steps


def price(run: Mapping[str, Any], twin: list[float]) -> float:
    """Return what the remedy of a fault costs, nats x steps.

    Behind a rollback each loss is that of N steps before: a sum of differences that telescopes.
    """
    if run["drill"]["fault"] in RATE_DRILLS:
        return 0.0
    row = max(run["row"], STEPS_BACK)
    return max(0.0, sum(twin[row - STEPS_BACK : row]) - sum(twin[-STEPS_BACK:]))


def harms(program: Program) -> dict[str, Harm]:
    """Measure the harm of each recorded run of a program that has a fault."""
    known = json.loads((RECORDINGS / f"{program.name}.json").read_text())
    series = losses(RECORDINGS / f"{program.name}.parquet")
    if program.healthy_only:
        return {}
    final = {r["seed"]: r["final_loss"] for r in known.values() if r["fault"] == HEALTHY}
    spread = statistics.stdev(final.values()) / abs(statistics.mean(final.values()))
    faulty = {name: run for name, run in known.items() if run["fault"] != HEALTHY}
    twin = {name: series[f"{HEALTHY}-{run['seed']}"] for name, run in faulty.items()}
    lost = {n: excess(series[n], twin[n], counted_from(run)) for n, run in faulty.items()}
    twins = [abs(lost[n][-1]) for n, r in faulty.items() if r["fault"] in HARMLESS and lost[n]]
    noise = max(twins, default=0.0)
    found = {}
    for name, sums in lost.items():
        run = known[name]
        worse = run["final_loss"] / final[run["seed"]] - 1
        total = sums[-1] if sums else 0.0
        ruined = not math.isfinite(worse) or worse > WORSE + SPREADS * spread
        some = run["fault"] not in HARMLESS and total > TWINS * noise
        harmed = ruined or (some and total > price(run, twin[name]))
        peak, row = max(sums, default=0.0), run["row"]
        half = next((i for i, each in enumerate(sums) if each >= peak / 2), len(sums))
        half += counted_from(run)
        first = row - (program.ranks > 1)
        found[name] = Harm(harmed, some and not harmed, row, first, half, total, worse)
    return found


def add(tally: Tally, outcome: BacktestOutcome, harm: Harm | None) -> None:
    """Count one run."""
    acts = [act.step for act in outcome.actions if act.touches_job]
    pages = [one.step for one in outcome.alarms if one.notified and one.severity in PAGES]
    if harm is None or not harm.harmed:
        if outcome.run.rpartition("-")[0] in (HEALTHY, *HARMLESS):
            tally.healthy += 1
            tally.false_actions += bool(acts)
        else:
            tally.spared += 1
            tally.slight += harm is not None and harm.slight
            tally.needless_actions += bool(acts)
        tally.messages += sum(alarm.notified for alarm in outcome.alarms)
        tally.rows += outcome.rows
        return
    tally.harmed += 1
    deadline = max(harm.half, harm.row + AT_ONCE)
    acted = any(harm.first <= step <= deadline for step in acts)
    tally.acted += acted
    tally.paged += any(harm.first <= step <= deadline for step in pages)
    if not acted:
        tally.missed.append(outcome.run)


COLUMNS: list[tuple[str, Callable[[Tally], str]]] = [
    ("acted in time, of harmed runs", lambda t: f"{t.acted}/{t.harmed}"),
    ("paged in time, of harmed runs", lambda t: f"{t.paged}/{t.harmed}"),
    (
        "acted in healthy runs and harmless twins, of all of these",
        lambda t: f"{t.false_actions}/{t.healthy}",
    ),
    (
        "acted on faults without harm or with less than a remedy costs, of all of these",
        lambda t: f"{t.needless_actions}/{t.spared}",
    ),
    ("messages per 1000 rows of runs not harmed", lambda t: f"{1000 * t.messages / t.rows:.1f}"),
]


def lines(tallies: Mapping[tuple[str, str], Tally], policies: Sequence[str]) -> Iterator[str]:
    """Yield the tables: a row per program, a column per policy."""
    programs = list(dict.fromkeys(program for program, _ in tallies))
    yield "## Recorded runs"
    yield ""
    yield "| program | healthy, or a harmless twin | no harm | less than a remedy costs | harmed |"
    yield "| --- | --- | --- | --- | --- |"
    for program in programs:
        t = tallies[program, policies[0]]
        yield f"| {program} | {t.healthy} | {t.spared - t.slight} | {t.slight} | {t.harmed} |"
    yield ""
    for title, cell in COLUMNS:
        yield f"## {title.capitalize()}"
        yield ""
        yield f"| program | {' | '.join(policies)} |"
        yield "| --- " * (1 + len(policies)) + "|"
        for program in programs:
            found = (tallies[program, policy] for policy in policies)
            yield f"| {program} | {' | '.join(cell(tally) for tally in found)} |"
        yield ""


def outcomes_of(
    program: Program,
    policies: list[str],
    every: int = 1,
    folder: Path = RECORDINGS,
    runs: Sequence[str] | None = None,
) -> list[BacktestOutcome]:
    """Return what each policy made of each recorded run of a program, or of some of its runs."""
    path = folder / f"{program.name}.parquet"
    with tempfile.TemporaryDirectory() as scratch:
        if runs is not None:
            table = parquet.read_table(path)
            table = table.filter(compute.is_in(table["run"].cast("string"), pyarrow.array(runs)))
            path = Path(scratch) / path.name
            parquet.write_table(table, path)
        if every > 1:
            path = thinned(path, every, Path(scratch))
        return [one for several in run_backtest([path], policies, {}, 1, []) for one in several]


def thinned(path: Path, every: int, folder: Path) -> Path:
    """Write the recording with the metrics of RARE in one step of `every`; return its path."""
    table = parquet.read_table(path)
    columns = table.to_pydict()
    rare = [name for name in RARE if name in columns]
    unrest: dict[tuple[str, int], Unrest] = defaultdict(Unrest)
    dense_until: dict[tuple[str, int], int] = {}
    for row, run in enumerate(columns["run"]):
        rank, step = (run, columns["rank"][row]), columns["step"][row]
        if step >= dense_until.setdefault(rank, step + 2 * WINDOW) and step % every:
            for name in rare:
                columns[name][row] = None
        values = {name: columns[name][row] for name in LOOKED_AT if name in columns}
        if unrest[rank].add_and_is_unusual({k: v for k, v in values.items() if v is not None}):
            dense_until[rank] = max(dense_until[rank], step + 1 + ALARM_STEPS)
    fresh = folder / path.name
    parquet.write_table(pyarrow.table(columns, schema=table.schema), fresh)
    return fresh


def main() -> int:
    """Score, print, and write the table when nothing was left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", action="append", help="default: all shipped ones and peers")
    parser.add_argument("--programs", nargs="*")
    parser.add_argument("--kept-aside", action="store_true", help="only what is kept aside")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--thinned", type=int, default=1, metavar="N")
    parser.add_argument("--missed", action="store_true", help="name the harmed runs left alone")
    options = parser.parse_args()
    policies = options.policy or [*OURS, *map(str, sorted(PEERS.glob("*.yaml")))]
    known = {program.name for program in PROGRAMS}
    if unknown := set(options.programs or ()) - known:
        parser.error(f"no program {min(unknown)!r}; there are {', '.join(sorted(known))}")
    programs = [
        program
        for program in PROGRAMS
        if (RECORDINGS / f"{program.name}.parquet").exists()
        and program.kept_aside == options.kept_aside
        and (not options.programs or program.name in options.programs)
    ]
    tallies: dict[tuple[str, str], Tally] = defaultdict(Tally)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as workers:
        scored = workers.map(outcomes_of, programs, repeat(policies), repeat(options.thinned))
        for program, outcomes in zip(programs, scored, strict=True):
            found = harms(program)
            for outcome in outcomes:
                add(tallies[program.name, outcome.policy], outcome, found.get(outcome.run))
    names = list(dict.fromkeys(policy for _, policy in tallies))
    text = "\n".join(lines(tallies, names))
    print(text)
    if not (options.policy or options.programs or options.thinned > 1):
        first = [t for (_, policy), t in tallies.items() if policy == names[0]]
        runs = sum(t.harmed + t.healthy + t.spared for t in first)
        table = KEPT_ASIDE if options.kept_aside else TABLE
        table.write_text(HEAD.format(runs=runs, programs=len(programs)) + text)
    if options.missed:
        for (program_name, policy), tally in tallies.items():
            print(f"{program_name} {policy} left alone: {', '.join(tally.missed) or '-'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
