"""How often the canary gate passes and fails candidates that are known; writes `canary.md`.

    python benchmarks/canary.py [--seeds 5] [--steps 300] [--out benchmarks/.canary]

Per seed the example trains a baseline and three candidates on the same batches, from another
initialization: the same program (A/A), one whose loss is 0.05 nat higher, and one with a tenth of
the learning rate. A run that has ended is not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from supervise.cli import invoke
from supervise.store.run_outcome import skim

HERE = Path(__file__).parent
RATE = 2e-3  # of the example
ARMS = {  # initialization beside the seed, shift in nats, learning rate
    "baseline": (0, 0.0, RATE),
    "the same program (A/A)": (500, 0.0, RATE),
    "loss +0.05 nat": (500, 0.05, RATE),
    "a tenth of the learning rate": (500, 0.0, RATE / 10.0),
}
BASELINE, SAME, *_ = ARMS
VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "VOID")
CALIBRATED, SEEDS = 4, 3
METHOD = (
    "verdicts of `supervise canary compare` with its defaults (margin 0.03 nat, alpha 5 %, 50 "
    "steps of warm-up). Both arms of a pair read the same batches and start from different "
    "weights. A seed is in several of the comparisons of a row, which are not independent where "
    "A/A pairs or several seeds are used."
)


def folder(out: Path, arm: str, seed: int) -> Path:
    """Return the directory of a run."""
    return out / f"{list(ARMS).index(arm)}-{seed}"


def train(out: Path, arm: str, seed: int, steps: int) -> None:
    """Make a run, unless it is there."""
    run = folder(out, arm, seed)
    if (run / "audit.log").is_file() and skim(run / "audit.log").end is not None:
        return
    shutil.rmtree(run, ignore_errors=True)
    init, shift, rate = ARMS[arm]
    job = [sys.executable, str(HERE / "canary_job.py"), str(init + seed), str(shift)]
    job += ["--seed", str(seed), "--steps", str(steps), "--lr", str(rate)]
    job += ["--out", str(out / "checkpoints"), "--checkpoint-every", str(10 * steps)]
    watch = [sys.executable, "-m", "supervise", "--policy", "observe", "--run-dir", str(run), "--"]
    with (out / "output.log").open("ab") as log:
        subprocess.run([*watch, *job], stdout=log, stderr=log, check=True)
    print(run, flush=True)


def compare(*argv: object) -> tuple[str, float]:
    """Return verdict and effect of `supervise canary compare`."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        invoke(["canary", "compare", *map(str, argv), "--json"])
    found = json.loads(text.getvalue())
    return found["verdict"], found["effect"]["mean"]


def ways(out: Path, arm: str, seeds: int) -> Iterator[tuple[str, list[list[object]]]]:
    """Yield how candidates are judged, and the arguments of each comparison."""

    def pair(seed: int, of: str = arm) -> list[object]:
        return [folder(out, BASELINE, seed % seeds), folder(out, of, seed % seeds)]

    yield "one pair", [pair(seed) for seed in range(seeds)]
    calibrated = [
        [*pair(seed), *(word for n in others for word in ("--calibrate", *pair(n, SAME)))]
        for seed in range(seeds)
        for others in (range(seed + 1, seed + 1 + CALIBRATED),)
    ]
    yield f"one pair, {CALIBRATED} A/A pairs of other seeds", calibrated
    several = [
        [path for n in range(seed, seed + SEEDS) for path in pair(n)] for seed in range(seeds)
    ]
    yield f"{SEEDS} seeds", several


def table(out: Path, seeds: int, steps: int) -> str:
    """Judge all runs and return the page."""
    command = f"python benchmarks/canary.py --seeds {seeds} --steps {steps}"
    lines = [
        "# The canary gate on the example",
        "",
        textwrap.fill(f"`{command}`: {METHOD}", 100, break_on_hyphens=False),
        "",
        f"| candidate | judged from | {' | '.join(VERDICTS)} | effect, nat |",
        f"|---|---|{'---|' * len(VERDICTS)}---|",
    ]
    for arm in list(ARMS)[1:]:
        for way, comparisons in ways(out, arm, seeds):
            found = [compare(*argv) for argv in comparisons]
            counts = Counter(verdict for verdict, _ in found)
            cells = " | ".join(str(counts[verdict]) for verdict in VERDICTS)
            low, high = min(e for _, e in found), max(e for _, e in found)
            lines.append(f"| {arm} | {way} | {cells} | {low:+.3f} to {high:+.3f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Make what runs are missing, and the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=HERE / ".canary")
    args = parser.parse_args()
    if args.seeds <= CALIBRATED:
        parser.error(f"--seeds must be more than {CALIBRATED}")
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for arm in ARMS:
            train(args.out, arm, seed, args.steps)
    page = table(args.out, args.seeds, args.steps)
    (HERE / "canary.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
