"""Runs the real command line on real jobs, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from supervise.cli import invoke
from supervise.store import audit

JOBS = Path(__file__).parent / "jobs"
REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "nano" / "train.py"


# The loss begins near 0.4; what the drill does to the rate takes it beyond 5 within a few steps.
HALVES = """\
version: supervise/v1
policy: halves
mode: enforce
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 1.0}
rules:
  - {id: high, when: high, sev: SEV1, run: half}
runbooks:
  half:
    meaning: The loss is high.
    impact: It may not come back.
    steps: [{lr_scale: {set: 0.5, rewarm: 10}}]
    verify: {within: 30, clear_for: 5}
budgets: {all: {max: 8, per: 1000}, lr_scale: {max: 4, per: 1000}}
escalate: {ladder: [half, hold], reset_after: 500}
warmup: 10
probation: 20
"""
COMES_BACK = """\
version: supervise/v1
policy: comes-back
summary: Starts the job again from its own checkpoint.
mode: enforce
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 5.0}
rules:
  - {id: blown, when: high, sev: SEV1, run: relaunch-and-rewarm, for: 2, cooldown: 100}
job:
  on_crash: restart
  probe_batch: true
  relaunch: {args: ["--init_from=resume"]}
budgets:
  all: {max: 4, per: 10000}
  restart: {max: 2, per: 10000}
escalate: {ladder: [relaunch-and-rewarm, hold], reset_after: 5000}
runbooks:
  relaunch-and-rewarm:
    steps:
      - snapshot
      - relaunch: {at_least: 10, start: 0.1, rewarm: 20}
    verify: {within: 100, clear_for: 20}
warmup: 10
probation: 20
"""


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
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(home / "state")}

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

    def start(self, *args: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "supervise", *map(str, args)],
            cwd=self.home,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return the audit records of a run, which may still go on."""
        return list(audit.read(self.home / name / "audit.log"))

    def prove(self, directory: Path | str) -> None:
        """Insist that a run's log verifies and that replay agrees with it.

        In this process: that the commands start is shown by `test_acceptance.py`.
        """
        for command in (["audit", "verify"], ["replay"]):
            assert invoke([*command, str(self.home / directory)]) == 0, command

    def run(self, *options: object, job: list[str], name: str = "run") -> Run:
        """Run `supervise OPTIONS --run-dir name -- JOB`."""
        directory = self.home / name
        done = self(*map(str, options), "--run-dir", str(directory), "--", *job)
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


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    """A policy that halves the learning rate when the loss is high."""
    path = tmp_path / "halves.yaml"
    path.write_text(HALVES)
    return path


@pytest.fixture
def comes_back(tmp_path: Path) -> Path:
    """A file with a policy that starts `resuming.py` again from its own checkpoint."""
    path = tmp_path / "comes-back.yaml"
    path.write_text(COMES_BACK)
    return path


@pytest.fixture
def resuming_job(tmp_path: Path) -> Any:
    """Command line of the job that resumes. It goes on to where the drill comes once its first
    checkpoint was verified."""
    words = {"out_dir": tmp_path / "out", "pause_s": 0.005, "max_iters": 250}
    words |= {"wait_file": tmp_path / "run" / "audit.log"}
    job = [sys.executable, str(JOBS / "resuming.py"), *(f"--{k}={v}" for k, v in words.items())]
    return lambda *more: [*job, *more]


@pytest.fixture
def receiver():
    """A function that starts a real receiver; it returns `(url, what was received)`."""
    servers: list[HTTPServer] = []

    def start(code: int) -> tuple[str, list[tuple[str, dict[str, object]]]]:
        received: list[tuple[str, dict[str, object]]] = []

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.append((self.path, json.loads(body)))
                self.send_response(code)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Receiver)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}", received

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
