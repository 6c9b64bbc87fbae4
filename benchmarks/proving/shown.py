"""Collect what these benchmarks have shown of each rule; writes `policies/shown.json`.

    python benchmarks/proving/shown.py [--jobs 2]

`supervise record` quotes it: a rule's lead time, its false alarms, which faults move its metrics,
and what recoveries came to, each with date and machine. Of each rule of `nano` and each fault of
the recorded runs it counts the harmed runs, those in which the rule reported, the rows from the
fault to its first report (`after`), and from there to the row where half of the harm was done
(`lead`, negative: too late); of both the least, the median and the most. Harm is as in `score.py`.
A rule is known by a digest of its thresholds: for a changed one nothing has been shown. `drills.md`
and `recovery.md` are copied as they are. Dates are those of the last commit of each source.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from grid import HARMLESS, HEALTHY, PROGRAMS
from score import RECORDINGS, harms, outcomes_of

from supervise.catalog import load_policy

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHOWN = ROOT / "policies" / "shown.json"
POLICY = "nano"
MACHINE = "2 cores (x86_64) without accelerator, torch 2.13.0+cpu"


def date_of(path: Path) -> str:
    """Return the date of the last commit of a file or directory."""
    argv = ["git", "log", "-1", "--format=%cs", "--", str(path)]
    return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def spread(values: list[int]) -> list[float]:
    """Return the least, the median and the most."""
    return [min(values), statistics.median(values), max(values)]


def rules(jobs: int) -> tuple[dict[str, Any], int, int]:
    """Return what the recordings show of each rule, and the number of runs and healthy runs."""
    programs = [
        p for p in PROGRAMS if not p.kept_aside and (RECORDINGS / f"{p.name}.parquet").exists()
    ]
    harmed: dict[str, int] = defaultdict(int)
    after: dict[tuple[str, str], list[int]] = defaultdict(list)
    lead: dict[tuple[str, str], list[int]] = defaultdict(list)
    false: dict[str, int] = defaultdict(int)
    runs = healthy = 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as workers:
        scored = workers.map(outcomes_of, programs, [[POLICY]] * len(programs))
        for program, outcomes in zip(programs, scored, strict=True):
            known = json.loads((RECORDINGS / f"{program.name}.json").read_text())
            found = harms(program)
            for outcome in outcomes:
                runs += 1
                fault, harm = known[outcome.run]["fault"], found.get(outcome.run)
                first = {alarm.rule: alarm.step for alarm in reversed(outcome.alarms)}
                if fault in (HEALTHY, *HARMLESS):
                    healthy += 1
                    for rule in first:
                        false[rule] += 1
                if harm is None or not harm.harmed:
                    continue
                harmed[fault] += 1
                since = {a.rule: a.step for a in reversed(outcome.alarms) if a.step >= harm.first}
                for rule, step in since.items():
                    after[rule, fault].append(max(0, step - harm.row))
                    lead[rule, fault].append(harm.half - step)
    policy = load_policy(POLICY)
    shown = {
        rule.id: {
            "digest": policy.digest_of(rule),
            "false_alarms": false[rule.id],
            "faults": {
                fault: {
                    "harmed": harmed[fault],
                    "reported": len(values),
                    "after": spread(after[rule.id, fault]),
                    "lead": spread(values),
                }
                for (name, fault), values in sorted(lead.items())
                if name == rule.id
            },
        }
        for rule in policy.rules
    }
    return shown, runs, healthy


def cells(path: Path) -> list[list[str]]:
    """Return the rows of the first Markdown table in a file, without its head."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    rows = [[re.sub(r"\s+", " ", c).strip("` ") for c in line.split("|")[1:-1]] for line in lines]
    return [row for row in rows[1:] if set(row[0]) - {"-", " "}]


def drills() -> dict[str, Any]:
    """Return which metric each drill moves, and in how many programs."""
    found = {}
    for name, metric, moved, missed in cells(HERE / "drills.md"):
        k, _, n = moved.partition(" of ")
        found[name] = {"metric": metric.strip("`"), "moved": int(k), "of": int(n), "not": missed}
    return found


def recoveries() -> list[dict[str, Any]]:
    """Return what was kept after each fault in the example, with the supervisor and without."""
    head = ("fault", "wanted", "kept", "reported_after", "acted_after", "loss", "lost", "unwatched")
    rows = cells(ROOT / "benchmarks" / "recovery.md")
    verbs = [[] if row[-1] == "–" else row[-1].split(", ") for row in rows]
    return [
        {**dict(zip(head, row, strict=False)), "actions": own}
        for row, own in zip(rows, verbs, strict=True)
    ]


def main() -> int:
    """Collect, and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    found, runs, healthy = rules(parser.parse_args().jobs)
    where = {"machine": MACHINE, "date": date_of(RECORDINGS), "policy": POLICY}
    whole = {
        "recordings": {**where, "runs": runs, "healthy": healthy, "rules": found},
        "drills": {"machine": MACHINE, "date": date_of(RECORDINGS), "moved": drills()},
        "recoveries": {
            "machine": MACHINE,
            "date": date_of(ROOT / "benchmarks" / "recovery.md"),
            "policy": "examples/nano/policy.yaml",
            "rows": recoveries(),
        },
    }
    SHOWN.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
