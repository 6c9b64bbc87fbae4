"""Whatever stdout and stderr lead to, the run ends in time and with the documented exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.slow

SUPERVISE = [sys.executable, "-m", "supervise"]
JOB = ["sh", "-c", "exit 7"]


@contextmanager
def sink(kind: str) -> Iterator[int]:
    """A descriptor to write to that takes nothing; `closed` stands for one that is not there."""
    kept, fd = -1, -1
    if kind == "full disk":
        fd = os.open("/dev/full", os.O_WRONLY)
    elif kind == "closed":
        fd = os.open(os.devnull, os.O_WRONLY)
    elif kind == "hung-up terminal":
        kept, fd = os.openpty()
    else:
        kept, fd = os.pipe()
    if kind == "full pipe":
        os.set_blocking(fd, False)
        while True:
            try:
                os.write(fd, b"x" * 4096)
            except BlockingIOError:
                break
        os.set_blocking(fd, True)
    elif kept >= 0:
        os.close(kept)
        kept = -1
    yield fd
    for each in (fd, kept):
        if each >= 0:
            os.close(each)


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


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("full disk", []),
        ("closed", []),
        ("closed pipe", []),
        ("hung-up terminal", []),
        ("full pipe", []),
        ("full pipe", ["-q"]),
    ],
)
def test_the_jobs_exit_code_comes_through(tmp_path, stream, kind, options):
    """Nobody need take what we say."""
    assert run(tmp_path, stream, kind, [*options, "--run-dir", "run", "--", *JOB]) == 7


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--polcy", "nano", "--", "true"], 64),
        (["--policy", "no-such-policy", "--", "true"], 65),
        (["--", "/"], 126),
        (["--", "no-such-command"], 127),
        (["--", "sh", "-c", "kill -9 $$"], 137),
    ],
)
def test_exit_codes_hold_where_nothing_can_be_said(tmp_path, argv, code):
    """An error before the start waits for a slow reader, but not for ever."""
    assert run(tmp_path, "stderr", "full pipe", argv) == code


def test_a_stop_that_nobody_can_read_of_keeps_its_code(supervise):
    """75 tells the scheduler to requeue, with stderr full during the whole run."""
    with sink("full pipe") as fd:
        running = subprocess.Popen(
            [*SUPERVISE, "--run-dir", "run", "--", "sleep", "60"], cwd=supervise.home, stderr=fd
        )
        launched = supervise.home / "run" / "state.json"
        deadline = time.monotonic() + 60
        while not launched.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        said = supervise("stop", "run", "--requeue")
        assert said.returncode == 0, said.stderr
        assert running.wait(60) == 75


def test_a_reader_of_the_first_line_only(tmp_path):
    """`2>&1 | head -1` costs neither the job nor its exit code anything."""
    line = f"{sys.executable} -m supervise -- sh -c 'sleep 1; exit 7' 2>&1 | head -1"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", f'{line}; exit "${{PIPESTATUS[0]}}"'],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 7
    assert done.stdout.startswith("supervise: policy nano")


def test_a_stream_that_is_closed_is_closed_for_the_job_too(tmp_path):
    """And no file of ours gets its number: the log verifies."""
    job = ["sh", "-c", "if (echo x >&2); then exit 1; else exit 7; fi"]

    assert run(tmp_path, "stderr", "closed", ["--run-dir", "run", "--", *job]) == 7
    assert run(tmp_path, "stderr", "closed", ["audit", "verify", "run"]) == 0


@pytest.mark.parametrize(
    ("kind", "code"), [("closed pipe", 128 + signal.SIGPIPE), ("full disk", 74), ("closed", 0)]
)
@pytest.mark.parametrize("argv", [["policy", "show", "nano"], ["--help"]])
def test_a_command_that_prints_says_that_it_could_not(tmp_path, argv, kind, code):
    """With a code of its own, which no command uses for its answer."""
    assert run(tmp_path, "stdout", kind, argv) == code
