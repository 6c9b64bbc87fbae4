"""The rules of other projects compared with `nano` on the same recordings; writes `peers.md`.

    python benchmarks/peers.py [--check] [--data FOLDER] [--jobs N]

The public logs are scored against their labels. The nano runs have a fault from a known step on;
the table shows the first alarm of each policy: severity, and steps after the injection. It depends
on the recordings and the policies alone; `--check` only reports whether it is current.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from supervise.lab import (
    SCORE_CAVEAT,
    BacktestOutcome,
    format_score_table,
    read_labels,
    run_backtest,
    score_policies,
)

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "policies" / "peers"
TABLE = ROOT / "benchmarks" / "peers.md"
DATA = Path(os.environ.get("SUPERVISE_DATA", ROOT / "../shared/data"))
OURS = "nano"
INJECTED, INJECTED_B3 = 800, 801  # the step of the fault; in the runs with a base rate of 3e-3
# Faults that did no harm within the recording.
HARMLESS = (
    *("adam_reset", "bf16_attn", "bias05_attn", "bias20_attn", "bitflip", "spike_rep"),
    "weightflip_sm",
)

HEAD = f"""# The rules of other projects on the same recordings

Written by `python benchmarks/peers.py` from `policies/{OURS}.yaml` and `policies/peers/`, whose
files name what our policy language cannot express of the original. The docstring of
`supervisor/supervise/lab/score.py` defines when a label is found and an alarm is false.

{SCORE_CAVEAT}
"""
FAULTS = """
## Faulted nano runs

The first alarm after the injection, and the most severe one: severity and steps. `–`: none;
`stopped before`: the policy ended the run before the fault. The rows of healthy runs, and `before`,
count incidents without a fault. `*`: the fault did no harm to that run.
"""


def outcomes(path: Path, jobs: int) -> list[list[BacktestOutcome]]:
    policies = [OURS, *map(str, sorted(PEERS.glob("*.yaml")))]
    return run_backtest([path], policies, {}, jobs, [])


def logs(data: Path, jobs: int) -> Iterator[str]:
    labels = read_labels(data / "logs" / "incidents.csv")
    found = outcomes(data / "logs", jobs)
    totals = score_policies(found, labels)
    rows = sum(each[0].rows for each in found)
    yield "\n## Public logs\n"
    yield f"{len(found)} runs, {rows} logged steps; found / labelled by kind.\n"
    yield from format_score_table(totals, labelled=True)


def faults(data: Path, jobs: int) -> Iterator[str]:
    found = outcomes(data / "faults", jobs)
    yield FAULTS
    names = [outcome.policy for outcome in found[0]]
    rows = [["run", *names]]
    early = [0] * len(names)
    for run in found:
        name = run[0].run
        if name.startswith("healthy"):
            rows.append([name, *(str(len(_steps(each)) or "–") for each in run)])
            continue
        start = INJECTED_B3 if "_b3_" in name else INJECTED
        mark = " *" if name.startswith(HARMLESS) else ""
        rows.append([name + mark, *(_first(each, start) for each in run)])
        for i, each in enumerate(run):
            early[i] += sum(step < start for step in _steps(each))
    rows.append(["before", *(str(n or "–") for n in early)])
    yield from _padded(rows)


def _steps(outcome: BacktestOutcome) -> list[int]:
    return [alarm.step for alarm in outcome.alarms if alarm.change != "joined"]


def _first(outcome: BacktestOutcome, start: int) -> str:
    if any(act.stops and act.step < start for act in outcome.actions):
        return "stopped before"
    after = [alarm for alarm in outcome.alarms if alarm.step >= start]
    if not after:
        return "–"
    text = f"{after[0].severity} +{after[0].step - start}"
    worst = min(after, key=lambda alarm: alarm.severity)
    if worst.severity != after[0].severity:
        text += f", {worst.severity} +{worst.step - start}"
    return text


def _padded(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        yield "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        if number == 0:
            yield "| " + " | ".join("-" * w for w in widths) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the existing file")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--jobs", type=int, default=0)
    asked = parser.parse_args()
    text = "\n".join(
        (HEAD.rstrip(), *logs(asked.data, asked.jobs), *faults(asked.data, asked.jobs))
    )
    if not asked.check:
        TABLE.write_text(text + "\n", encoding="utf-8")
        print(text)
        return 0
    same = TABLE.is_file() and TABLE.read_text(encoding="utf-8") == text + "\n"
    print(f"{TABLE.name} is {'current' if same else 'out of date'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
