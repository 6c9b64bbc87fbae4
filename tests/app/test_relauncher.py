"""Stopped, put back, started: in this order, each once, wherever a supervisor died between them."""

import json
import threading

import pytest

from supervise.actions import SLOWEST_RELAUNCH
from supervise.checkpoints import RestoredCheckpoint
from supervise.core import CheckGap, DiskFree, Finding
from supervise.core.model import Payload, Policy
from supervise.errors import ActionError, LaunchError, StoreError
from supervise.runtime import Relauncher, was_stopped_for
from supervise.store import RunDir

pytestmark = pytest.mark.slow  # waits for processes and deadlines

POLICY = Policy("p", "sha256:0", "enforce", {}, ())
REWARM = {"start": 0.1, "steps": 50}
ARGS = Payload(
    {"checkpoint": "ckpt-2", "path": "/old/ckpt.pt", "step": 99, "bytes": 0}
    | {"attempt": 3, "rewarm": REWARM, "skip": None}
)
NEWER = ARGS.extended(checkpoint="ckpt-3", step=149)
STAGES = [{"how": "term", "returncode": -15, "args": ARGS}]
STAGES += [{"path": "/ckpt.pt", "moved": ["ckpt-3"]}]
STAGES += [{"pid": 4242, "attempt": 3}]


class Edges:
    """A guard, a main loop and a gate; all remember what they were asked for.

    Attributes:
        chosen: what the engine orders, one after the other; the last one stands.
        errors: of a stage, or of a stage for one checkpoint.
        settled: there is nothing to choose.
        health: what the gate finds while the job runs, and once it is dead. notices: of that.
    """

    def __init__(self, start):
        self.start_process, self.asked, self.notices = start, [], []
        self.control = None
        self.is_verifying_now = self.settled = False
        self.chosen, self.errors = [ARGS], {}
        self.health = {True: [], False: []}

    def checkpoint_origin(self, checkpoint):
        return f"/out/{checkpoint}.pt", 7, "/bin/python3"

    def unfit_host_record(self, start, reason):
        return {"host": "here", "folder": "/out", "why": reason}

    def check_host(self, start, within_s, *, alive):
        self.looked_at = start, within_s
        if isinstance(self.health[alive], Exception):
            raise self.health[alive]
        return self.health[alive]

    def begin(self, *stage):
        self.asked.append(stage)
        for name in (stage[0], stage[:2]):
            if name in self.errors:
                raise self.errors[name]

    def verify_candidates(self, within_s):
        self.begin("verify_candidates", within_s > 0)
        if self.settled:
            return False
        self.is_verifying_now = True
        threading.Timer(0.05, self.end_verification).start()
        return True

    def end_verification(self):
        self.asked.append("verified")
        self.is_verifying_now = False

    def choose_relaunch_checkpoint(self):
        self.asked.append(("choose", self.control.process.returncode))
        return self.chosen.pop(0) if len(self.chosen) > 1 else self.chosen[0]

    def prepare_restore(self, checkpoint):
        self.begin("prepare", checkpoint, self.control.process.returncode)

    def restore(self, checkpoint):
        self.begin("restore", checkpoint, self.control.process.returncode)
        return RestoredCheckpoint("/ckpt.pt", ["ckpt-3"])

    def restart(self, launch):
        self.begin("launch", launch.path, launch.step)
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
def control(run, edges, controlled):
    relaunch = Relauncher(run, edges, edges, edges, edges.notices.append)
    edges.control = controlled(relaunch=relaunch)
    return edges.control


def relaunch(control, order=ARGS, *, deadline_s=60):
    return control.relaunch(order, key="r:1", deadline_s=deadline_s)


def steps(edges):
    return [each if isinstance(each, str) else each[0] for each in edges.asked]


def written(run):
    (path,) = (run.path / "relaunch").iterdir()
    return path, json.loads(path.read_text())


def test_a_relaunch_stops_puts_back_and_starts(control, edges, run):
    old = control.process

    seen = relaunch(control)

    assert edges.asked == [
        ("prepare", "ckpt-2", None),
        ("verify_candidates", True),
        "verified",
        ("choose", -15),
        ("restore", "ckpt-2", -15),
        ("launch", "/ckpt.pt", 99),
    ]
    assert (control.exit_code, old.returncode, control.process.returncode) == (None, -15, None)
    stop = {"how": "term", "returncode": -15}
    ids = {"pid": control.process.pid, "attempt": 3}
    assert seen == {**stop, **STAGES[1], **ids, "checkpoint": "ckpt-2", "step": 99}
    assert written(run)[1] == {"key": "r:1", **STAGES[0], **STAGES[1], **ids}


