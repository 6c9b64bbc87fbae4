"""Several ranks under `nano` as it is shipped: which shapes of a job recover, and from what.

    python benchmarks/ranks.py                           all that is missing; can be interrupted
    python benchmarks/ranks.py --shape fsdp2 --again     these once more

Jobs of a small GPT on text (`ranks_job.py`) under torchrun, gloo, each hit half-way; beside them
runs that nothing is injected into and runs that are only observed. `back to`, `at`: the step whose
state the ranks took back, and the one at whose end they did. `same`: ranks whose weights and
moments are then, bit by bit, those that they had behind that step; where moments were damaged, the
weights. `alike`: whether all ranks hold the same bits behind every step, where a fault parted them
behind every step since the rollback; sharded ones do not. The loss is the mean of the last 50 steps
of all ranks, relative to the undisturbed run of the same shape, seed and number of ranks.

Writes `benchmarks/ranks.md`; finished runs are kept in `benchmarks/.ranks/`. Exit code 1: a rank
has other bits than it had, ranks of one model differ, no rollback came where a rate, weights or
moments were damaged, or a loss is more than 1.5 % above the undisturbed one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from recovery import table

from supervise.store import read_audit

HERE = Path(__file__).resolve()
JOB, KEPT = HERE.with_name("ranks_job.py"), HERE.with_name(".ranks")
TABLE, RESULT = HERE.with_name("ranks.md"), "result.json"
STEPS, LIMIT_S, NEAR = 400, 300.0, 0.015
REPLICAS = ("ddp", "accelerate", "Trainer", "Lightning", "Fabric")  # one model on all ranks
SHAPES = (*REPLICAS, "fsdp1", "fsdp2", "zero", "tensor", "GPipe", "1F1B")
RATE, MOMENTS = "rate x30", "second moments / 10000"
APART = "NaN behind the sum on rank 1"  # which parts the ranks until they go back
FAULTS = {
    RATE: "lr_spike",
    "rate x1000": "lr_spike:factor=1000",
    "one bad batch": "bad_batch:steps=1",
    "three bad batches": "bad_batch:steps=3",
    MOMENTS: "moments",
    "NaN on rank 1": "nan_grad:rank=1",
    APART: "nan_grad:rank=1,alone=1",
}
GOES_BACK = (RATE, "rate x1000", MOMENTS)  # and replicas that parted
CLOSE = ("ddp", "fsdp2", "Trainer")  # shapes that meet every fault
NOBODY, NANO = "nobody", "nano"

Cell = tuple[str, int, str, str]  # shape, ranks, arm, fault


@dataclass(frozen=True)
class Result:
    """What came of one run.

    Attributes:
        code: exit code; None: it had to be ended after `LIMIT_S`.
        loss: at its end, NaN where it did not come to it.
        actions: verbs that changed the job, in order, other than pauses.
        back: the step that a rollback went to, and that at whose end it did; None without one.
        same: ranks that then held the bits that they had held. alike: all ranks hold the same bits
            behind every step; of ranks that were parted, behind every step since.
    """

    code: int | None
    loss: float
    actions: tuple[str, ...]
    back: tuple[int, int] | None
    same: int
    alike: bool


def cells() -> Iterator[Cell]:
    """Yield all runs, those that others are measured by first."""
    for shape in SHAPES:
        yield shape, 2, NANO, ""
        yield shape, 2, NANO, RATE
    for fault in FAULTS:
        yield "ddp", 2, NOBODY, fault
        yield from ((shape, 2, NANO, fault) for shape in CLOSE if fault != RATE)
    for shape in CLOSE:
        yield from ((shape, 4, NANO, fault) for fault in ("", *FAULTS))


def run(cell: Cell, path: Path) -> Result:
    """Start one run in `path` and read its result."""
    shape, ranks, arm, fault = cell
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    supervise = [sys.executable, "-m", "supervise", "run", "-q", "--policy", "nano"]
    supervise += ["--run-dir", str(path / "run")]
    supervise += ["--mode", "observe"] * (arm == NOBODY)
    if fault:
        supervise += ["--drill", f"{FAULTS[fault]}@{STEPS // 2}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(ranks), str(JOB), shape, str(path), str(STEPS)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (path / "out.txt").open("w") as out:
        command = [*supervise, "--", *torchrun]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()  # passed on to the job
            process.wait()
    return read(cell, code, path)


def read(cell: Cell, code: int | None, path: Path) -> Result:
    """Read a run directory and what the ranks wrote down."""
    _, ranks, _, fault = cell
    records = list(read_audit(path / "run" / "audit.log"))
    intents = [r["data"]["action"] for r in records if r["kind"] == "intent"]
    results = [r["data"].get("result") or {} for r in records if r["kind"] == "commit"]
    back = next(((r["step"], r["ack_step"]) for r in results if "from_step" in r), None)
    bits = []
    for rank in range(ranks):
        lines = (path / f"bits.{rank}").read_text().splitlines()
        bits.append({int(step): held for step, *held in map(str.split, lines)})
    # The weights of right before an update with damaged moments come back with older moments.
    kept = slice(1 if fault == MOMENTS else 2)
    same = sum(back is not None and held[back[0]][kept] == held[back[1]][kept] for held in bits)
    since = back[1] if back is not None and fault == APART else 0
    late = [{step: bits for step, bits in held.items() if step >= since} for held in bits]
    files = [path / f"loss.{rank}" for rank in range(ranks)]
    losses = [float(file.read_text()) for file in files if file.exists()]
    known = [loss for loss in losses if loss]  # the first stage of a pipeline has none
    return Result(
        code=code,
        loss=sum(known) / len(known) if len(losses) == ranks else math.nan,
        actions=tuple(
            each["verb"]
            for each in intents
            if each["touches_job"] and each["verb"] not in ("pause", "resume")
        ),
        back=back,
        same=same,
        alike=all(held == late[0] for held in late),
    )


def folder(cell: Cell) -> Path:
    """Return where a run is kept."""
    shape, ranks, arm, fault = cell
    return KEPT / re.sub(r"\W+", "-", f"{shape} {ranks} {fault or 'undisturbed'} {arm}")


def kept(cell: Cell) -> Result | None:
    """Return the result of a run, None if it was not made."""
    file = folder(cell) / RESULT
    if not file.exists():
        return None
    known = json.loads(file.read_text())
    back = known["back"] and tuple(known["back"])
    return Result(**{**known, "actions": tuple(known["actions"]), "back": back})


# ── judging and writing ───────────────────────────────────────────────────────────────────────────

HEAD = f"""# Several ranks under the shipped policy

