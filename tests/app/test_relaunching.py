"""Stopped, put back, started: in this order, each once, wherever a supervisor died between them."""

from __future__ import annotations

import json

import pytest

from supervise.app.relaunching import MARGIN_S, STOP_S, Relauncher
from supervise.core.rule import Policy
from supervise.errors import ActionError, LaunchError, StoreError, UsageError
from supervise.store.rundir import RunDir

POLICY = Policy("p", "sha256:0", "enforce", {}, ())
ARGS = {"checkpoint": "ckpt-2", "path": "/old/ckpt.pt", "step": 99, "attempt": 3,
        "rewarm": {"start": 0.1, "steps": 50}, "skip": None}  # fmt: skip
STAGES = [{"how": "term", "returncode": -15}, {"path": "/ckpt.pt", "moved": ["ckpt-3"]}]
STAGES += [{"pid": 4242, "attempt": 3}]


class Edges:
    """A guard and a launcher; both remember what they were asked for."""

    def __init__(self, start):
        self.start_process = start
        self.asked = []
        self.error = None
        self.control = None

    def prepare(self, checkpoint):
        self.asked.append(("prepare", checkpoint, self.control.process.returncode))
        if isinstance(self.error, UsageError):
            raise StoreError("damaged")

    def put_back(self, checkpoint):
        self.asked.append(("put_back", checkpoint, self.control.process.returncode))
        if isinstance(self.error, StoreError):
            raise self.error
        return {"path": "/ckpt.pt", "moved": ["ckpt-3"]}

    def launch(self, launch):
        self.asked.append(("launch", launch.path, launch.step))
        if isinstance(self.error, LaunchError):
            raise self.error
        process = self.start_process("sleep", "60")
        self.control.replace(process)
        return process.pid


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "run", argv=[], policy=POLICY, wall="2026-01-05T10:11:12Z")


@pytest.fixture
def edges(start):
    return Edges(start)


@pytest.fixture
def control(run, edges, start, looping):
    """A control over a running job, with a fresh supervisor's relauncher."""
    relaunch = Relauncher(run, edges, edges.launch)
    edges.control = looping(start("sleep", "60"), relaunch)
    return edges.control


def written(run):
    (path,) = (run.path / "relaunch").iterdir()
    return path, json.loads(path.read_text())


def test_a_relaunch_stops_puts_back_and_starts(control, edges, run):
    """What takes long comes before the stop, what moves files after it; then the new one runs."""
    old = control.process

    seen = control.relaunch(ARGS, key="r:1", deadline_s=60)

    assert edges.asked == [
        ("prepare", "ckpt-2", None), ("put_back", "ckpt-2", -15), ("launch", "/ckpt.pt", 99),
    ]  # fmt: skip
    assert control.exit_code is None
    assert old.returncode == -15
    assert control.process.returncode is None
    assert seen == {
        **STAGES[0], **STAGES[1], "pid": control.process.pid, "attempt": 3,
        "checkpoint": "ckpt-2", "step": 99,
    }  # fmt: skip
    assert written(run)[1] == {"key": "r:1", **{k: seen[k] for s in STAGES for k in s}}


def test_the_same_order_again_starts_nothing(control, edges):
    """Its answer is kept in the run directory."""
    first = control.relaunch(ARGS, key="r:1", deadline_s=60)
    process = control.process

    assert control.relaunch(ARGS, key="r:1", deadline_s=60) == first
    assert control.process is process
    assert process.poll() is None
    assert len(edges.asked) == 3


@pytest.mark.parametrize(("done", "left"), [(1, ["put_back", "launch"]), (2, ["launch"]), (3, [])])
def test_another_supervisor_goes_on_where_the_marks_end(control, edges, run, done, left):
    """It died after a stage; what was done is not done again, above all not to the new job."""
    control.relaunch(ARGS, key="r:1", deadline_s=60)
    path, marks = written(run)
    kept = {"key"} | {key for stage in STAGES[:done] for key in stage}
    path.write_text(json.dumps({k: v for k, v in marks.items() if k in kept}))
    edges.asked.clear()

    control.relaunch(ARGS, key="r:1", deadline_s=60)

    assert [what for what, *_ in edges.asked] == left


def test_a_job_that_is_dead_already_is_not_stopped(control, edges):
    """It crashed: the checkpoint is put back and it starts again."""
    control.process.signal(9)
    control.process.wait(10)

    seen = control.relaunch(ARGS, key="r:1", deadline_s=60)

    assert (seen["how"], seen["returncode"]) == ("ended", -9)
    assert control.process.returncode is None


@pytest.mark.parametrize(
    "error", [StoreError("no ckpt-2"), LaunchError("no such command", exit_code=127)]
)
def test_what_fails_is_the_actions_error(control, edges, error):
    """A later try of the same order finds the stages that were reached."""
    edges.error = error
    with pytest.raises(ActionError, match=str(error)):
        control.relaunch(ARGS, key="r:1", deadline_s=60)
    edges.error, failed = None, edges.asked[-1][0]
    edges.asked.clear()

    assert control.relaunch(ARGS, key="r:1", deadline_s=60)["attempt"] == 3
    assert edges.asked[0][0] == failed


def test_nothing_starts_when_nobody_waits_for_it_any_more(control, edges, run):
    """The action would be reported as failed, with a job that runs."""
    control.relaunch(ARGS, key="r:1", deadline_s=60)
    path, marks = written(run)
    path.write_text(json.dumps({k: v for k, v in marks.items() if k not in STAGES[2]}))
    edges.asked.clear()

    with pytest.raises(ActionError, match="too late"):
        control.relaunch(ARGS, key="r:1", deadline_s=MARGIN_S - 1.0)

    assert edges.asked == []


def test_nothing_is_stopped_that_could_not_be_started_in_time(control, edges):
    """Preparing took as long as there was."""
    with pytest.raises(ActionError, match="not stopped"):
        control.relaunch(ARGS, key="r:1", deadline_s=STOP_S)

    assert [what for what, *_ in edges.asked] == ["prepare"]
    assert control.process.poll() is None


def test_a_checkpoint_that_cannot_be_put_back_costs_the_job_nothing(control, edges):
    """It is found out while the job lives."""
    edges.error = UsageError("the pin is damaged")

    with pytest.raises(ActionError, match="damaged"):
        control.relaunch(ARGS, key="r:1", deadline_s=60)

    assert [what for what, *_ in edges.asked] == ["prepare"]
    assert control.process.poll() is None and control.exit_code is None


@pytest.mark.parametrize(("crashed", "code"), [(False, 78), (True, None)])
def test_a_job_that_we_stopped_and_cannot_start_needs_a_person(control, edges, crashed, code):
    """The exit code says so; one that had ended by itself keeps its own."""
    if crashed:
        control.process.signal(9)
        control.process.wait(10)
    edges.error = StoreError("the disk is full")

    with pytest.raises(ActionError, match="the disk is full"):
        control.relaunch(ARGS, key="r:1", deadline_s=60)

    assert control.exit_code == code