@pytest.mark.parametrize(
    ("done", "left"),
    [
        (1, ["verify_candidates", "verified", "choose", "prepare", "restore", "launch"]),
        (2, ["launch"]),
        (3, []),
    ],
)
def test_another_supervisor_goes_on_where_the_marks_end(control, edges, run, done, left):
    """It died after a stage; what was done is not done again, above all not to the new job."""
    relaunch(control)
    path, marks = written(run)
    kept = {"key"} | {key for stage in STAGES[:done] for key in stage}
    path.write_text(json.dumps({k: v for k, v in marks.items() if k in kept}))
    edges.asked.clear()
    if left == ["launch"]:  # the action would be reported as failed, with a job that runs
        with pytest.raises(ActionError, match="too late"):
            relaunch(control, deadline_s=4.0)
        assert edges.asked == []

    relaunch(control)

    assert steps(edges) == left


@pytest.mark.parametrize("died", [False, True], ids=["by us", "by an heir"])
def test_what_is_verified_after_the_stop_is_gone_back_to(control, edges, run, died):
    if died:
        edges.errors["restore"] = StoreError("killed")
        with pytest.raises(ActionError, match="killed"):
            relaunch(control)
        assert written(run)[1] == {"key": "r:1", **STAGES[0]}
    edges.errors.clear()
    edges.chosen = [NEWER]

    seen = relaunch(control, NEWER if died else ARGS)

    assert (seen["checkpoint"], seen["step"]) == ("ckpt-3", 149)
    assert written(run)[1]["args"] == NEWER and "failed" not in seen
    assert edges.asked[-3:] == [
        ("prepare", "ckpt-3", -15),
        ("restore", "ckpt-3", -15),
        ("launch", "/ckpt.pt", 149),
    ]


@pytest.mark.parametrize("stage", ["prepare", "restore"])
def test_one_that_cannot_be_put_back_gives_way_to_the_first(control, edges, run, stage):
    edges.chosen = [NEWER]
    edges.errors[stage, "ckpt-3"] = StoreError("damaged")

    seen = relaunch(control)

    assert (seen["checkpoint"], seen["step"]) == ("ckpt-2", 99)
    assert list(seen["failed"]) == ["ckpt-3"] and written(run)[1]["args"] == ARGS
    assert steps(edges)[-3:] == ["prepare", "restore", "launch"]


def test_when_nothing_can_be_put_back_nothing_is_started(control, edges):
    edges.chosen, edges.errors["restore"] = [NEWER], StoreError("it is gone")

    with pytest.raises(ActionError, match="gone"):
        relaunch(control)

    assert control.exit_code == 78
    assert [each[1] for each in edges.asked if each[0] == "restore"] == ["ckpt-3", "ckpt-2"]
    assert "launch" not in steps(edges)


@pytest.mark.parametrize(
    ("attributes", "failed"),
    [
        (
            {"errors": {"verify_candidates": ValueError("a bug")}},
            {"failed": {"checkpoint-choice": "a bug"}},
        ),
        ({"settled": True}, {}),  # people approved it
    ],
)
def test_where_nothing_is_chosen_the_order_is_carried_out(control, edges, attributes, failed):
    vars(edges).update(attributes)

    seen = relaunch(control)

    assert seen["step"] == 99 and {k: v for k, v in seen.items() if k == "failed"} == failed
    assert steps(edges) == ["prepare", "verify_candidates", "restore", "launch"]


def test_neither_preparing_nor_verifying_takes_longer_than_there_is_time(control, edges):
    edges.chosen = [NEWER.extended(bytes=60 * SLOWEST_RELAUNCH)]
    edges.end_verification = lambda: None  # it never comes to its end
    large = ARGS.extended(bytes=54 * SLOWEST_RELAUNCH)

    assert relaunch(control, large)["step"] == 99
    assert edges.is_verifying_now
    assert [each[1] for each in edges.asked if each[0] == "prepare"] == ["ckpt-2"]


