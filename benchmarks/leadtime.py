"""Which monitor leads the loss for which fault, and by how many steps; writes `leadtime.md`.

    python benchmarks/leadtime.py [--seeds 3] [--healthy 5] [--jobs 2] [--out benchmarks/.leadtime]

`supervise drill suite` on two jobs under `leadtime.yaml`: the example, a dense GPT, and a mixture
of experts of the proving ground. An interrupted suite goes on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
STEPS, AT = 320, 120
EVERY = (
    *("lr_spike:factor=10", "bad_batch", "repeated_tokens", "shuffled_labels", "batch_cut"),
    *("moments", "attention_bias", "data_order", "weight_noise", "bit_flip:target=weight"),
    *("schedule_restart", "guard_off"),
)


@dataclass(frozen=True)
class Job:
    """A job with its faults. `argv`: after `python`. `acts`: it runs with actions, too."""

    title: str
    argv: tuple[str, ...]
    faults: tuple[str, ...]
    acts: bool = True


JOBS = {
    "dense": Job(
        "The example: a dense GPT, 0.8 M parameters",
        (str(HERE.parent / "examples" / "nano" / "train.py"), "--threads", "1"),
        EVERY,
    ),
    "moe": Job(
        "A mixture of experts: four, two a token (`proving/programs/moe_gpt.py`)",
        (str(HERE / "proving" / "programs" / "moe_gpt.py"), "--rows", "8"),
        (*EVERY, "router:how=sharp", "router:how=flat"),
        acts=False,
    ),
}
METHOD = """`python benchmarks/leadtime.py`: `supervise drill suite` under `leadtime.yaml`, {steps}
steps, the fault at step {at}, {seeds} seeds, {healthy} healthy runs. A monitor is a rule of the
policy. What counts as leaving the band, harm and `lost` is in `trials/drill_findings.py`."""


def suite(job: Job, out: Path, seeds: int, healthy: int, jobs: int) -> str:
    """Make the runs that are missing, and return the tables."""
    faults = [text for fault in job.faults for text in ("--fault", fault)]
    size = ["--steps", str(STEPS), "--at", str(AT), "--seeds", str(seeds)]
    size += ["--healthy", str(healthy), "--jobs", str(jobs), "--fail-on", "nothing"]
    places = ["--steps", "{steps}", "--seed", "{seed}", "--out", "{out}"]
    command = ["env", "OMP_NUM_THREADS=1", sys.executable, *job.argv, *places]
    size += ["--act" if job.acts else "--no-act"]
    ours = [sys.executable, "-m", "supervise", "drill", "suite"]
    policy = ["--policy", str(HERE / "leadtime.yaml"), "--dir", str(out)]
    subprocess.run([*ours, *policy, *size, *faults, "--", *command], check=True, cwd=HERE)
    return (out / "suite.md").read_text()


def page(found: Mapping[str, str], seeds: int, healthy: int) -> str:
    """Return the page."""
    about = METHOD.format(steps=STEPS, at=AT, seeds=seeds, healthy=healthy)
    lines = ["# Lead time of monitors", "", textwrap.fill(about, 100, break_on_hyphens=False), ""]
    for name, tables in found.items():
        lines += [f"## {JOBS[name].title}", "", tables]
    return "\n".join(lines)


def main() -> None:
    """Make both suites, and the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--healthy", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--out", type=Path, default=HERE / ".leadtime")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = {
        name: suite(job, args.out.absolute() / name, args.seeds, args.healthy, args.jobs)
        for name, job in JOBS.items()
    }
    (HERE / "leadtime.md").write_text(page(found, args.seeds, args.healthy))


if __name__ == "__main__":
    main()
