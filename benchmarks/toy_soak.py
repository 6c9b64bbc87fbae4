"""A hundred thousand steps of a toy job under the real supervisor: memory and files stay flat.

Both processes are looked at from outside, by /proc, four times a second. What is filled once (the
ring of frames, windows of detectors, savepoints) is filled after the warm-up, a fifth of the steps;
from there on resident memory has to stay within 2 MB, and the number of files that are open most of
the time has to be the same in both halves. No frame may be missing, but under a policy that limits
the journal, which then has to stay within that; no action, no SEV0 or SEV1 may come of it. A SEV2
is a notice, mostly that the machine became slower, and is printed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low

from supervise.catalog import load_policy
from supervise.report import count_outcomes, decode_log
from supervise.store import RunDir, read_audit, read_rows

JOB = Path(__file__).with_name("toy_job.py")
WARMUP, THINNED = 0.2, 0.5  # of all steps; where the journal is limited and thinned by then
EVERY_S = 0.25
LAST = 40  # last samples, ignored: the probe frees its memory as the job ends
ALLOWED_MB = 2.0
PAGE = os.sysconf("SC_PAGE_SIZE")
HEAD = ("process", "looks", "start MB", "end MB", "range MB", "MB / 1e5 steps", "files", "verdict")


@dataclass
class Watched:
    """One process, as /proc shows it: (share of the run that is over, bytes, open files)."""

    name: str
    pid: int
    seen: list[tuple[float, int, int]] = field(default_factory=list)

    def look(self, at: float) -> None:
        """Note resident memory and open files."""
        proc = Path("/proc", str(self.pid))
        try:
            resident = int((proc / "statm").read_text().split()[1]) * PAGE
            files = len(list((proc / "fd").iterdir()))
            if resident:
                self.seen.append((at, resident, files))
        except (OSError, IndexError):  # it has just ended
            pass

    def row(self, steps: int, warmup: float) -> tuple[bool, list[str]]:
        """Return whether it is flat behind the warm-up, and the line of the table."""
        flat = [one for one in self.seen[:-LAST] if one[0] >= warmup]
        sizes = [size / 1e6 for _, size, _ in flat]
        files = [count for _, _, count in flat]
        half = len(files) // 2
        kept = median_low(files[:half]), median_low(files[half:])
        spread = max(sizes) - min(sizes)
        slope = _slope([(at * steps / 1e5, size / 1e6) for at, size, _ in flat])
        fine = spread <= ALLOWED_MB and kept[0] == kept[1]
        cells = [self.name, str(len(flat)), f"{sizes[0]:.2f}", f"{sizes[-1]:.2f}", f"{spread:.2f}"]
        cells += [f"{slope:+.3f}", f"{kept[0]}, {kept[1]}", "flat" if fine else "GROWS"]
        return fine, cells


def _slope(points: list[tuple[float, float]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def soak(steps: int, policy: str, path: Path) -> bool:
    """Run it, print the table, and return whether it passed."""
    shutil.rmtree(path, ignore_errors=True)
    command = [sys.executable, "-m", "supervise", "-q", "--policy", policy, "--run-dir", str(path)]
    job = ["--", sys.executable, str(JOB), str(steps)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with subprocess.Popen([*command, *job], env=environ) as supervisor:
        watched = [Watched("supervisor", supervisor.pid)]
        while supervisor.poll() is None:
            time.sleep(EVERY_S)
            step, pid = _newest(path)
            if pid and len(watched) == 1:
                watched.append(Watched("job", pid))
            for one in watched:
                one.look(step / steps)
    minutes = (time.monotonic() - began) / 60
    for one in watched:
        (path / f"{one.name}.json").write_text(json.dumps(one.seen))
    return _report(watched, path, steps, supervisor.returncode, minutes)


def _newest(path: Path) -> tuple[int, int]:
    """Return the newest step and the pid of rank 0 by the status file; 0 before the first."""
    try:
        state = json.loads((path / "state.json").read_text())
        return max(0, state["step"]), state["ranks"]["0"]["pid"]
    except (OSError, ValueError, KeyError):
        return 0, 0


def _report(watched: list[Watched], path: Path, steps: int, code: int, minutes: float) -> bool:
    run = RunDir.open(path)
    limit = load_policy(path / "policy.yaml").journal_bytes
    rows = [one.row(steps, THINNED if limit else WARMUP) for one in watched]
    table = [HEAD, *(cells for _, cells in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEAD))]
    for row in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    numbers = [row.step for row in read_rows(run)]
    lost = steps - len(numbers) if numbers == list(range(len(numbers))) else steps
    records = list(read_audit(run.audit_path))
    told = Counter(
        one["severity"]
        for one in records
        if one["kind"] == "incident" and one["data"].get("what") in ("opened", "raised")
    )
    grave = told["SEV0"] + told["SEV1"] + count_outcomes(decode_log(run, records))["done"]
    fine = len(rows) == 2 and all(flat for flat, _ in rows)
    size = sum(file.stat().st_size for file in run.journal_path.iterdir())
    print(f"journal {size / 1e6:.1f} MB" + (f" of {limit / 1e6:.0f}" if limit else ""))
    kept = size <= limit if limit else lost == 0
    fine = fine and kept and grave == 0 and code == 0
    severities = ", ".join(f"{told[name]} {name}" for name in ("SEV0", "SEV1", "SEV2"))
    left = f"{len(numbers)} of {steps} steps left in it" if limit else f"{lost} frames missing"
    print(f"{minutes:.1f} min, {left}, {severities}, exit code {code}")
    print(f"{'PASS' if fine else 'FAIL'}  nothing grows: at most {ALLOWED_MB:.0f} MB, no new files")
    return fine