UNFIT = [Finding("disk", "bad", DiskFree(free_gb=1.0, folder="/out", size_gb=2.0))]
IDLE = ARGS.extended(if_idle_s=0.2)


@pytest.mark.parametrize(
    ("attributes", "order", "deadline_s", "error"),
    [
        ({"health": {True: UNFIT}}, ARGS, 120, "not fit to start the job on: disk"),
        ({}, ARGS, 20.0, "not stopped"),  # preparing took as long as there was
        ({}, IDLE, 60, r"main threads are cannot be read\): not restarted"),
        ({"errors": {"prepare": StoreError("the pin is damaged")}}, ARGS, 60, "damaged"),
    ],
    ids=["an unfit host", "no time", "it may work", "a damaged checkpoint"],
)
def test_a_job_that_could_not_be_started_again_is_not_stopped(
    control, edges, attributes, order, deadline_s, error
):
    vars(edges).update(attributes)
    with pytest.raises(ActionError, match=error):
        relaunch(control, order, deadline_s=deadline_s)

    assert control.process.poll() is None and control.exit_code is None
    assert steps(edges) == ["prepare"]


@pytest.mark.parametrize("order", [ARGS, IDLE], ids=["by order", "for a standstill"])
def test_a_job_that_is_dead_already_is_started_and_not_stopped(control, edges, order):
    """One that cannot be started keeps its code: the engine knows whether a person is needed."""
    control.process.signal(9)
    control.process.wait(60.0)
    edges.errors["restore"] = StoreError("the disk is full")
    with pytest.raises(ActionError, match="the disk is full"):
        relaunch(control, order)
    assert control.exit_code is None

    edges.errors.clear()
    seen = relaunch(control, order)
    assert (seen["how"], seen["returncode"]) == ("ended", -9)
    assert control.process.returncode is None


def test_on_a_host_that_is_not_fit_nothing_is_started(control, edges, run):
    """The finding is on record, a person is needed; a later try of the order looks again."""
    edges.health[False] = UNFIT
    with pytest.raises(ActionError, match="not fit"):
        relaunch(control)

    assert control.exit_code == 78 and edges.asked[-1][0] == "restore"
    assert edges.notices[-1].data["unfit"].startswith("disk: 1.0 GB free")
    start, within_s = edges.looked_at
    assert (str(start.folder), start.size, start.python) == ("/out", 7, "/bin/python3")
    assert 0 < within_s < 55
    assert run.read_json("unfit.json")["host"] == "here"
    edges.health[False] = []
    assert relaunch(control)["attempt"] == 3


@pytest.mark.parametrize(
    "health", [[Finding("matmul", "undecided", CheckGap.NO_TIME)], OSError("a bug")]
)
def test_a_gate_that_cannot_decide_lets_the_job_start(control, edges, health):
    edges.health[False] = health

    assert relaunch(control)["attempt"] == 3


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("restore", StoreError("no ckpt-2")),
        ("launch", LaunchError("no such command", exit_code=127)),
    ],
)
def test_after_what_fails_a_later_try_of_the_order_goes_on_there(control, edges, stage, error):
    edges.errors[stage] = error
    with pytest.raises(ActionError, match=str(error)):
        relaunch(control)
    edges.errors.clear()
    edges.asked.clear()

    assert relaunch(control)["attempt"] == 3
    assert stage in steps(edges)


def test_a_job_that_ended_while_a_dead_supervisor_stopped_it_was_stopped(control, edges, run):
    """That it ended by chance cannot be shown; so a relaunch that fails now needs a person too."""
    edges.errors["restore"] = StoreError("the disk is full")
    with pytest.raises(ActionError):
        relaunch(control)
    path, _ = written(run)
    path.write_text(json.dumps({"key": "r:1", "stopping": True}))
    assert not was_stopped_for(run, "r:1")  # nobody knows yet
    control.exit_code = None

    with pytest.raises(ActionError):
        relaunch(control)

    assert written(run)[1]["how"] == "stopped" and control.exit_code == 78
    assert was_stopped_for(run, "r:1") and not was_stopped_for(run, "r:2")
    edges.errors.clear()
    assert relaunch(control)["how"] == "stopped"
    assert not was_stopped_for(run, "r:1") and control.exit_code is None
