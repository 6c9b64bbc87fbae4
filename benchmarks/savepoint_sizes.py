"""What savepoints cost models of 0.8, 10 and 100 million parameters under `nano` as it is shipped.

    python benchmarks/savepoint_sizes.py [--only 0.8 10 100] [--seconds S] [--spectra]

Trains a GPT of each size under `supervise run --policy nano`, and once more the smallest where none
of its savepoints fits into the memory that is allowed. The job looks at the controller of its own
probe: when it took a savepoint, how long that held the loop, and what memory they hold then.

`take` is the CPU time of one, median; `wall` the same as the loop saw it, on a busy machine
several times that. `apart`: steps between two, the newest; the policy wants 25. `share`: CPU time
of all savepoints in the wall time behind the `first`, which is paid once; a tenth of a second is
left out, which is free. `behind`: what the two steps after one take longer than usual, median, as a
thread may be writing it to disk. `disk`: CPU time of all other threads of the job, from its start.
`MB` are those in memory, at most. `said`: the console in the first minute, about the rollback.

`--spectra` trains the 10 million alone, with `mechanisms: {}` beside `nano`, for ten minutes: CPU
time of the process beside the job, with its start, and of the copies in the job, in the wall time,
which is what `share` limits, and in the CPU time of the job, which is less on a busy machine.

Exit code 1 when a share is above 0.5 %, or memory above an eighth of the host's; with `--spectra`
above 1 % of one CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from step_job import load_example

SIZES = {"0.8": (4, 128, 12), "10": (6, 384, 4), "100": (14, 768, 2)}  # layers, width, windows
SECONDS = {"0.8": 60.0, "10": 150.0, "100": 700.0}
SHARE, MEMORY = 0.005, 1 / 8  # limits: of the time, and of the host's memory
SPECTRA, SPECTRA_S = 0.01, 600.0  # limit: of one CPU; what starts the process is in it
FREE_S = 0.1  # see the probe's `savepoints/controller.py`
HERE = Path(__file__).resolve()
HEAD = (
    "million",
    "step ms",
    "number",
    "take ms",
    "wall ms",
    "apart",
    "share",
    "behind ms",
    "disk",
    "MB",
)


def train(size: str, seconds: float) -> None:
    """Train, and print what the savepoints did as one line of JSON. Runs as the job."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    nano = load_example()
    layers, width, windows = SIZES[size]
    shape = nano.Shape(layers=layers, width=width)
    model = nano.GPT(shape)
    optimizer = nano.make_optimizer(model, 3e-4)
    training, _ = nano.load_text()
    taken: list[dict[str, float]] = []
    steps: list[float] = []
    copies: list[float] = []
    before_s = time.process_time()
    began, watched = time.perf_counter(), False
    while time.perf_counter() - began < seconds:
        watched = watched or (watch(taken, steps) and watch_copies(copies))
        since = time.perf_counter()
        starts = torch.randint(len(training) - shape.context, (windows,))
        loss = model(*nano.windows(training, starts, shape.context))
        loss.backward()
        loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps.append(time.perf_counter() - since)
    answer = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "end": time.perf_counter(),
        "threads_cpu": time.process_time() - time.thread_time(),
        "steps": steps,
        "taken": taken,
        "wall_s": time.perf_counter() - began,
        "job_s": time.process_time() - before_s,
        "copies_s": sum(copies),
        "beside_s": cpu_beside(),
    }
    print(json.dumps(answer), flush=True)


def watch(taken: list[dict[str, float]], steps: list[float]) -> bool:
    """Time what the probe's controller does; false while there is none yet."""
    rank = sys.modules["_supervise_probe"]._probe.parts.rank
    if rank is None:
        return False
    take_due, held = rank.rollbacks.take_due_savepoint, rank.rollbacks._savepoints

    def timed() -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        take_due()
        took = {"wall": time.perf_counter() - wall, "cpu": time.thread_time() - cpu}
        taken.append({"step": len(steps), "at": wall, "held": held.held, **took})

    rank.rollbacks.take_due_savepoint = timed
    return True


def watch_copies(costs: list[float]) -> bool:
    """Have the CPU time of the copies for spectra, in the loop and in the thread that writes."""
    pairs = sys.modules["_supervise_probe"]._probe.parts.pairs
    spend, write = pairs._spend, pairs._write

    def count(cost_ns: int) -> None:
        costs.append(cost_ns / 1e9)
        spend(cost_ns)

    def timed(*args: Any) -> None:
        cpu = time.thread_time()
        write(*args)
        costs.append(time.thread_time() - cpu)

    pairs._spend, pairs._write = count, timed
    return True


