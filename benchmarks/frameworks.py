"""Unmodified jobs of six kinds, four faults: what the shipped policy makes of them.

    python benchmarks/frameworks.py                      all that is missing; can be interrupted
    python benchmarks/frameworks.py --job litgpt --again  these once more

Each job of a few hundred steps is hit half-way under `nano` as it is shipped, with no other
configuration, and once more in mode `observe`, in which nobody acts. `undisturbed` are two seeds
under `nano` that nothing is injected into; the final loss is held out, and of seed 0 it is bit for
bit that of the job alone. The last rows have no room for savepoints: a rollback in process is
refused, and the policy that `supervise init` writes for the job starts it again from its own
checkpoint, beside four busy loops on two cores: with job and supervisor a load of six.

Writes `benchmarks/frameworks.md`; finished runs are kept in `benchmarks/.frameworks/`. Exit code 1:
a run ended more than 1.5 % and two standard deviations of the seeds above the undisturbed one, or
0.5 % and as much above what nobody made of it; a relaunch case trained on, ruined, to its end; an
undisturbed run was acted on.
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
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from recovery import table

from supervise.store import RunDir, read_audit, read_rows

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "proving" / "programs"
KEPT, TABLE, RESULT = HERE / ".frameworks", HERE / "frameworks.md", "result.json"
CACHE = Path(tempfile.gettempdir()) / "supervise-frameworks"  # litgpt compiles once, not 10 times
LIMIT_S = {"nobody": 300.0, "nano": 300.0, "relaunch": 900.0}  # by arm: a start takes a minute
BURNERS = 4
NEAR, DEARER = 0.015, 0.005  # of the undisturbed loss, beside two deviations of the seeds
SUPERVISE = (sys.executable, "-m", "supervise")


@dataclass(frozen=True)
class Job:
    """One training job.

    Attributes:
        args: behind `python`, relative to the folder of programs. Its seed, and where its
            checkpoints go, are the options `seed` and `out`.
        steps: it makes; the fault begins half-way.
    """

    name: str
    args: tuple[str, ...]
    steps: int = 400
    seed: str = "--seed"
    out: str = "--out"

    def command(self, seed: int, out: Path | None) -> list[str]:
        """Return its command line; without `out` it saves nothing where it can be helped."""
        command = [sys.executable, *self.args, f"{self.seed}={seed}"]
        return [*command, f"{self.out}={out}"] if out else command


LITGPT = ("-m", "litgpt", "pretrain", f"--config={PROGRAMS / 'litgpt.yaml'}")
JOBS = (
    Job("Trainer", (str(PROGRAMS / "hf_trainer.py"),)),
    Job("accelerate", (str(PROGRAMS / "accelerate_loop.py"),), out="--output_dir"),
    Job("Lightning", (str(PROGRAMS / "lightning_fit.py"),)),
    Job("litgpt", LITGPT, seed="--data.seed", out="--out_dir"),
    Job("for loop", (str(PROGRAMS / "byte_gpt.py"), "--steps=400", "--rows=24")),
    Job("while loop", (str(PROGRAMS / "byte_gpt_noisy.py"),), 800),
)
RATE = "rate x1000"
FAULTS = {
    "rate x30": "lr_spike",
    RATE: "lr_spike:factor=1000",
    "three bad batches": "bad_batch:steps=3",
    "second moments / 10000": "moments",
}
NOBODY, NANO, RELAUNCH = "nobody", "nano", "relaunch"
RELAUNCHED = JOBS[:4]


@dataclass(frozen=True)
class Result:
    """What came of one run.

    Attributes:
        code: exit code; None: it had to be ended after LIMIT_S.
        loss: the job's own, at its end; None where it did not come to it.
        actions: verbs that touched the job, in order.
        lost: steps that were thrown away, made again or skipped.
        held: whether an incident waits for a person.
    """

    code: int | None
    loss: float | None
    actions: tuple[str, ...]
    lost: int
    held: bool


def run(job: Job, arm: str, fault: str, seed: int, path: Path) -> Result:
    """Start one run in `path` and read its result."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    out = path / "out" if arm == RELAUNCH or job.name == "litgpt" else None
    command = job.command(seed, out)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAMS), "TMPDIR": str(path)}
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE))
    policy = "nano"
    if arm == RELAUNCH:
        policy = str(path / "supervise.yaml")
        init = [*SUPERVISE, "init", "--out", policy, "--", *command]
        subprocess.run(init, cwd=path, env=env, check=True, capture_output=True)
        with Path(policy).open("a") as file:
            file.write("savepoints: {max_bytes: 4096, spill: none}\n")  # none fits
    start = [*SUPERVISE, "run", "-q", "--policy", policy, "--run-dir", str(path / "run")]
    start += ["--mode", "observe"] * (arm == NOBODY)
    if fault:
        start += ["--drill", f"{FAULTS[fault]}@{job.steps // 2}"]
    with (path / "out.txt").open("w") as stdout, (path / "err.txt").open("w") as stderr:
        process = subprocess.Popen(
            [*start, "--", *command], stdout=stdout, stderr=stderr, env=env, cwd=path
        )
        try:
            code: int | None = process.wait(LIMIT_S[arm])
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()  # passed on to the job
            process.wait()
    return read(job, code, path)


