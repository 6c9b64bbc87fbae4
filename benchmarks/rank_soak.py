"""Undisturbed jobs of two and four ranks under the policy large: no action, no page.

Programs of different kinds: a plain loop under DDP, shards (FSDP2), transformers' Trainer,
accelerate, a `for` loop whose batches are of unlike sizes. None knows of the supervisor. A run
fails with an action or a safeguard, a SEV0 or SEV1, an exit code, or a rank whose frames are not
all there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from supervise.report import count_outcomes, decode_log
from supervise.store import RunDir, read_audit, read_rows

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "proving" / "programs"
POLICY, STEPS, LIMIT_S = "large", 400, 600.0
JOBS: dict[str, tuple[str, ...]] = {
    "DDP": (str(PROGRAMS / "ddp.py"),),
    "FSDP2": (str(HERE / "rank_jobs.py"), "fsdp2"),
    "Trainer": (str(PROGRAMS / "hf_trainer.py"),),
    "accelerate": (str(PROGRAMS / "accelerate_loop.py"),),
    "for, ragged": (str(HERE / "rank_jobs.py"), "ragged"),
}
RANKS = (2, 4)
HEAD = ("program", "ranks", "steps", "exit", "SEV0", "SEV1", "SEV2", "actions", "reflexes", "min")


def run(name: str, ranks: int, steps: int, policy: str, path: Path) -> dict[str, Any]:
    """Run one job to its end and return its row."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    supervise = [sys.executable, "-m", "supervise", "-q", "--policy", policy]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(ranks)]
    job = [*JOBS[name], f"--steps={steps}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(path)}
    command = [*supervise, "--run-dir", str(path / "run"), "--", *torchrun, *job]
    began = time.monotonic()
    with (path / "out.txt").open("w") as out:
        done = subprocess.run(
            command, env=env, cwd=path, stdout=out, stderr=out, timeout=LIMIT_S, check=False
        )
    found = RunDir.open(path / "run")
    records = list(read_audit(found.audit_path))
    told = Counter(
        one["severity"]
        for one in records
        if one["kind"] == "incident" and one["data"].get("what") in ("opened", "raised")
    )
    reflexes = [r for r in records if (r.get("data") or {}).get("what") == "safeguard"]
    frames = Counter(row.rank for row in read_rows(found))
    return {
        "program": name,
        "ranks": len(frames),
        "steps": min(frames.values(), default=0),
        "exit": done.returncode,
        **{severity: told[severity] for severity in ("SEV0", "SEV1", "SEV2")},
        "actions": count_outcomes(decode_log(found, records))["done"],
        "reflexes": len(reflexes),
        "min": round((time.monotonic() - began) / 60, 1),
    }


def is_silent(found: dict[str, Any], ranks: int, steps: int) -> bool:
    """Whether all ranks made all steps, and nothing was done or paged."""
    happened = ("exit", "SEV0", "SEV1", "actions", "reflexes")
    whole = found["ranks"] == ranks and found["steps"] >= steps
    return whole and not any(found[column] for column in happened)


def line(cells: Any) -> str:
    """Return a row of the table."""
    first, *more = map(str, cells)
    return f"{first:<12}" + "".join(f"{cell:>9}" for cell in more)