def cpu_beside() -> float:
    """Return the CPU time of the process that computes spectra, 0 where there is none."""
    family = psutil.Process(os.getppid()).children(recursive=True)
    members = [p.cpu_times() for p in family if any("mechanisms.py" in a for a in p.cmdline())]
    return max((float(times.user + times.system) for times in members), default=0.0)


def measure(
    size: str, seconds: float, allowed: str = "", more: str = ""
) -> tuple[dict[str, Any], str]:
    """Run the job; return what it says, and the console's word about rollbacks."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.yaml"
        memory = f"savepoints: {{max_bytes: {allowed}}}\n" if allowed else ""
        policy.write_text(f"version: supervise/v1\nextends: nano\npolicy: sizes\n{memory}{more}")
        job = [sys.executable, str(HERE), "--train", size, "--seconds", str(seconds)]
        supervise = [sys.executable, "-m", "supervise", "--run-dir", str(Path(folder) / "run")]
        found = subprocess.run(
            [*supervise, "--policy", str(policy), "--", *job],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    answer = next((x for x in found.stdout.splitlines() if x.startswith('{"parameters"')), None)
    if answer is None:
        raise SystemExit(f"savepoint_sizes.py: the job failed:\n{found.stdout}{found.stderr}")
    print(answer, file=sys.stderr)
    said = next((x for x in found.stderr.splitlines() if "rollback: " in x), "nothing")
    return json.loads(answer), said.partition("rollback: ")[2].partition(" · ")[0]


def spectra(seconds: float) -> bool:
    """Print the row of the spectra; return whether it keeps the limit."""
    answer, _ = measure("10", seconds, more="mechanisms: {}\n")
    steps = answer["steps"]
    cost = answer["beside_s"] + answer["copies_s"]
    share = cost / answer["wall_s"]
    names = "million", "step ms", "steps", "beside s", "copies s", "of wall", "of CPU"
    print(" ".join(f"{name:>9}" for name in names))
    cells = f"{answer['parameters'] / 1e6:.1f}", f"{1e3 * median(steps):.0f}", str(len(steps))
    cells += f"{answer['beside_s']:.2f}", f"{answer['copies_s']:.2f}"
    cells += f"{share:.2%}", f"{cost / answer['job_s']:.2%}"
    good = answer["beside_s"] > 0.0 and share <= SPECTRA
    print(" ".join(f"{cell:>9}" for cell in cells) + f"  {'PASS' if good else 'FAIL'}", flush=True)
    return good


def row(answer: dict[str, Any]) -> tuple[list[str], bool]:
    """Return the cells of one size, and whether it keeps the limits."""
    taken, steps = answer["taken"], answer["steps"]
    if not taken:
        return [f"{answer['parameters'] / 1e6:.1f}", f"{1e3 * median(steps):.0f}", "0"], True
    usual, places = median(steps), [int(each["step"]) for each in taken]
    first, later = taken[0], taken[1:] or taken
    passed = answer["end"] - first["at"] - first["wall"]
    share = max(0.0, sum(each["cpu"] for each in taken[1:]) - FREE_S) / passed
    held = max(each["held"] for each in taken)
    behind = [
        sum(steps[at : at + 2]) - each["wall"] - 2 * usual
        for at, each in zip(places, taken, strict=True)
    ]
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cells = [
        f"{answer['parameters'] / 1e6:.1f}",
        f"{1e3 * usual:.0f}",
        str(len(taken)),
        f"{1e3 * first['cpu']:.0f}",
        f"{1e3 * median(each['cpu'] for each in later):.0f}",
        f"{1e3 * median(each['wall'] for each in later):.0f}",
        str(places[-1] - places[-2]) if places[1:] else "-",
        f"{share:.2%}",
        f"{1e3 * median(behind):+.0f}",
        f"{max(0.0, answer['threads_cpu']) / passed:.2%}",
        f"{held / 1e6:.0f} of {host * MEMORY / 1e6:.0f}",
    ]
    return cells, share <= SHARE and held <= host * MEMORY


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(SIZES))
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--spectra", action="store_true", help="what spectra cost instead")
    parser.add_argument("--train", metavar="SIZE", help="used by itself")
    args = parser.parse_args()
    if args.train:
        train(args.train, args.seconds)
        return 0
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one thread")
    if args.spectra:
        return int(not spectra(args.seconds or SPECTRA_S))
    print(" ".join(f"{name:>9}" for name in HEAD) + "  said")
    good = True
    runs = [(size, args.seconds or SECONDS[size], "") for size in args.only]
    for size, seconds, allowed in [*runs, (args.only[0], 20.0, "4000000")]:
        answer, said = measure(size, seconds, allowed)
        cells, kept = row(answer)
        good &= kept
        print(" ".join(f"{c:>9}" for c in cells) + f"  {'' if kept else 'FAIL '}{said}", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