def read(job: Job, code: int | None, path: Path) -> Result:
    """Read a run directory and the job's output."""
    found = RunDir.open(path / "run")
    records = list(read_audit(found.audit_path))
    intents = [r["data"]["action"] for r in records if r["kind"] == "intent"]
    frames = [row.values for row in read_rows(found) if row.rank == 0]
    results = [r["data"].get("result") or {} for r in records if r["kind"] == "commit"]
    back = sum(r["from_step"] - r["step"] for r in results if "from_step" in r)
    skipped = sum(bool(values.get("update_skipped")) for values in frames)
    said = re.findall(r"(?:final_loss |Final .* val loss: )(\S+)", (path / "out.txt").read_text())
    held = [r["data"].get("what") for r in records if r["kind"] == "incident"]
    return Result(
        code=code,
        loss=float(said[-1]) if said else None,
        actions=tuple(a["verb"] for a in intents if a["touches_job"]),
        lost=back + skipped + max(0, len(frames) - job.steps),
        held="held" in held,
    )


@contextmanager
def load(loops: int) -> Iterator[None]:
    """Keep so many loops busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


Cell = tuple[Job, str, str, int]  # job, arm, fault, seed


def cells(job: Job) -> Iterator[Cell]:
    """Yield the runs of a job; the undisturbed ones first."""
    yield from ((job, NANO, "", seed) for seed in (0, 1))
    yield from ((job, arm, fault, 0) for fault in FAULTS for arm in (NOBODY, NANO))
    if job in RELAUNCHED:
        yield job, RELAUNCH, RATE, 0


def folder(cell: Cell) -> Path:
    """Return where a run is kept."""
    job, arm, fault, seed = cell
    return KEPT / re.sub(r"\W+", "-", f"{job.name} {fault or 'undisturbed'} {arm} {seed}")


def make(cell: Cell) -> None:
    """Run one and keep its result."""
    job, arm, fault, seed = cell
    path = folder(cell)
    with load(BURNERS if arm == RELAUNCH else 0):
        result = run(job, arm, fault, seed, path)
    (path / RESULT).write_text(json.dumps(asdict(result)))
    print(path.name, result, flush=True)


def kept(cell: Cell) -> Result | None:
    """Return the result of a run, None if it was not made."""
    file = folder(cell) / RESULT
    if not file.exists():
        return None
    known = json.loads(file.read_text())
    return Result(**{**known, "actions": tuple(known["actions"])})


# ── judging and writing ───────────────────────────────────────────────────────────────────────────

HEAD = """# Jobs that know nothing of the supervisor

Written by `python benchmarks/frameworks.py`: the shipped policy `nano` with no configuration. The
fault begins half-way; a rate is wrong for 20 steps. Losses are held out, relative to the
undisturbed run of the same seed. Bold: {near:.1%} and two standard deviations of the seeds above
it, or {dearer:.1%} and as much above nobody's. `lost`: steps thrown away, made again or skipped.

"""
UNDISTURBED = "\n## Undisturbed\n\n"
RELAUNCHES = f"""
## Started again, at load {BURNERS + 2}

Under the five lines that `supervise init` writes, with no room for a savepoint, beside {BURNERS}
busy loops on two cores.

