"""Undisturbed runs of the example under the nano policy: no action, no page.

    python benchmarks/soak.py [--seeds 3] [--steps 1000]
    python benchmarks/soak.py --toy [--steps 100000]
    python benchmarks/soak.py --ranks [--steps 400]

Zero actions, zero reflexes, zero incidents of SEV0 or SEV1; a SEV2 (a notice) is printed and
allowed. Each finished seed is kept in `benchmarks/.soak/`, so that a broken-off soak goes on where
it was; a change of the code or the policies starts anew. Exit code 1 when something happened.
`--toy` is another proof: that nothing grows, see toy_soak.py. `--ranks` runs jobs of several ranks
under the policy large, see rank_soak.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import rank_soak
import toy_soak

from supervise.report import count_outcomes, decode_log
from supervise.store import RunDir, read_audit, read_rows

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / ".soak"
TRAIN = ROOT / "examples" / "nano" / "train.py"
COLUMNS = (
    "seed",
    "steps",
    "exit",
    "val_loss",
    "SEV0",
    "SEV1",
    "SEV2",
    "actions",
    "reflexes",
    "min",
)


def fingerprint() -> str:
    """Return a digest of everything that can change the result."""
    digest = hashlib.sha256()
    for folder in ("supervisor", "probes", "policies", "runbooks", "examples"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def soak(seed: int, steps: int) -> dict[str, Any]:
    """Run one seed to its end and return its row."""
    path = KEPT / f"seed-{seed}"
    shutil.rmtree(path, ignore_errors=True)
    supervise = [
        sys.executable,
        "-m",
        "supervise",
        "-q",
        "--policy",
        "nano",
        "--run-dir",
        str(path),
    ]
    job = [sys.executable, str(TRAIN), "--steps", str(steps), "--seed", str(seed)]
    job += ["--out", str(path / "checkpoints"), "--log-every", "100"]
    began = time.monotonic()
    done = subprocess.run(
        [*supervise, "--", *job],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    run = RunDir.open(path)
    records = list(read_audit(run.audit_path))
    severities = Counter(
        one["severity"]
        for one in records
        if one["kind"] == "incident" and one["data"].get("what") in ("opened", "raised")
    )
    reflexes = [r for r in records if (r.get("data") or {}).get("what") == "safeguard"]
    loss = re.search(r"^val_loss ([\d.]+)$", done.stdout, re.MULTILINE)
    return {
        "seed": seed,
        "steps": sum(1 for _ in read_rows(run)),
        "exit": done.returncode,
        "val_loss": loss[1] if loss else "-",
        **{severity: severities[severity] for severity in ("SEV0", "SEV1", "SEV2")},
        "actions": count_outcomes(decode_log(run, records))["done"],
        "reflexes": len(reflexes),
        "min": round((time.monotonic() - began) / 60, 1),
    }


def is_silent(found: dict[str, Any], steps: int) -> bool:
    """Whether the run finished, every step was observed, and no action or page occurred."""
    happened = ("exit", "SEV0", "SEV1", "actions", "reflexes")
    return found["steps"] == steps and not any(found[column] for column in happened)


def kept(name: str, key: Any, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a run that is kept under this key, else of one that is made now."""
    path = KEPT / f"{name}.json"
    saved = json.loads(path.read_text()) if path.exists() else {}
    if saved.get("key") != key:
        saved = {"key": key, "found": run()}
        path.write_text(json.dumps(saved))
    found: dict[str, Any] = saved["found"]
    return found


def soak_ranks(steps: int, policy: str) -> bool:
    """Run each program on two and on four ranks, the missing ones only; whether all were silent."""
    key = {"steps": steps, "policy": policy, "code": fingerprint()}
    print(rank_soak.line(rank_soak.HEAD), flush=True)
    silent = True
    for name in rank_soak.JOBS:
        for ranks in rank_soak.RANKS:
            label = re.sub(r"\W+", "-", f"ranks {name} {ranks}")
            run = partial(rank_soak.run, name, ranks, steps, policy, KEPT / label)
            found = kept(label, key, run)
            silent &= rank_soak.is_silent(found, ranks, steps)
            print(rank_soak.line(found[column] for column in rank_soak.HEAD), flush=True)
    print(f"{'PASS' if silent else 'FAIL'}  undisturbed ranks are left alone")
    return silent


def main() -> None:
    """Soak all seeds, the missing ones only."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--policy", help="for --toy and --ranks; default: nano, large")
    args = parser.parse_args()
    KEPT.mkdir(exist_ok=True)
    if args.toy:
        sys.exit(not toy_soak.soak(args.steps or 100_000, args.policy or "nano", KEPT / "toy"))
    if args.ranks:
        sys.exit(not soak_ranks(args.steps or rank_soak.STEPS, args.policy or rank_soak.POLICY))
    args.steps = args.steps or 1000
    key = {"steps": args.steps, "code": fingerprint()}
    print("".join(f"{column:>10}" for column in COLUMNS), flush=True)
    silent = True
    for seed in range(args.seeds):
        found = kept(f"seed-{seed}", key, partial(soak, seed, args.steps))
        silent &= is_silent(found, args.steps)
        print("".join(f"{found[column]!s:>10}" for column in COLUMNS), flush=True)
    print(f"{'PASS' if silent else 'FAIL'}  undisturbed runs are left alone")
    sys.exit(0 if silent else 1)


if __name__ == "__main__":
    main()
