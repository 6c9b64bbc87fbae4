"""The same command line again, after the supervisor was killed: `run --resume-run`."""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import suppress

import psutil
import pytest

from supervise.core.model.events import Frame
from supervise.store import journal

pytestmark = pytest.mark.slow

CODE = 7  # of the job
GATED = """\
import time
from pathlib import Path
print("up", flush=True)
while not Path("go").exists():
    time.sleep(0.02)
"""


class Service:
    """What a service manager does: one command line, given again and again."""

    def __init__(self, supervise, job):
        self.supervise, self.job = supervise, job
        self.started = []

    def line(self, *job, policy="nano", options=()):
        given = ("--policy", policy, "--mode", "observe", "--run-dir", "main", "--resume-run")
        return (*given, *options, "--", *(job or self.job))

    def start(self):
        self.started.append(self.supervise.start(*self.line()))
        return self.started[-1]

    def once(self, *job, **other):
        return self.supervise(*self.line(*job, **other))

    def kill(self, watcher):
        """Let the supervisor die while the job runs."""
        log = self.supervise.home / "main" / "launch.json"
        watcher.stdout.readline()
        assert log.exists()
        watcher.send_signal(signal.SIGKILL)
        watcher.wait(60)

    def go(self):
        (self.supervise.home / "go").touch()


@pytest.fixture
def serve(supervise):
    """A function from a job's command to a service that runs it."""
    made = []

    def make(job):
        made.append(Service(supervise, job))
        return made[-1]

    yield make
    made[0].go()
    for service in made:
        for watcher in service.started:
            watcher.communicate(timeout=60)


@pytest.fixture
def gated(supervise, serve):
    """A service whose job ends when it may."""
    (supervise.home / "job.py").write_text(GATED)
    return serve((sys.executable, "job.py"))


def told(done):
    return done.returncode, done.stderr


def test_the_same_command_goes_on_with_a_living_job(supervise, serve, tiny_job):
    """No frame is lost or judged twice, one audit log, the job's own exit code."""
    service = serve(tiny_job("--steps", 300, "--sleep", 0.01, "--exit", CODE))
    service.kill(service.start())
    done = service.once()

    assert done.returncode == CODE, done.stderr
    frames = [event for _, event in journal.read(supervise.home / "main/journal", only=(Frame,))]
    assert [frame.step for frame in frames] == list(range(300))
    assert {r["epoch"] for r in supervise.records("main")} == {1, 2}
    supervise.prove("main")


def test_a_run_that_is_over_is_followed_by_another(supervise, serve, tiny_job):
    """In a directory with the next number. One whose job ended with nobody watching is ended first,
    with the job's exit code."""
    service = serve(tiny_job("--steps", 100, "--exit", CODE))
    service.kill(service.start())
    pid = json.loads((supervise.home / "main/launch.json").read_text())["pid"]
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.02)

    assert service.once().returncode == CODE
    assert not (supervise.home / "main.2").exists()
    assert service.once().returncode == CODE
    for name in ("main", "main.2"):
        assert supervise.records(name)[-1]["reason"] == f"exit code {CODE}"
        supervise.prove(name)


def test_a_run_that_is_watched_or_was_started_otherwise_is_left_alone(gated, supervise):
    """Refused with 64, and what differs; the same command as before goes on with it."""
    watcher = gated.start()
    watcher.stdout.readline()
    code, text = told(gated.once())
    assert code == 64 and f"is watched by process {watcher.pid}" in text, text
    watcher.send_signal(signal.SIGKILL)
    watcher.wait(60)

    (supervise.home / "mine.yaml").write_text("version: supervise/v1\npolicy: mine\nuse: [hang]\n")
    for differs, (code, text) in {
        "command": told(gated.once("true")),
        "drills": told(gated.once(options=("--drill", "hang@99"))),
        "mode observe, not shadow": told(gated.once(options=("--mode", "shadow"))),
        "policy nano, not mine": told(gated.once(policy="mine.yaml")),
    }.items():
        assert code == 64 and "was started with" in text and differs in text, text
    assert not (supervise.home / "main.2").exists()
    gated.go()
    assert "goes on with" in gated.once().stderr
    assert supervise.records("main")[-1]["kind"] == "run_end"


def test_without_a_directory_there_is_nothing_to_go_on_with(supervise):
    """The directory has a name of its own each time."""
    code, text = told(supervise("run", "--resume-run", "--", "true"))

    assert code == 64 and "--run-dir" in text
