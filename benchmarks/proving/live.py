"""Measure what each remedy is worth against each cause; writes `live.json` and `live.md`.

    python benchmarks/proving/live.py                  all that is missing; can be interrupted
    python benchmarks/proving/live.py --policy nano    what the first remedy of a policy is worth

Every program with faults that is not kept aside gets four of them, one each of the rate, the data,
the moments and the weights, or the next in `FAULTS` where one cannot act. Row and seed are those of
the recording of the same name, with which the branch `nothing` is identical, bit by bit. A remedy
begins 3 rows after its fault (harm shows in the loss after 1 to 5; `AT_ONCE` in score.py), one that
ends with `now` begins 1 row after it (what a rate or a batch is, its own frame says). From the
update of that row on:

- `skip`, `skip_now`: no updates while the fault lasts, 32 at most.
- `hold_rate`, `hold_rate_now`: the rate of every group is the one that the program set.
- `restore_N`: parameters, buffers, optimizer state and scaler of N steps before, or of the start;
  loop, schedule and data go on. Nothing is held or skipped after it.
- `relaunch`: the program starts again as it was 50 steps before the fault (the mean age of a
  checkpoint every 100), or from the start. It is not run: all of it is repeatable, so that it is
  the undisturbed run from there, or that with the fault where the fault is in the data, which come
  again. The time of a start is not counted.

A remedy that has nothing to do is not run either: it is `nothing`.

`lost`, in nats x steps, is the sum over the rows after the fault of the loss minus that of the
undisturbed run of the same seed. A row that is not finite, or worse than the first one of the run,
counts as that one: no model is worth less than an untrained one. Rows are updates; the steps that a
relaunch repeats are rows, too, and it ends as much behind. `worse` is the final loss, relative to
the undisturbed run. `diverged`: the last 20 rows are, in the mean, no better than the first row.

A policy is scored by look-up: its first ordered action that touches the job, in the recording, is
the branch that is taken; one that begins after 1 or 2 rows counts as 3 where there is no `now`.
If it begins later, what `nothing` lost meanwhile is added to what the branch lost from its remedy
on, which is kind to late remedies; after the end of the fault there is nothing to skip or to hold.
A rollback goes to the newest savepoint that is as old as its runbook wants, counted from the
action, and is scored as the nearest of 10, 25 and 100; to a state since the fault, as `nothing`, as
is a stop. A lower rate counts as `hold_rate`, which is kind, too. What else a runbook does (a lower
rate after a rollback) is left out, and so are standing orders that act before an update. 0 is what
`nothing` lost, 1 the best branch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from branches import DELAY, MOST_SKIPS, NOW, TWIN, back
from grid import FAULTS as DRILLS
from grid import HEALTHY, PROGRAMS, TOKENS, Cell, Program, cells
from score import OURS, losses

from supervise.core.model import Policy
from supervise.lab import ScoredAction, load_in_shadow_mode, run_backtest
from supervise_probe import faults

HERE = Path(__file__).resolve().parent
RECORDINGS, RESULTS, TABLE = HERE / "recordings", HERE / "live.json", HERE / "live.md"
FAULTS = (
    ("rate_x30",),
    ("random_batches", "nan_gradient"),
    ("variance_lost", "nan_gradient", "weight_noise"),
    ("weight_bit",),
)
NOTHING, SKIP, HOLD, RELAUNCH = "nothing", "skip", "hold_rate", "relaunch"
RESTORES = ("restore_10", "restore_25", "restore_100")
BRANCHES = (NOTHING, SKIP + NOW, SKIP, HOLD + NOW, HOLD, *RESTORES, RELAUNCH)
CHECKPOINT_AGE = 50
SAVEPOINTS = 25  # of a policy that keeps none in the mode that it is scored in
LAST = 20
FAR = 10.0  # a final loss that is so much worse is no number to read, nor is NaN
REMEDIES = {"relaunch": RELAUNCH, "lr_scale": HOLD, "skip_step": SKIP}  # by verb


# ── recording ─────────────────────────────────────────────────────────────────────────────────────


def chosen(program: Program) -> list[Cell]:
    """Return the four faults of a program."""
    left = {cell.fault: cell for cell in cells(program, 1, 1)}
    return [left.pop(next(name for name in names if name in left)) for names in FAULTS]


def drill(fault: str) -> tuple[str, faults.Params]:
    """Return the name and all parameters of the drill that makes a fault."""
    name, _, given = DRILLS[fault].partition(":")
    return name, faults.complete_parameters(
        name, dict(part.split("=") for part in given.split(",") if part)
    )


def lasts(fault: str) -> int:
    """Return how many rows a fault lasts."""
    return int(drill(fault)[1].get("steps", 1))


def remedies(fault: str) -> list[str]:
    """Return the branches that have something to do, and are to be run."""
    useful = {SKIP: lasts(fault) > DELAY, HOLD: fault.startswith("rate")}
    return [*(name + at for name, is_ in useful.items() if is_ for at in (NOW, "")), *RESTORES]


def run(program: Program, of: Sequence[Cell]) -> dict[str, Any]:
    """Run all branches of some faults of a program; return their names and results.

    Raises:
        RuntimeError: a branch failed.
    """
    plan: dict[str, Any] = {"only": None, "faults": {}}
    for cell in of:
        name, params = drill(cell.fault)
        about = {"drill": name, "params": params, "row": cell.row}
        plan["faults"][cell.fault] = {**about, "remedies": remedies(cell.fault)}
    launcher, each = [sys.executable], [None]
    if program.ranks > 1:
        launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={program.ranks}"]
        branches = [
            f"{c.fault}{r}" for c in of for r in ("", *map(".{}".format, remedies(c.fault)))
        ]
        each = [TWIN, *branches]
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": home}
        for only in each:
            path = Path(home) / "plan.json"
            path.write_text(json.dumps({**plan, "out": home, "only": only}))
            script = HERE / "programs" / f"{program.name}.py"
            job = [*launcher, str(HERE / "branches.py"), str(path), str(script), "--seed=0"]
            job.append(f"--steps={program.steps}")
            done = subprocess.run(job, cwd=home, env=env, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{program.name} {only or ''}: {done.stderr[-3000:]}")
        path.unlink()
        return {file.stem: json.loads(file.read_text()) for file in Path(home).glob("*.json")}


def capped(series: Sequence[float], most: float) -> list[float]:
    """Return the losses of a run, none of them above that of an untrained model."""
    return [min(loss, most) if math.isfinite(loss) else most for loss in series]


def lost(series: Sequence[float], twin: Sequence[float], first: int, end: int) -> float:
    """Return what a run lost against its twin in rows `first` to `end`, nats x steps."""
    return sum(a - b for a, b in zip(series[first:end], twin[first:end], strict=True))


def judged(program: Program, of: Sequence[Cell], found: dict[str, Any]) -> dict[str, Any]:
    """Return what `live.json` keeps of a program."""
    most, final = found[TWIN]["losses"][0], found[TWIN]["final_loss"]
    series = {name: capped(result["losses"], most) for name, result in found.items()}
    kept: dict[str, Any] = {}
    for cell in of:
        name, begins = cell.fault, cell.row + DELAY
        again = max(0, cell.row - CHECKPOINT_AGE)
        base = name if name in TOKENS else TWIN
        relaunched = [*series[name][:begins], *series[base][again:]][: program.steps]
        runs = {NOTHING: (series[name], found[name]["final_loss"])}
        for remedy in remedies(name):
            branch = f"{name}.{remedy}"
            runs[remedy] = series[branch], found[branch]["final_loss"]
        runs[RELAUNCH] = relaunched, found[base]["final_loss"]
        kept[name] = {
            "row": cell.row,
            "before": round(lost(series[name], series[TWIN], cell.row, begins), 2),
            "branches": {
                branch: {
                    "lost": round(lost(run, series[TWIN], cell.row, program.steps), 2),
                    "worse": round(end / final - 1, 4),
                    "diverged": statistics.mean(run[-LAST:]) >= most,
                }
                for branch, (run, end) in runs.items()
            },
        }
    each = found.values() if program.ranks > 1 else [found[TWIN]]  # forks are counted in the twin
    cpu_s = round(program.ranks * sum(result["cpu_s"] for result in each))
    return {"final_loss": final, "cpu_s": cpu_s, "faults": kept}


# ── looking up ────────────────────────────────────────────────────────────────────────────────────


def remedy_of(act: ScoredAction, policy: Policy, row: int) -> str:
    """Return the branch that an action is, of a fault that began at `row`."""
    book = policy.runbooks[act.runbook]
    for verb, step in zip(book.verbs, book.steps, strict=True):
        if verb in REMEDIES:
            return REMEDIES[verb]
        if verb == "rollback":
            every = SAVEPOINTS if policy.savepoints is None else policy.savepoints.every
            steps = act.step - max(0, act.step - step.at_least) // every * every
            if act.step - steps > row:
                return NOTHING
            return min(RESTORES, key=lambda name: abs(math.log(back(name) / steps)))
    return NOTHING


def looked_up(
    known: dict[str, Any], fault: str, act: ScoredAction, policy: Policy, ill: float
) -> tuple[str, float]:
    """Return the branch of a policy's first action, and what is lost with it.

    Args:
        known: what `live.json` has of the fault.
        ill: what `nothing` lost until then, the row of the action included.
    """
    name, late = remedy_of(act, policy, known["row"]), act.step + 1 - known["row"]
    over = name in (SKIP, HOLD) and late >= min(lasts(fault), DELAY + MOST_SKIPS)
    if over or name not in known["branches"]:
        name = NOTHING
    if late <= 1 and name + NOW in known["branches"]:
        name += NOW
    total = known["branches"][name]["lost"]
    if name != NOTHING and late > DELAY:
        total += ill - known["before"]
    return name, total


def answers(kept: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, str, str, str, Any]]:
    """Yield program, fault, policy, its first remedy, and what is lost with it."""
    policies = {policy.name: policy for policy in map(load_in_shadow_mode, names)}
    for program, about in kept.items():
        path = RECORDINGS / f"{program}.parquet"
        if not path.exists():
            continue
        series = losses(path)
        most = series[f"{HEALTHY}-0"][0]
        for outcome in (each for found in run_backtest([path], names, {}, 2, []) for each in found):
            run = outcome.run.lstrip(":")
            fault, _, seed = run.rpartition("-")
            if seed != "0" or fault not in about["faults"]:
                continue
            known = about["faults"][fault]
            acts = (a for a in outcome.actions if a.touches_job and a.step >= known["row"])
            said, total = "none", known["branches"][NOTHING]["lost"]
            if act := next(acts, None):
                both = capped(series[run], most), capped(series[f"{HEALTHY}-0"], most)
                ill = lost(*both, known["row"], act.step + 1)
                name, total = looked_up(known, fault, act, policies[outcome.policy], ill)
                said = f"{name} +{act.step - known['row']}"
            yield program, fault, outcome.policy, said, total


def share(totals: Sequence[float], knowns: Iterable[dict[str, Any]]) -> str:
    """Return what part was saved of what the best branches of some faults save."""
    branches = [known["branches"] for known in knowns]
    nothing = sum(each[NOTHING]["lost"] for each in branches)
    most = nothing - sum(min(one["lost"] for one in each.values()) for each in branches)
    return f"{(nothing - sum(totals)) / most:.2f}" if most > 0 else "-"


# ── writing ───────────────────────────────────────────────────────────────────────────────────────

HEAD = """# What a remedy is worth

