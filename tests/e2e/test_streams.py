"""Whatever stdout and stderr lead to, the run ends in time and with the documented exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.slow

SUPERVISE = [sys.executable, "-m", "supervise"]


@contextmanager
def sink(kind: str) -> Iterator[int]:
    """A descriptor to write to that takes nothing; `closed` stands for one that is not there."""
    if kind == "full disk":
        fd = os.open("/dev/full", os.O_WRONLY)
    elif kind == "closed":
        fd = os.open(os.devnull, os.O_WRONLY)
    else:
        reader, fd = os.openpty() if kind == "hung-up terminal" else os.pipe()
        os.close(reader)
    yield fd
    os.close(fd)


def run(home, stream, kind, argv):
    """Return the exit code of a command line, with one stream leading to such a sink."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # it hides code 120
    with sink(kind) as fd:
        close = f"{1 if stream == 'stdout' else 2}>&-" if kind == "closed" else ""
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: fd}
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {close}', "sh", *SUPERVISE, *argv],
            cwd=home,
            env=env,
            timeout=60,
            check=False,
            **streams,
        )
    return done.returncode


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        ("full disk", "stderr"),
        ("closed", "stdout"),
        ("closed", "stderr"),
        ("hung-up terminal", "stderr"),
    ],
)
def test_the_jobs_exit_code_comes_through(tmp_path, stream, kind):
    """Whether or not anything can be printed. A closed stream is closed for the job too; no file
    of ours takes its number."""
    fails = f"if (echo x >&{1 if stream == 'stdout' else 2}); then exit 1; fi; " * (
        kind == "closed"
    )
    job = ["sh", "-c", f"{fails}exit 7"]
    assert run(tmp_path, stream, kind, ["--run-dir", "run", "--", *job]) == 7
    if kind == "closed":
        assert run(tmp_path, stream, kind, ["audit", "verify", "run"]) == 0


@pytest.mark.parametrize(
    ("kind", "code"), [("closed pipe", 128 + signal.SIGPIPE), ("full disk", 74)]
)
def test_a_command_that_prints_reports_that_it_could_not(tmp_path, kind, code):
    assert run(tmp_path, "stdout", kind, ["policy", "show", "nano"]) == code
