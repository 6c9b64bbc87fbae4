"""Supervisors that are killed in the middle of a rollback, and those that take their place.

The job must come out as if one supervisor had watched it: one rollback, one closed incident, its
own exit code, a log that verifies and that replay agrees with.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
from collections import Counter
from pathlib import Path

import psutil
import pytest

from supervise.core.model import Adopted, Exited, Frame, Launched
from supervise.runtime import make_environment
from tests.support.supervised_run import Records, Supervise, tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

DRIVER = (str(Path(__file__).with_name("driver.py")),)
KILLED = -signal.SIGKILL
CODE = 7  # of the job
STEPS = 220
HIT = "lr_spike:factor=3000,steps=8@210"

QUICK = """\
version: supervise/v1
policy: quick
mode: enforce
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 0.7}}
rules: [{id: high, when: high, sev: SEV1, run: back}]
runbooks:
  back:
    steps: [pause: {lease: 900s}, snapshot, rollback: {at_least: 5, start: 0.5, rewarm: 5}, resume]
    verify: {within: 60, clear_for: 5}
savepoints: {every: 10, keep: 40}
budgets: {all: {max: 8, per: 1000}, rollback: {max: 2, per: 1000}}
escalate: {ladder: [back, hold], reset_after: 500}
warmup: 10
probation: 20
"""


class Lives:
    """One run under supervisors that die, one after the other."""

    def __init__(
        self, supervise: Supervise, job: list[str], drill: str = "lr_spike@60", policy: str = QUICK
    ) -> None:
        self._supervise, self._job, self._drill = supervise, job, drill
        self.run, self.out = supervise.home / "run", supervise.home / "out.txt"
        (supervise.home / "policy.yaml").write_text(policy)

    def begin(self, death: str) -> int:
        """Start the job under a supervisor that dies as told; return its returncode."""
        return self._driven("run", death, "policy.yaml", self.run, self._drill, *self._job)

    def adopt(self, death: str = "never") -> int:
        """Let another one take over, which dies as told."""
        return self._driven("adopt", death, self.run)

    def _driven(self, *args: object) -> int:
        with self.out.open("a") as out:  # the job goes on writing
            driver = self._supervise.start(*args, by=DRIVER, stdout=out, stderr=subprocess.STDOUT)
            return driver.wait(timeout=120)

    def events(self, kind: type) -> list:
        return Records(self.run).events(kind)

    def wait_for_the_end_of_the_job(self) -> None:
        pid = json.loads((self.run / "launch.json").read_text())["pid"]

        def is_over():
            try:
                return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:  # before anybody looked
                return True

        wait_until(is_over, "the end of the job")


def assert_saved_once(lives, supervise, records):
    """The run was saved by one rollback, and all of its records say so."""
    attempts = [frame.attempt for frame in lives.events(Frame)]
    steps = [(frame.attempt, frame.step) for frame in lives.events(Frame)]
    assert set(attempts) == {0, 1}, Counter(attempts)
    assert attempts == sorted(attempts)
    assert len(set(steps)) == len(steps)
    first = next(step for attempt, step in steps if attempt == 1)
    assert [step for attempt, step in steps if attempt == 1] == list(range(first, STEPS))
    done = [r for r in records if r["kind"] == "commit" and "rollback" in r["reason"]]
    assert len(done) == 1
    intents = [r["data"]["action"]["id"] for r in records if r["kind"] == "intent"]
    assert len(intents) == len(set(intents))
    closed = [r for r in records if r["kind"] == "incident" and r["data"]["what"] == "closed"]
    assert [r["reason"][:17] for r in closed] == ["closed: recovered"]
    told = {f"{r['run']}:{r['seq']}" for r in records if r["kind"] == "notify_intent"}
    results = [k for r in records if r["kind"] == "notify_result" for k in r["data"]["keys"]]
    assert set(results) == told
    assert len(lives.events(Exited)) == 1
    assert records[-1]["kind"] == "run_end"
    supervise.prove("run")


def test_a_job_that_ended_alone_is_closed_properly(supervise):
    lives = Lives(supervise, tiny("--steps", 60, "--exit", CODE), drill="hang@9999")
    assert lives.begin("record 3") == KILLED
    lives.wait_for_the_end_of_the_job()
    assert lives.adopt() == CODE, lives.out.read_text()

    assert [frame.step for frame in lives.events(Frame)] == list(range(60))
    assert [event.alive for event in lives.events(Adopted)] == [False]
    supervise.prove("run")
    run = supervise.records("run")[0]["run"]
    assert not [p for p in Path("/dev/shm").iterdir() if run in p.name]
    remains = make_environment(Path("/dev/shm"), run)  # of one that left before a slow disk
    again = supervise("adopt", "run")
    assert again.returncode == 64
    assert "has ended: exit code 7" in again.stderr
    assert not remains.exists()


@pytest.mark.chaos
def test_one_effect_whenever_the_supervisor_dies(tmp_path, supervise):
    """After each single record of the whole run, until one is too late to be written."""
    job = tiny("--steps", STEPS, "--sleep", 0.01, "--exit", CODE)
    for number in itertools.count(1):
        supervise.home = tmp_path / str(number)
        supervise.home.mkdir()
        lives = Lives(supervise, job)
        code = lives.begin(f"record {number}")
        if code == CODE:
            break  # it ended before it had written so many
        assert code == KILLED
        written = supervise.records("run")
        if written[-1]["kind"] == "run_end":
            continue
        assert lives.adopt() == CODE, (number, lives.out.read_text())
        assert_saved_once(lives, supervise, supervise.records("run"))
    assert number > 25


@pytest.mark.chaos
@pytest.mark.parametrize(
    "deaths",
    [
        ("intent relaunch",),
        ("event Exited",),
        ("event Exited", "note goes back", "event Launched"),
        ("event Exited", "note was restarted", "event Finished"),
        ("commit relaunch",),
    ],
)
def test_one_launch_whenever_the_supervisor_dies(supervise, comes_back, resuming_job, deaths):
    """Between the end of the old process and the first step of the new one."""
    job = resuming_job("--max_iters=350")
    lives = Lives(supervise, job, HIT, comes_back.read_text())

    assert lives.begin(deaths[0]) == KILLED
    for death in deaths[1:]:
        assert lives.adopt(death) == KILLED, lives.out.read_text()
    assert lives.adopt() == 0, lives.out.read_text()

    assert lives.out.read_text().count("resumed at 200") == 1
    assert [event.attempt for event in lives.events(Launched)] == [0, 1]
    assert len(lives.events(Exited)) == 2
    records = supervise.records("run")
    closed = [r["reason"] for r in records if r["data"].get("what") == "closed"]
    assert [reason[:17] for reason in closed] == ["closed: recovered"]
    supervise.prove("run")