Written by `python benchmarks/proving/live.py`, whose docstring says what the branches are. Nats x
steps lost against the undisturbed run, in brackets the final loss against it; the least is bold.
`·`: nothing to do. `!`: diverged. Recorded in {hours:.2f} h of CPU time: {programs} programs.

"""
SHARES = """
## The first remedy of each policy

What it is, how many rows after the fault it is ordered, and what part it saves of what the best
branch saves: 1 the best branch, 0 nothing done, below 0 worse than nothing, `-` where nothing is
best. Looked up above; `nothing` with a row is an action that saves none of it, as a stop.

"""


def row(*cells_: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells_)} |"


def branch_lines(kept: dict[str, Any]) -> Iterator[str]:
    """Yield the table of branches: a row per program and fault."""
    yield row("program", "fault, row", *BRANCHES)
    yield row(*["---"] * (2 + len(BRANCHES)))
    for program, about in kept.items():
        for fault, known in about["faults"].items():
            texts, least = [], min(one["lost"] for one in known["branches"].values())
            for one in map(known["branches"].get, BRANCHES):
                text = "·" if one is None else f"{one['lost']:.1f}"
                if one is not None:
                    text = f"**{text}**" if one["lost"] == least else text
                    text += f" ({one['worse']:+.1%})" if abs(one["worse"]) < FAR else ""
                    text += "!" * one["diverged"]
                texts.append(text)
            yield row(program, f"{fault}, {known['row']}", *texts)


def policy_lines(kept: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Yield the table of policies: a row per program and fault, and one of the whole program."""
    found: dict[str, dict[str, Any]] = {}
    for program, fault, policy, said, total in answers(kept, names):
        found.setdefault(policy, {})[program, fault] = said, total
    recorded = {pair for mine in found.values() for pair in mine}
    yield row("program", "fault", *found)
    yield row(*["---"] * (2 + len(found)))
    for program, about in kept.items():
        faults_ = {f: known for f, known in about["faults"].items() if (program, f) in recorded}
        for fault, known in faults_.items():
            each = (mine[program, fault] for mine in found.values())
            yield row(program, fault, *(f"{said}: {share([t], [known])}" for said, t in each))
        sums = ([mine[program, fault][1] for fault in faults_] for mine in found.values())
        yield row(program, "all", *(share(each, faults_.values()) for each in sums))


def main() -> int:
    """Record what is missing and write the tables, or score policies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", help="programs; default: all")
    parser.add_argument("--again", action="store_true", help="record anew what is there")
    parser.add_argument("--policy", action="append", help="score these, record nothing")
    options = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = [p for p in PROGRAMS if not (p.healthy_only or p.kept_aside or options.policy)]
    failed = False
    for program in wanted:
        chosen_now = not options.only or program.name in options.only
        if not chosen_now or (program.name in known and not options.again):
            continue
        try:
            of = chosen(program)
            known[program.name] = judged(program, of, run(program, of))
        except RuntimeError as error:
            print(f"failed: {error}", file=sys.stderr)
            failed = True
            continue
        print(f"{program.name}: {known[program.name]['cpu_s']} s", flush=True)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    kept = {p.name: known[p.name] for p in PROGRAMS if p.name in known}
    if options.policy:
        print("\n".join(policy_lines(kept, options.policy)))
        return 0
    hours = sum(about["cpu_s"] for about in kept.values()) / 3600
    text = HEAD.format(hours=hours, programs=len(kept)) + "\n".join(branch_lines(kept))
    TABLE.write_text(f"{text}\n{SHARES}" + "\n".join(policy_lines(kept, OURS)) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