Written by `python benchmarks/ranks.py`: torchrun and gloo on CPU, `nano` with no configuration,
{STEPS} steps, the fault at {STEPS // 2}. `loss` is relative to the undisturbed run; bold: more than
{NEAR:.1%} above it, other bits than before, or no rollback where one was due. `same`: ranks that
held their own bits again right behind the rollback; `alike`: all ranks hold the same bits behind
every step, where a fault parted them behind every step since (not asked of shards and stages).

## Each shape, two ranks, {RATE} for 20 steps

"""


def worse(result: Result, calm: Result | None) -> float:
    """Return how much higher its loss is, relative; infinite where it has none."""
    if calm is None:
        return math.nan
    return result.loss / calm.loss - 1 if math.isfinite(result.loss) else math.inf


def share(value: float) -> str:
    """Return a relative loss in words."""
    return f"{value:+.1%}" if math.isfinite(value) else "ruined" if value > 0 else "-"


def row(cell: Cell) -> tuple[list[str], bool]:
    """Return the row of a run that was made, and whether it missed."""
    shape, ranks, _, fault = cell
    result, calm = kept(cell), kept((shape, ranks, NANO, ""))
    assert result is not None
    more = worse(result, calm)
    apart = shape in REPLICAS and not result.alike
    due = fault in GOES_BACK or (fault == APART and shape in REPLICAS)
    undone = (due and result.back is None) or (result.back and result.same < ranks)
    missed = more > NEAR or apart or bool(undone) or result.code != 0
    loss = f"**{share(more)}**" if missed else share(more)
    back = [str(step) for step in result.back] if result.back else ["-", "-"]
    same = f"{result.same}/{ranks}" if result.back else "-"
    alike = ("yes" if result.alike else "**no**") if shape in REPLICAS else "-"
    done = ", ".join(result.actions) or "nothing"
    return [shape, str(ranks), fault, loss, done, *back, same, alike], missed


def written() -> tuple[str, list[str]]:
    """Return the page of all that was run, and the runs that missed."""
    names = ["shape", "ranks", "fault", "loss", "done", "back to", "at", "same", "alike"]
    first, second, missed = [names], [names], []
    for cell in dict.fromkeys(cells()):
        shape, ranks, arm, fault = cell
        result = kept(cell)
        if result is None or arm == NOBODY:
            continue
        if not fault:
            acted = bool(result.actions)
            missed += [f"{shape}, {ranks} ranks: undisturbed, acted on"] * acted
            continue
        line, bad = row(cell)
        missed += [f"{shape}, {ranks} ranks: {fault}"] * bad
        if fault == RATE and ranks == 2:
            first.append(line)
        if shape in CLOSE:
            second.append(line)
    page = HEAD + table(first) + "\n## Each fault\n\n" + table(second)
    calm = kept(("ddp", 2, NANO, ""))
    alone = [["fault", "loss"]]
    for fault in FAULTS:
        result = kept(("ddp", 2, NOBODY, fault))
        if result is not None:
            alone.append([fault, share(worse(result, calm))])
    return page + "\n## Nobody acts, ddp, two ranks\n\n" + table(alone), missed


def main() -> int:
    """Run what is missing, write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: all")
    parser.add_argument("--ranks", action="append", type=int, help="default: 2 and 4")
    parser.add_argument("--fault", action="append", help="one of them; default: all")
    parser.add_argument("--again", action="store_true", help="run anew what is kept")
    parser.add_argument("--table", action="store_true", help="run nothing, write what is kept")
    options = parser.parse_args()
    for cell in dict.fromkeys(cells()):
        shape, ranks, _, fault = cell
        named = ((shape, options.shape), (ranks, options.ranks), (fault, options.fault))
        chosen = all(not names or name in names for name, names in named)
        if chosen and not options.table and (options.again or kept(cell) is None):
            result = run(cell, folder(cell))
            (folder(cell) / RESULT).write_text(json.dumps(asdict(result)))
            print(folder(cell).name, result, flush=True)
    page, missed = written()
    TABLE.write_text(page)
    print(page)
    print("\n".join(f"missed: {each}" for each in missed))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
