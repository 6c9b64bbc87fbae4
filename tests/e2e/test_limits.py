"""Something fails in the middle of a run: threads, the records themselves, or our own code."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from tests.support.supervised_run import tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

CODE = 7
LIMITED = "import threading; threading.stack_size(1 << 50); from supervise.cli import main; main()"
# Nothing that a job or a user can write is known to break the engine, so this does.
BROKEN = """
from supervise.cli import main
from supervise.core import engine

def step(policy, state, event, judge=engine.step):
    return {}["an error of ours"] if state.step > 5 else judge(policy, state, event)

engine.step = step
main()
"""


@pytest.fixture
def start(supervise, halves):
    """A function that starts a long job, and waits for a status."""

    def start(*options, **more):
        given = ("run", "--policy", halves, "--run-dir", "run", *options)
        job = tiny("--steps", 100000, "--sleep", 0.01)
        running = supervise.start(*given, "--", *job, **more)
        wait_until(lambda: supervise.run_of().state, "a status")
        return running

    return start


def test_a_supervisor_that_can_start_no_thread_watches_on(supervise, halves):
    argv = ["--policy", halves, "--run-dir", "run", "--drill", "lr_spike:factor=3000,steps=8@100"]
    job = tiny("--steps", 150, "--sleep", 0.005, "--exit", CODE)
    running = supervise.start(*argv, "--", *job, by=("-c", LIMITED))
    _, errors = running.communicate(timeout=120)
    records = supervise.records("run")
    notes = " ".join(r["reason"] for r in records if r["kind"] == "note")

    assert running.returncode == CODE, errors
    assert f"supervise: exit code {CODE} at step 149" in errors
    assert "no thread for the action: can't start new thread" in str(records)
    assert "the checkpoint guard failed: can't start new thread" in notes
    assert "the machine is not measured: can't start new thread" in notes
    assert any(r["reason"] == "console: no thread could be started" for r in records)
    supervise.prove("run")


def test_a_supervisor_without_memory_passes_signals_on_and_ends(start):
    """A thread that dies before its first call is not waited for without end."""
    running = start()
    resource.prlimit(running.pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
    running.send_signal(signal.SIGTERM)
    said = running.communicate(timeout=120)[1]

    assert running.returncode == 128 + signal.SIGTERM, said


@pytest.mark.parametrize(
    ("limit", "most", "why"),
    [("NOFILE", 8, "only 8 files may be open, "), ("AS", 100 << 20, "only 100 MiB of address ")],
)
def test_where_limits_leave_no_room_the_job_runs_as_without_us(supervise, limit, most, why):
    job = ["sh", "-c", "echo $$; exit 7"]
    number = getattr(resource, f"RLIMIT_{limit}")
    running = subprocess.Popen(
        [sys.executable, "-m", "supervise", "--run-dir", "run", "--", *job],
        cwd=supervise.home,
        env=supervise.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(number, (most, most)),
    )
    out, said = running.communicate(timeout=60)

    assert (running.returncode, out) == (7, f"{running.pid}\n"), said
    assert said.startswith(f"supervise: not watched: {why}") and said.count("\n") == 1
    assert not (supervise.home / "run").exists()


@pytest.mark.parametrize(("what", "answer"), [("audit.log", 64), ("journal", 1)])
def test_records_that_are_removed_end_the_acting(start, supervise, what, answer):
    running, run = start(), supervise.home / "run"
    (run / what).unlink() if what == "audit.log" else shutil.rmtree(run / what)
    said = ""
    while "is missing: it was removed, moved or replaced; watching only" not in said:
        line = running.stderr.readline()
        assert line, said
        said += line
    refused = supervise("lr", "run", "0.5")
    running.send_signal(signal.SIGTERM)
    rest = running.communicate(timeout=120)[1]

    assert refused.returncode == answer, refused.stderr
    assert answer == 64 or "is missing: it was removed" in refused.stderr
    assert running.returncode == 128 + signal.SIGTERM
    assert "is missing: it was removed, moved or replaced; watching only" not in rest
    assert "exit code 143" in rest
    assert (run / "audit.log").exists() is (what == "journal")


def test_a_view_that_cannot_be_made_leaves_the_run_protected(start, supervise):
    """A directory where the status was."""
    running, run, state = start(), supervise.run_of(), supervise.home / "run" / "state.json"
    state.unlink()
    state.mkdir()
    wait_until(lambda: run.kinds("note", "view-failed"), "the view has failed")
    state.rmdir()
    wait_until(lambda: run.state.get("step", -1) > 5, "another status")
    accepted = supervise("lr", "run", "0.5")
    running.send_signal(signal.SIGTERM)
    said = running.communicate(timeout=120)[1]
    log = (supervise.home / "run" / "supervisor.log").read_text()

    assert accepted.returncode == 0, said
    assert running.returncode == 128 + signal.SIGTERM
    assert said.count("the run stays protected") == 1 == log.count('"exception"'), said
    supervise.prove("run")


def test_an_error_of_ours_that_ends_the_protection_is_reported_and_another_supervisor_takes_over(
    start, supervise, receiver
):
    """By the command of the message; the job is not touched, and commands are taken again."""
    (url, received), run, home = receiver(200), supervise.run_of(), supervise.home / "run"
    supervise.env["HOOK"] = url
    start("--notify", "webhook:HOOK", by=("-c", BROKEN))
    wait_until(lambda: received and run.state.get("protection_off"), "the message and the status")
    status, refused = supervise("status", "run"), supervise("lr", "run", "0.5")
    ((_, message),) = received
    (note,) = run.kinds("note", "unprotected")

    assert "SEV1" in str(message) and "this run is not protected any more" in str(message)
    assert f"supervise checkpoints {home}" in str(message)
    assert f"its traceback is in {home}/supervisor.log" in str(message)
    assert "KeyError" in str(message) and "Traceback" in note["data"]["traceback"]
    assert "Traceback" in (home / "supervisor.log").read_text()
    assert "protection is off: an error of supervise: KeyError" in status.stdout
    assert refused.returncode and "the protection of run is off" in refused.stderr

    command = re.search(r"kill -KILL (\d+) && supervise adopt ([^\s,;\\]+)", str(message))
    assert command, message
    os.kill(int(command[1]), signal.SIGKILL)
    adopter = supervise.start("adopt", command[2])
    wait_until(lambda: run.state.get("step", -1) > 100, "steps beyond the error")
    accepted, again = supervise("lr", "run", "0.5"), run.state
    adopter.send_signal(signal.SIGTERM)
    said = adopter.communicate(timeout=120)[1]

    assert accepted.returncode == 0, said
    assert "protection_off" not in again and again["attempt"] == 0
    assert adopter.returncode == 128 + signal.SIGTERM, said
    supervise.prove("run")
