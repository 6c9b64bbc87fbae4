"""How far the bounds of `nano` are from a false page, and from a missed fault.

    python benchmarks/margins.py [--data FOLDER] [--jobs N] [FACTOR...]

All spike detectors of the pack `loss_spike` are made more or less sensitive by a factor, and `nano`
with them is run on the recordings; 1.0 is the shipped policy. Two factors are promised: 0.75 (no
false page) and 1.1 (nothing missed); exit code 1 when one does not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from supervise.lab import read_labels, run_backtest, score_alarms

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("SUPERVISE_DATA", ROOT / "../shared/data"))
NANO = ROOT / "policies" / "nano.yaml"
SPIKES = ROOT / "policies" / "packs" / "loss_spike.yaml"
SENSITIVE, TOLERANT = 0.75, 1.1
FACTORS = (0.6, SENSITIVE, 0.9, 1.0, TOLERANT, 1.3)


def scaled(detector: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return a detector's bounds times `factor`; of a ratio, what it is above 1."""
    from_one = detector["kind"] == "ratio"
    bounds = {key: detector[key] for key in ("gt", "clear") if key in detector}
    return {k: 1.0 + (v - 1.0) * factor if from_one else v * factor for k, v in bounds.items()}


def write(folder: Path, factor: float) -> Path:
    """Write `nano` with its bounds moved; return the file."""
    policy = yaml.safe_load(NANO.read_text("utf-8"))
    for name, detector in yaml.safe_load(SPIKES.read_text("utf-8"))["detectors"].items():
        if detector["kind"] in ("ratio", "record", "robust_z"):
            policy["override"][f"loss_spike.{name}"] = scaled(detector, factor)
    path = folder / f"bounds-x{factor:g}.yaml"
    path.write_text(yaml.safe_dump(policy), "utf-8")
    return path


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("factors", nargs="*", type=float, default=FACTORS)
    given = parser.parse_args()
    labels = read_labels(given.data / "logs" / "incidents.csv")
    paths = [given.data / "logs", *sorted((given.data / "faults").glob("healthy*.csv.gz"))]
    print("bounds    SEV0/SEV1 on healthy rows    found    missed")
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        policies = [str(write(Path(folder), factor)) for factor in given.factors]
        outcomes = run_backtest(paths, policies, {}, given.jobs, [])
    for place, factor in enumerate(given.factors):
        total = score_alarms(f"x{factor:g}", [each[place] for each in outcomes], labels)
        missed = ", ".join(f"{one.kind} at {one.step}" for one in total.missed) or "nothing"
        print(f"x{factor:<8g}{total.false_pages:25d}{len(total.detections):9d}    {missed}")
        wrong |= factor == SENSITIVE and total.false_pages > 0
        wrong |= factor == TOLERANT and bool(total.missed)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
