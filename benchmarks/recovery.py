"""The cost of faults for the example, with the supervisor and without.

    python benchmarks/recovery.py [--seeds 3] [--jobs 2] [--only CASE ...] [--ours] [--kept]
        [--check]

Every fault of recovery_cases.py is injected into the example at step 150 of 600, with two ranks
mostly of 400, for memory of 1500, in runs of three seeds under `examples/nano/policy.yaml`; with
one seed also under nobody, under `torchrun --max-restarts 3` and under a policy that stops at the
first NaN. Writes `benchmarks/recovery.md`. Each finished run is kept in `benchmarks/.recovery/`, so
that what was broken off goes on where it was; a change of the code or of a policy starts anew.
`--check` fails when a promise is not kept: within 1.5 % of the loss of the undisturbed run, held
with evidence, or told, as the case wants it, and nothing destructive in healthy runs.

A step is lost when it has to be made again, or was made and thrown away. Who finishes within 1.5 %
lost what was thrown away or made beyond these, and what was skipped. Who does not, lost everything
since the newest checkpoint from before the fault, as a person would find it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from recovery_cases import CASES, FAULT_STEP, Case
from recovery_result import Result, read

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks" / ".recovery"
TABLE = ROOT / "benchmarks" / "recovery.md"
TRAIN = ROOT / "examples" / "nano" / "train.py"
POLICY = ROOT / "examples" / "nano" / "policy.yaml"
STOP_ON_NAN = ROOT / "benchmarks" / "stop_on_nan.yaml"
CHECKPOINTS = 50
TOKENS = 768  # of a step on one rank
TOLERANCE = 0.015  # of the undisturbed validation loss; 30 of 600 steps thrown away are 1.1 %
LIMIT_S = 300.0  # a run of 600 steps or fewer that takes so long does not end by itself
ARMS = ("supervise", "nobody", "torchrun", "stop-on-NaN")


def command(case: Case, arm: str, seed: int, path: Path) -> list[str]:
    """Return the command line of one run."""
    supervise = [sys.executable, "-m", "supervise", "-q", "--run-dir", str(path / "run")]
    if arm == "supervise":
        supervise += ["--policy", str(POLICY)]
    elif arm == "stop-on-NaN":
        supervise += ["--policy", str(STOP_ON_NAN)]
    else:  # the probe injects the fault and touches nothing else
        supervise += ["--policy", "observe"]
    for drill in case.drills:
        supervise += ["--drill", drill]
    job = [sys.executable, str(TRAIN)]
    if arm == "torchrun" or case.ranks > 1:
        restarts = "3" if arm == "torchrun" else "0"
        job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts"]
        job += [restarts, "--nproc-per-node", str(case.ranks), str(TRAIN)]
    job += ["--steps", str(case.steps), "--seed", str(seed), "--log-every", "100", *case.options]
    job += ["--checkpoint-every", str(CHECKPOINTS), "--out", str(path / "out")]
    return [*supervise, "--", *job, *(["--resume"] if arm == "torchrun" else [])]


def run(case: Case, arm: str, seed: int, path: Path) -> Result:
    """Start one run and read its result."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (path / "out.txt").open("w") as out, (path / "err.txt").open("w") as err:
        process = subprocess.Popen(
            command(case, arm, seed, path), stdout=out, stderr=err, env=environ, cwd=path
        )
        try:
            code: int | None = process.wait(LIMIT_S * max(1.0, case.steps / 600))
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()  # passed on to the job
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return read(case, code, path)


def lost(case: Case, result: Result, calm: float) -> int:
    """Return how many steps were lost; see the head of this file."""
    if is_near(result, calm):
        return max(result.thrown, result.made - case.steps + result.skipped)
    return case.steps - FAULT_STEP // CHECKPOINTS * CHECKPOINTS


def is_near(result: Result, calm: float) -> bool:
    """Whether the run finished with a loss within the tolerance."""
    return result.loss is not None and result.loss <= (1 + TOLERANCE) * calm


def kept_promise(case: Case, result: Result, calm: float) -> bool:
    """Whether the case met its promise."""
    if case.wants == "healthy":
        return result.code == 0 and not result.actions and not result.held
    if case.wants == "recovered":
        return is_near(result, calm) and result.code == 0
    if case.wants == "held":
        held = result.held and result.told is not None and not result.destructive
        return (held or result.code == 78) and result.evidence > 0
    told = result.told is not None and not result.destructive
    return told and (case.wants == "told" or result.evidence > 0)


# ── keeping and showing ───────────────────────────────────────────────────────────────────────────


def fingerprint() -> str:
    """Return a digest of everything that can change the result."""
    digest = hashlib.sha256()
    for folder in ("supervisor", "probes", "policies", "runbooks", "examples"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def once(case: Case, arm: str, seed: int, mark: str, runs: bool) -> Result | None:
    """Return the kept result of a run, or run it; None where it is not to be run."""
    path = KEPT / f"{case.name}-{arm}-{seed}"
    file = path / "result.json"
    if file.exists():
        kept = json.loads(file.read_text())
        if kept.pop("fingerprint") == mark:
            return Result(**{**kept, "actions": tuple(kept["actions"])})
    if not runs:
        return None
    began = time.monotonic()
    result = run(case, arm, seed, path)
    file.write_text(json.dumps({**asdict(result), "fingerprint": mark}))
    print(f"{case.name} {arm} {seed}: {result} in {time.monotonic() - began:.0f} s", flush=True)
    return result


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, the first row its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines) + "\n"


