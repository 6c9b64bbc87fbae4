"""Record the proving ground: run each program with each fault once, and keep its frames.

    python benchmarks/proving/record.py                     all that is missing; can be interrupted
    python benchmarks/proving/record.py --only lstm_sgd --again
    python benchmarks/proving/record.py --step-ms 20 --out FOLDER

A run is watched under `nano` in mode observe, so that nothing acts; its frames become a table in
`recordings/<program>.parquet`, a row per frame, with the columns run, step, rank, attempt and a
column per metric (float32; absent is null, NaN is NaN). What is not in the frames is in
`recordings/<program>.json`: of each run its fault, the drill with all of its parameters, the row
where that began, the final loss, and the median time of a step. A run is made anew where its drill
has changed since.

`--step-ms N` lengthens each step to N ms by a sleep, so that the share of the probe is one of N ms.
A program whose own steps are longer, measured first, keeps these; there the probe gets so much less
than its share.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
from grid import FAULTS, HEALTHY, PROGRAMS, Cell, Program, cells
from pyarrow import parquet

from supervise.catalog import parse_drill
from supervise.core.model import plain_json
from supervise.store import RunDir, read_rows
from supervise_probe import faults

HERE = Path(__file__).parent
RECORDINGS = HERE / "recordings"
# Of the machine and not of the training: they differ in each recording and judge nothing here.
LEFT_OUT = re.compile(
    r"(host|gpu|disk|device|open_files|checkpoint|probe_|heartbeat|metrics_)"
    r"|.*_time$|tokens_per_sec|mfu|.*_stall_frac|.*_time_frac"
)
REFUSED = re.compile(r"drill \w+ is refused: [^\"]*")
SEEDS = 100  # more than anybody records
SHARE = 0.01  # of a step, for the probe, by default
CALIBRATION = 100  # steps that tell how long a program's own are
LONGEST_S = 1800  # of a run; on a busy machine
KEYS = ("run", "step", "rank", "attempt")


@dataclass(frozen=True)
class Pace:
    """The least time of a step, 0 for the program's own, and the share of it for the probe."""

    step_ms: float = 0.0
    share: float = SHARE


def pace_of(program: Program, step_ms: float) -> Pace:
    """Return how a program is run so that the probe gets its share of `step_ms`."""
    if not step_ms:
        return Pace()
    known, _ = record(Cell(replace(program, steps=CALIBRATION), HEALTHY, 0, -1), Pace())
    return Pace(step_ms, SHARE * min(1.0, step_ms / known["step_ms"]))


def command(cell: Cell, run: Path, pace: Pace) -> list[str]:
    """Return the command that makes one run."""
    program = cell.program
    script = [str(HERE / "programs" / f"{program.name}.py")]
    if program.ranks > 1:
        script = ["-m", "torch.distributed.run", f"--nproc-per-node={program.ranks}", *script]
    drill = []
    if cell.fault != HEALTHY:
        drill = ["--drill", f"{FAULTS[cell.fault]}@{cell.row}"]
    policy = "nano"
    if pace.share < SHARE:
        policy = str(run.with_suffix(".yaml"))
        text = f"version: supervise/v1\nextends: nano\nprobe: {{share: {pace.share:.3%}}}\n"
        Path(policy).write_text(text)
    supervise = [sys.executable, "-m", "supervise", "--policy", policy, "--mode", "observe"]
    job = [sys.executable, *script, f"--steps={program.steps}", f"--seed={cell.seed}"]
    job += [f"--step-ms={pace.step_ms}"] if pace.step_ms else []
    return [*supervise, "-q", "--run-dir", str(run), *drill, "--", *job]


def drill(cell: Cell) -> dict[str, Any]:
    """Return the drill that makes a fault, with all of its parameters; nothing in a healthy run."""
    if cell.fault == HEALTHY:
        return {}
    return plain_json(parse_drill(f"{FAULTS[cell.fault]}@{cell.row}"))


def moved(cell: Cell) -> str:
    """Return the metric that the drill of a cell says it moves."""
    order = drill(cell)
    return faults.fault_classes()[order["fault"]].moves(order["params"]) if order else ""


