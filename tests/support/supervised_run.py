"""Run the real command line on real jobs, in processes of their own, and read what is recorded."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from supervise.cli import invoke
from supervise.errors import SuperviseError
from supervise.store import read_audit, read_journal

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
JOBS = REPOSITORY / "tests" / "e2e" / "jobs"
EXAMPLE = REPOSITORY / "examples" / "nano" / "train.py"
FAST_TORCH = str(HERE / "fast_torch")  # for PYTHONPATH


class Records:
    """What a run has recorded, also while it goes on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def records(self) -> list[dict[str, Any]]:
        """The audit records, none where there is no readable log yet."""
        try:
            return list(read_audit(self.directory / "audit.log"))
        except SuperviseError:
            return []

    def kinds(self, kind: str, what: str | None = None) -> list[dict[str, Any]]:
        """Return the records of a kind, of those with `what` in their data only."""
        of_kind = [r for r in self.records if r["kind"] == kind]
        return of_kind if what is None else [r for r in of_kind if r["data"].get("what") == what]

    @property
    def intents(self) -> list[str]:
        """Verbs of all actions."""
        return [r["data"]["action"]["verb"] for r in self.kinds("intent")]

    @property
    def actions(self) -> list[str]:
        """Verbs of the actions that touched the job."""
        intents = [r["data"]["action"] for r in self.kinds("intent")]
        return [action["verb"] for action in intents if action["touches_job"]]

    @property
    def severities(self) -> set[str]:
        return {r["severity"] for r in self.kinds("incident", "opened")}

    @property
    def state(self) -> dict[str, Any]:
        """The content of `state.json`, empty where there is none yet."""
        path = self.directory / "state.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return found

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """The entries of `checkpoints.json`."""
        path = self.directory / "checkpoints.json"
        return json.loads(path.read_text())["checkpoints"] if path.is_file() else []

    def events(self, kind: type) -> list[Any]:
        """The journal's events of a kind."""
        return [event for _, event in read_journal(self.directory / "journal", only=(kind,))]

    def prove(self) -> None:
        """Assert that the log verifies and that replay agrees with it."""
        for command in (["audit", "verify"], ["replay"]):
            assert invoke([*command, str(self.directory)]) == 0, command


class Run(Records):
    """A finished supervised run."""

    def __init__(self, directory: Path, done: subprocess.CompletedProcess[str]) -> None:
        super().__init__(directory)
        self.returncode, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr


class Supervise:
    """The command line, used in a directory that is not the checkout.

    Attributes:
        env: environment of the processes.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._started: list[subprocess.Popen[str]] = []
        self.env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": str(home / "state"),
            "PYTHONPATH": FAST_TORCH,
            "GIT_CEILING_DIRECTORIES": str(REPOSITORY),  # the state of this checkout is no input
        }

    def __call__(self, *args: object) -> subprocess.CompletedProcess[str]:
        """Run `supervise ARGS` in this process; 0.5 s faster than in one of its own."""
        argv, out, err = [str(arg) for arg in args], io.StringIO(), io.StringIO()
        state, home = os.environ.get("XDG_STATE_HOME"), Path.cwd()
        os.environ["XDG_STATE_HOME"] = self.env["XDG_STATE_HOME"]
        os.chdir(self.home)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = invoke(argv)
        finally:
            os.chdir(home)
            os.environ["XDG_STATE_HOME"] = state or ""
        return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())

    def process(self, *args: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run `supervise ARGS` to its end in a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "supervise", *map(str, args)],
            cwd=self.home,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def bare(self, job: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a job to its end without us."""
        return subprocess.run(
            job, cwd=self.home, env=self.env, capture_output=True, text=True, check=False
        )

    def start(
        self, *args: object, by: tuple[str, ...] = ("-m", "supervise"), **options: Any
    ) -> subprocess.Popen[str]:
        """Start `supervise ARGS`, or `python BY ARGS`; `options` are those of Popen."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        argv = [sys.executable, *by, *map(str, args)]
        started = subprocess.Popen(argv, cwd=self.home, env=self.env, **(pipes | options))
        self._started.append(started)
        return started

    def close(self) -> None:
        """Kill what a failed test has left running, and close all pipes."""
        for popen in self._started:
            if popen.poll() is None:
                for process in psutil.Process(popen.pid).children(recursive=True):
                    process.kill()
                popen.kill()
                popen.wait()
            for pipe in (popen.stdin, popen.stdout, popen.stderr):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()

    def run(self, *options: object, job: list[str], name: str = "run") -> Run:
        """Run `supervise OPTIONS --run-dir name -- JOB`."""
        done = self.process(*options, "--run-dir", self.home / name, "--", *job)
        return Run(self.home / name, done)

    def run_of(self, name: str = "run") -> Records:
        """Return the records of a run, which may still go on."""
        return Records(self.home / name)

    def records(self, name: str = "run") -> list[dict[str, Any]]:
        """Return the audit records of a run."""
        return self.run_of(name).records

    def prove(self, name: Path | str = "run") -> None:
        """See `Records.prove`."""
        self.run_of(str(name)).prove()

    def rows(self, name: Path | str, *options: object) -> list[dict[str, str]]:
        """Return the exported frames of a run."""
        exported = self("export", name, "--csv", *options)
        return list(csv.DictReader(exported.stdout.splitlines()))


def tiny(*args: object) -> list[str]:
    """Command line of the small job."""
    return [sys.executable, str(JOBS / "tiny.py"), *map(str, args)]


def nano(*args: object) -> list[str]:
    """Command line of the embedded example."""
    return [sys.executable, str(EXAMPLE), *map(str, args)]


def sha(stdout: str) -> str:
    """Return the digest of the weights that the small job prints at its end."""
    found = re.search(r"sha ([0-9a-f]+)", stdout)
    assert found, stdout
    return found[1]


OLDEST = (3, 9)  # of the job's Python; pyproject.toml, per-file-target-version


@functools.cache
def interpreters() -> dict[str, str]:
    """Return the newest interpreter of each version that starts, by `3.x`."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    names = [f"python3.{minor}" for minor in range(OLDEST[1], 20)]
    paths = [*filter(None, map(shutil.which, names)), *map(str, home.glob("versions/*/bin/python"))]
    found = {".".join(map(str, sys.version_info[:2])): sys.executable}
    for path in sorted(paths):
        ask = [path, "-c", "import sys; print(*sys.version_info[:2])"]
        version = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.split()
        if version and tuple(map(int, version)) >= OLDEST:
            found.setdefault(".".join(version), path)
    return found
