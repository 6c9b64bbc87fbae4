"""Control over real segments, with a real mailbox at the other end in the job's process."""

import json
import sys
import time

import pytest

from supervise.actions import LrScale, Pause, Resume, Snapshot, Stop
from supervise.core.model import PlanContext
from supervise.errors import ActionError
from supervise.runtime import Control, Evidence, Lease, Segments
from tests.support.waiting import wait_until

# A job whose "training" only serves the mailbox, once per step of 5 ms.
JOB = """
import os, sys, time
from supervise_probe import wire
from supervise_probe.ipc.segment import Mailbox, Writer
writer = Writer.create(sys.argv[1], "run", 0, 1, slots=64)
mailbox, held, step, until = Mailbox(writer), False, 0, 0
writer.announce(["train_loss_raw"])
try:
    while True:
        held = held and max(until, writer.lease_until_ns()) > time.monotonic_ns()
        step += not held
        phase = wire.PHASES.index("paused" if held else "step")
        writer.beat(time.monotonic_ns(), phase)
        if not held:
            writer.publish(step, 0, [2.5], time.monotonic_ns())
        for command in mailbox.poll():
            ok, error, result, end = True, None, {}, False
            if command.verb == "pause":
                held, result = True, {"paused_step": step}
                until = time.monotonic_ns() + int(command.args["lease_s"] * 1e9)
            elif command.verb == "resume":
                held, result = False, {"resumed": True}
            elif command.verb == "lr_scale":
                result = {"lr_scale": command.args["value"]}
            elif command.verb == "snapshot":
                path = os.path.join(command.args["directory"], "rank-0-stacks.txt")
                open(path, "w").write("here\\n")
                result = {"files": [path]}
            elif command.verb == "stop":
                result, end = {"stopping_step": step}, True
            else:
                ok, error = False, "no such verb"
            mailbox.ack(command, step, ok, result, error)
            if end:
                raise KeyboardInterrupt
        time.sleep(0.005)
except KeyboardInterrupt:
    sys.exit(3)
"""


@pytest.fixture
def live(start, looping, tmp_path):
    """A control over a running job with its probe attached."""
    shm, marks = tmp_path / "shm", tmp_path / "probe"
    for directory in (shm, marks):
        directory.mkdir()
    segments = Segments(shm, marks, time.monotonic_ns)
    evidence = Evidence(tmp_path / "incidents", marks, list, directory=tmp_path)
    process = start(sys.executable, "-c", JOB, str(shm))
    control = Control(process, segments, evidence.collect, lambda *_: {}, lease=Lease(0.4))
    looping(control, segments.poll)
    wait_until(lambda: segments.ranks)
    return control


AIM = PlanContext(incident="inc-1", step=9, breach_step=8, attempt=0, world_size=1, severity="SEV1")


def perform(action, control, key="k"):
    return action.perform(control, action.plan(AIM), key=key)


def test_commands_arrive_and_their_effects_come_back(live):
    seen = perform(LrScale(set=0.5), live)
    assert seen == {"lr_scale": 0.5, "ranks": 1, "ack_step": seen["ack_step"]}
    with pytest.raises(ActionError, match="rank 0 refused dance: no such verb"):
        live.command("dance", {}, key="d", deadline_s=10)


def test_a_pause_outlives_its_first_lease_and_ends_with_resume(live):
    perform(Pause(), live, key="p")

    time.sleep(1.0)
    assert live.on_loop(live.ranks, 5.0)[0].phase == "paused"
    perform(Resume(), live, key="r")

    wait_until(lambda: live.on_loop(live.ranks, 5.0)[0].phase == "step")


def test_a_snapshot_holds_what_the_probe_wrote(live, tmp_path):
    seen = perform(Snapshot(), live)

    bundle = tmp_path / seen["path"]
    assert (bundle / "rank-0-stacks.txt").read_text() == "here\n"
    assert seen["missing"] == []
    assert json.loads((bundle / "ranks.json").read_text())["0"]["phase"] == "step"


def test_a_stop_ends_at_a_step_boundary_by_the_jobs_own_handler(live):
    seen = perform(Stop(grace=20.0), live)

    assert (seen["how"], seen["returncode"], seen["exit_code"]) == ("interrupt", 3, 78)
    assert seen["seconds"] < 20