"""


def deviation(calm: Sequence[Result | None]) -> float:
    """Return two standard deviations of the undisturbed losses, relative to the first; 0 of one."""
    first, *more = (one.loss for one in calm if one is not None and one.loss)
    return 2 * abs(first - more[0]) / math.sqrt(2) / first if more else 0.0


def worse(result: Result | None, calm: Result) -> float:
    """Return how much higher its loss is, relative; infinite without one, NaN without a run."""
    if result is None or calm.loss is None:
        return math.nan
    if result.loss is None or not math.isfinite(result.loss):
        return math.inf
    return result.loss / calm.loss - 1


def misses(ours: float, nobody: float, spread: float) -> bool:
    """Return whether a supervised run is too far above the undisturbed or the unaided one."""
    far, dearer = ours > NEAR + spread, ours > nobody + DEARER + spread
    return dearer or (far and nobody > ours)


def share(value: float) -> str:
    """Return a relative loss in words."""
    if math.isnan(value):
        return "not run"
    return f"{value:+.1%}" if math.isfinite(value) else "ruined"


def done(result: Result | None) -> str:
    """Return the actions of a run and how it ended, in words."""
    if result is None:
        return "-"
    said = [", ".join(v for v in result.actions if v not in ("pause", "resume")) or "nothing"]
    said += ["held"] * result.held
    said += [f"exit code {result.code}"] * (result.code != 0)
    return "; ".join(said)


def row(cell: Cell, calm: Sequence[Result | None]) -> tuple[list[str], bool]:
    """Return the row of a fault, supervised, and whether it missed.

    Args:
        calm: the undisturbed runs of its job, the first one made.
    """
    job, arm, fault, _ = cell
    assert calm[0] is not None
    result, spread = kept(cell), deviation(calm)
    ours, nobody = worse(result, calm[0]), worse(kept((job, NOBODY, fault, 0)), calm[0])
    if arm == RELAUNCH:
        missed = result is not None and result.code == 0 and not result.held
        missed = missed and ours > NEAR + spread
    else:
        missed = misses(ours, nobody, spread)
    loss = f"**{share(ours)}**" if missed else share(ours)
    before = [] if arm == RELAUNCH else [share(nobody)]
    return [
        job.name,
        fault,
        *before,
        loss,
        done(result),
        str(result.lost) if result else "-",
    ], missed


def written() -> tuple[str, list[str]]:
    """Return the page of all that was run, and the runs that missed."""
    rows: dict[str, list[list[str]]] = {NANO: [], RELAUNCH: []}
    healthy, missed = [["job", "steps", "seed 0", "seed 1", "2 sd", "actions"]], []
    for job in JOBS:
        calm = [kept((job, NANO, "", seed)) for seed in (0, 1)]
        if calm[0] is None:
            continue
        losses = [f"{one.loss:.4f}" if one and one.loss else "not run" for one in calm]
        acted = sum(len(one.actions) for one in calm if one)
        healthy.append([job.name, str(job.steps), *losses, f"{deviation(calm):.1%}", str(acted)])
        missed += [f"{job.name}: undisturbed, acted on"] * bool(acted)
        for cell in cells(job):
            if cell[2] and cell[1] in rows:
                line, bad = row(cell, calm)
                rows[cell[1]].append(line)
                missed += [f"{job.name}: {cell[2]}, {cell[1]}"] * bad
    page = HEAD.format(near=NEAR, dearer=DEARER)
    page += table([["job", "fault", "nobody", "supervised", "what was done", "lost"], *rows[NANO]])
    page += UNDISTURBED + table(healthy) + RELAUNCHES
    page += table([["job", "fault", "final loss", "what was done", "lost"], *rows[RELAUNCH]])
    return page, missed


def main() -> int:
    """Run what is missing, write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--job", action="append", help="name of a job; default: all")
    parser.add_argument("--fault", action="append", help="one of its faults; default: all")
    parser.add_argument("--arm", action="append", choices=(NOBODY, NANO, RELAUNCH))
    parser.add_argument("--again", action="store_true", help="run anew what is kept")
    parser.add_argument("--table", action="store_true", help="run nothing, write what is kept")
    options = parser.parse_args()
    wanted = [cell for job in JOBS for cell in cells(job) if chosen(cell, options)]
    for cell in wanted:
        if not options.table and (options.again or kept(cell) is None):
            make(cell)
    page, missed = written()
    TABLE.write_text(page)
    print(page)
    print("\n".join(f"missed: {each}" for each in missed))
    return int(bool(missed))


def chosen(cell: Cell, options: argparse.Namespace) -> bool:
    """Return whether the options name a run."""
    job, arm, fault, _ = cell
    named = ((job.name, options.job), (arm, options.arm), (fault, options.fault))
    return all(not names or name in names for name, names in named)


if __name__ == "__main__":
    sys.exit(main())