def undisturbed(found: Mapping[tuple[str, str, int], Result], case: Case) -> dict[int, float]:
    """Return the loss of the healthy runs of as many ranks and steps, by seed."""
    name = next(c.name for c in CASES if not c.drills and _size(c) == _size(case))
    return {
        seed: math.nan if result.loss is None else result.loss
        for (each, _, seed), result in found.items()
        if each == name
    }


def _size(case: Case) -> tuple[int, int]:
    return case.ranks, case.steps


def show(found: Mapping[tuple[str, str, int], Result], cases: Sequence[Case]) -> str:
    """Return the page; cells of what was not run are those of the present page."""
    shown = shown_before(TABLE.read_text())
    head = ("fault", "wanted", "kept", "told", "acted", "loss", "lost", *ARMS[1:], "actions")
    rows: list[Sequence[str]] = [head]
    for case in cases:
        cells = {name: shown.get((case.name, name), "–") for name in head}
        cells |= {"fault": case.name, **_ours(found, case)}
        calm = undisturbed(found, case)
        for arm in ARMS[1:]:
            if (result := found.get((case.name, arm, 0))) is not None:
                cells[arm] = _price([lost(case, result, calm[0])], case)
        rows.append([cells[name] for name in head])
    earlier = ", ".join(case.name for case in cases if not _ours(found, case))
    note = textwrap.fill(f"Of an earlier run: {earlier}.", 100)
    return HEAD + table(rows) + (f"\n{note}\n" if earlier else "")


def _ours(found: Mapping[tuple[str, str, int], Result], case: Case) -> dict[str, str]:
    """Return the cells about the runs with the supervisor, none where there is no run."""
    calm = undisturbed(found, case)
    ours = {s: one for s in calm if (one := found.get((case.name, "supervise", s))) is not None}
    if not ours:
        return {}
    losses = [one.loss / calm[s] - 1 for s, one in ours.items() if one.loss is not None]
    kept = sum(kept_promise(case, one, calm[s]) for s, one in ours.items())
    return {
        "wanted": case.wants,
        "kept": f"{kept}/{len(ours)}",
        "told": _span([one.told for one in ours.values()]),
        "acted": _span([one.acted for one in ours.values()]),
        "loss": f"{100 * max(losses):+.1f} %" if losses else "–",
        "lost": _price([lost(case, one, calm[s]) for s, one in ours.items()], case),
        "actions": ", ".join(dict.fromkeys(a for one in ours.values() for a in one.actions)) or "–",
    }


def shown_before(page: str) -> dict[tuple[str, str], str]:
    """Return the cells of the page by fault and column, for what is not run again."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| ")
    ]
    return {(row[0], name): cell for row in rows for name, cell in zip(rows[0], row, strict=True)}


def _price(steps: Sequence[int], case: Case) -> str:
    """Return what was lost: steps, and thousands of tokens."""
    return f"{_span(steps)} ({_span([s * TOKENS * case.ranks // 1000 for s in steps])}k)"


def _span(numbers: Sequence[int | None]) -> str:
    known = sorted(n for n in numbers if n is not None)
    if not known:
        return "–"
    text = str(known[0]) if known[0] == known[-1] else f"{known[0]}-{known[-1]}"
    return text if len(known) == len(numbers) else f"{text} ({len(known)} of {len(numbers)})"


HEAD = f"""# The cost of faults, with the supervisor and without

Written by `python benchmarks/recovery.py`: the example, 600 steps of {TOKENS} tokens a rank, with
two ranks mostly 400, for memory 1500, a checkpoint every {CHECKPOINTS}, the fault at step
{FAULT_STEP}. `told` and `acted`: steps from the fault to the first word and to the first action or
reflex. `loss`: the worst seed's validation loss beside its undisturbed run, which has as many ranks
and steps. `lost`: steps to be made again, or made and thrown away, and thousands of tokens; a run
that ends more than 1.5 % worse, or not at all, lost all since its last checkpoint from before the
fault. The columns on the right are what was lost with nobody, with restarts by torchrun, and with a
stop at the first NaN, one seed each; they stay as they are when only the supervisor's are run.

"""


def main() -> None:
    """Run what is missing, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--ours", action="store_true", help="the other columns stay")
    parser.add_argument("--kept", action="store_true", help="run nothing, show what is kept")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    chosen = [c for c in CASES if c.name in args.only or not args.only]
    needed = {_size(c) for c in chosen}
    cases = [c for c in CASES if c in chosen or (not c.drills and _size(c) in needed)]
    wanted = [(c, "supervise", s) for c in cases for s in range(args.seeds)]
    wanted += [(c, arm, 0) for c in cases for arm in ARMS[1:] if c.drills and not args.ours]
    mark = fingerprint()
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda each: once(*each, mark, not args.kept), wanted))
    found = {
        (c.name, arm, seed): result
        for (c, arm, seed), result in zip(wanted, results, strict=True)
        if result is not None
    }
    page = show(found, cases)
    print(page)
    if not args.only:
        TABLE.write_text(page)
    broken = [
        f"{case.name}, seed {seed}"
        for case in cases
        for seed, calm in undisturbed(found, case).items()
        if (result := found.get((case.name, "supervise", seed))) is not None
        and not kept_promise(case, result, calm)
    ]
    if broken:
        print("promise missed:", "; ".join(broken))
    sys.exit(bool(broken and args.check))


if __name__ == "__main__":
    main()
