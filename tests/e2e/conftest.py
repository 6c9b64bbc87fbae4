"""Runs the real command line on real jobs, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from supervise.store import audit

JOBS = Path(__file__).parent / "jobs"
REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "nano" / "train.py"


@dataclass
class Run:
    """A finished supervised run."""

    directory: Path
    returncode: int
    stdout: str
    stderr: str

    @property
    def records(self) -> list[dict[str, Any]]:
        return list(audit.read(self.directory / "audit.log"))

    def kinds(self, kind: str, what: str | None = None) -> list[dict[str, Any]]:
        return [
            r
            for r in self.records
            if r["kind"] == kind and (what is None or r["data"].get("what") == what)
        ]

    @property
    def actions(self) -> list[str]:
        """Verbs of the actions that touched the job."""
        return [
            r["data"]["action"]["verb"]
            for r in self.kinds("intent")
            if r["data"]["action"]["touches_job"]
        ]

    @property
    def severities(self) -> set[str]:
        return {r["severity"] for r in self.kinds("incident", "opened")}

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "state.json").read_text())
        return found


class Supervise:
    """`supervise ...` as a stranger would type it, elsewhere than in the checkout."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {**os.environ, "OMP_NUM_THREADS": "1"}

    def __call__(self, *args: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "supervise", *args],
            cwd=self.home,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "supervise", *args],
            cwd=self.home,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return the audit records of a run, which may still go on."""
        return list(audit.read(self.home / name / "audit.log"))

    def run(self, *options: str, job: list[str], name: str = "run") -> Run:
        """Run `supervise OPTIONS --run-dir name -- JOB`."""
        directory = self.home / name
        done = self(*options, "--run-dir", str(directory), "--", *job)
        return Run(directory, done.returncode, done.stdout, done.stderr)


@pytest.fixture
def supervise(tmp_path: Path) -> Supervise:
    return Supervise(tmp_path)


def tiny(*args: object) -> list[str]:
    """Command line of the small job."""
    return [sys.executable, str(JOBS / "tiny.py"), *map(str, args)]


def nano(*args: object) -> list[str]:
    """Command line of the embedded example."""
    return [sys.executable, str(EXAMPLE), *map(str, args)]


@pytest.fixture
def tiny_job() -> Any:
    return tiny


@pytest.fixture
def nano_job() -> Any:
    return nano
