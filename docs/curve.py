"""Draws `docs/curve.svg`, the picture of the README, from the losses in `docs/curve.csv`.

    python docs/curve.py             # draw
    python docs/curve.py --record    # train twice (2 min), write the losses, draw

Both runs are the example under the drill `lr_spike@150`: once observed, once under `nano`.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "curve", "font.family": "sans-serif"}

from matplotlib import pyplot as plt  # noqa: E402

HERE = Path(__file__).parent
LOSSES, PICTURE = HERE / "curve.csv", HERE / "curve.svg"
TRAIN = HERE.parent / "examples" / "nano" / "train.py"
FAULT, FAULT_STEP, STEPS = "lr_spike", 150, 600
MODES = {"unwatched": "observe", "supervise": "enforce"}
COLORS = {"unwatched": "#d1495b", "supervise": "#2a7fba"}
GREY = "#808080"  # readable on a light and on a dark page


def record(mode: str) -> list[str]:
    """Train the example under the drill; return its loss of each step."""
    command = [sys.executable, "-m", "supervise"]
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        drill = ["--policy", "nano", "--mode", mode, "--drill", f"{FAULT}@{FAULT_STEP}"]
        job = [sys.executable, str(TRAIN), "--steps", str(STEPS), "--out", folder]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, "-q", *drill, "--run-dir", run, "--", *job], env=environ, check=True
        )
        columns = ["--csv", "--metrics", "train_loss_raw"]
        table = subprocess.run(
            [*command, "export", run, *columns], capture_output=True, text=True, check=True
        )
    rows = csv.DictReader(table.stdout.splitlines())
    return [f"{float(row['train_loss_raw']):.3f}" for row in rows]


def write(losses: dict[str, list[str]]) -> None:
    """Write a row per step."""
    with LOSSES.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *losses])
        writer.writerows(
            [step, *row] for step, row in enumerate(zip(*losses.values(), strict=True), 1)
        )


def draw() -> None:
    """Draw both curves."""
    with LOSSES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(figsize=(8, 3))
    steps = [int(row["step"]) for row in rows]
    for name, color in COLORS.items():
        axes.plot(steps, [float(row[name]) for row in rows], color=color, linewidth=1.4, label=name)
    axes.axvline(FAULT_STEP, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_ylim(1.5, 6.5)
    axes.annotate(
        "learning rate × 30", (FAULT_STEP, 6.1), (6, 0), textcoords="offset points", color=GREY
    )
    axes.set_xlabel("step", color=GREY)
    axes.set_ylabel("training loss", color=GREY)
    axes.tick_params(colors=GREY)
    axes.legend(frameon=False, labelcolor="linecolor")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
    figure.savefig(PICTURE, transparent=True, bbox_inches="tight", metadata={"Date": None})


def main() -> int:
    if "--record" in sys.argv[1:]:
        write({name: record(mode) for name, mode in MODES.items()})
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