def record(cell: Cell, pace: Pace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a cell; return what is known of it and its rows.

    Raises:
        RuntimeError: the run failed for another reason than its fault, or has nothing to strike.
    """
    with tempfile.TemporaryDirectory() as home:
        run = Path(home) / "run"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": home}
        started = time.monotonic()
        done = subprocess.run(
            command(cell, run, pace),
            cwd=home,
            env=env,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
        took_s = time.monotonic() - started
        if done.returncode:
            raise RuntimeError(f"{cell.program.name} {cell.name}: {done.stderr[-2000:]}")
        if refused := REFUSED.search((run / "audit.log").read_text()):
            raise RuntimeError(f"{cell.program.name} {cell.name}: {refused[0]}")
        final = re.findall(r"^final_loss (\S+)", done.stdout, re.MULTILINE)
        rows, times = [], []
        for step, rank, attempt, _, values in read_rows(RunDir.open(run)):
            kept = {n: v for n, v in values.items() if not LEFT_OUT.match(n) or n == moved(cell)}
            rows.append({"run": cell.name, "step": step, "rank": rank, "attempt": attempt, **kept})
            if "step_time" in values:
                times.append(1e3 * values["step_time"])
    known = {
        "fault": cell.fault,
        "drill": drill(cell),
        "seed": cell.seed,
        "row": cell.row,
        "final_loss": float(final[-1]),
        "step_ms": round(median(times), 2),
        "share": round(pace.share, 6),
        "took_s": round(took_s, 1),
    }
    return known, rows


def load(program: Program, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what is recorded of a program so far."""
    about = folder / f"{program.name}.json"
    if not about.exists():
        return {}, []
    table = parquet.read_table(folder / f"{program.name}.parquet")
    rows = [{k: v for k, v in row.items() if v is not None} for row in table.to_pylist()]
    return json.loads(about.read_text()), rows


def save(program: Program, known: dict[str, Any], rows: list[dict[str, Any]], folder: Path) -> None:
    """Write the recordings of a program."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted({name for row in rows for name in row} - {*KEYS})
    types = [("run", pa.dictionary(pa.int16(), pa.string())), ("step", pa.int32())]
    types += [("rank", pa.int8()), ("attempt", pa.int16())]
    schema = pa.schema([*types, *((name, pa.float32()) for name in names)])
    columns = [[row.get(name) for row in rows] for name in (*KEYS, *names)]
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema)
    path = folder / f"{program.name}.parquet"
    parquet.write_table(
        table,
        path,
        compression="zstd",
        compression_level=19,
        use_dictionary=["run"],
        use_byte_stream_split=names,
    )
    text = json.dumps(dict(sorted(known.items())), indent=1)
    path.with_suffix(".json").write_text(text + "\n")


def main() -> int:
    """Record what is missing, two runs at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="programs; default: all")
    parser.add_argument("--again", action="store_true", help="record anew what is there")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, help="default: all")
    parser.add_argument("--seeds", type=int, default=2, help="of each fault")
    parser.add_argument("--healthy-seeds", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--step-ms", type=float, default=0.0, help="least wall time of a step")
    parser.add_argument("--out", type=Path, default=RECORDINGS, help="where recordings are kept")
    options = parser.parse_args()
    if options.step_ms and options.out == RECORDINGS:
        parser.error("--step-ms needs --out: recordings here are made at the programs' own speed")
    failed = 0
    for program in PROGRAMS:
        if options.only and program.name not in options.only:
            continue
        known, rows = ({}, []) if options.again else load(program, options.out)
        wanted = list(cells(program, options.seeds, options.healthy_seeds))
        chosen = {HEALTHY, *(options.faults or FAULTS)}
        is_known = {c.name: known[c.name]["drill"] == drill(c) for c in wanted if c.name in known}
        missing = [c for c in wanted if c.fault in chosen and not is_known.get(c.name)]
        # Made under another drill, or by one that has nothing to strike in this program.
        of_program = {c.name for c in cells(program, SEEDS, SEEDS)} - {c.name for c in missing}
        known = {name: run for name, run in known.items() if name in of_program}
        rows = [row for row in rows if row["run"] in of_program]
        pace = pace_of(program, options.step_ms if missing else 0.0)
        with ThreadPoolExecutor(options.jobs) as pool:
            runs = {cell: pool.submit(record, cell, pace) for cell in missing}
            for number, (cell, run) in enumerate(runs.items(), 1):
                try:
                    known[cell.name], more = run.result()
                except (RuntimeError, subprocess.SubprocessError) as error:
                    print(f"failed: {error}", file=sys.stderr)
                    failed += 1
                    continue
                rows += more
                print(f"{program.name} {cell.name} {number}/{len(missing)}", flush=True)
                if number % 8 == 0:
                    save(program, known, rows, options.out)
        if missing:
            save(program, known, rows, options.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
