"""What can be done in a job is one line, from the policy and what the job has shown."""

from dataclasses import replace

import pytest

from supervise.catalog import load_policy
from supervise.core import start_engine, step_engine
from supervise.core.model import CheckpointState, JobSettings, Notice, RelaunchSettings
from supervise.runtime import ProbeStatus, is_known, probe_capabilities, status_line

NANO = load_policy("nano")
AGAIN = replace(NANO, job=JobSettings(relaunch=RelaunchSettings(resume="library")))
READY = {"rollback": "ready", "savepoints": [25, 50, 75]}


def told(policy, probe, ranks=1, channels=("console",), **missing):
    state = start_engine(policy)
    state.job.world_size, state.step = ranks, 80
    for verb, why in missing.items():
        notice = Notice(1, f"{verb}-unavailable", f"what it means: {why}")
        state, _ = step_engine(policy, state, notice)
    status = ProbeStatus(**probe)
    return probe_capabilities(policy, state, status, channels), is_known(policy, state, status)


def test_a_job_of_a_library_with_nothing_configured():
    found, known = told(NANO, READY | {"trained_by": "Trainer"})

    assert known
    assert status_line(found) == (
        "rollback: yes · relaunch: not configured (Trainer recognised: supervise init -- COMMAND)"
        " · ranks: 1 · messages: console only"
    )


@pytest.mark.parametrize(
    ("policy", "probe", "facts", "what", "how"),
    [
        (NANO, READY, {}, "rollback", "yes"),
        (NANO, READY, {"ranks": 2}, "rollback", "yes"),
        (NANO, READY, {"rollback": "too large; relaunch"}, "rollback", "no (too large)"),
        (NANO, {"rollback": "unavailable: no room"}, {}, "rollback", "no (no room)"),
        (NANO, {"rollback": "none yet"}, {}, "rollback", "not yet (savepoints are taken every 25"),
        (replace(NANO, runbooks={}), READY, {}, "rollback", "no (policy nano never runs it)"),
        (NANO, READY, {}, "relaunch", "not configured (supervise init -- COMMAND)"),
        (AGAIN, READY, {}, "relaunch", "not yet (no checkpoint is verified)"),
        (
            replace(AGAIN, runbooks={}),
            READY,
            {},
            "relaunch",
            "only by command (policy nano never runs it)",
        ),
        (NANO, READY | {"safeguards": {"a": "cannot act: why"}}, {}, "a", "no (why)"),
        (NANO, READY, {"channels": ("console", "slack")}, "messages", "console, slack"),
        (replace(NANO, mode="observe"), {}, {}, "actions", "none in mode observe (--mode enforce)"),
    ],
)
def test_each_capability_has_its_reason(policy, probe, facts, what, how):
    found, known = told(policy, probe, **facts)
    assert found[what].startswith(how)
    assert known is (probe.get("rollback") != "none yet")


@pytest.mark.parametrize(("steps", "apart"), [([0, 75], 75), ([9], 71), ([0, 25, 50], 0)])
def test_savepoints_that_come_late_for_their_cost_are_told(steps, apart):
    found, _ = told(NANO, READY | {"savepoints": steps})
    late = f", savepoints {apart} steps apart for their cost"
    assert found["rollback"] == "yes" + (late if apart else "")


def test_a_relaunch_names_the_checkpoint_it_would_go_back_to():
    state = start_engine(AGAIN)
    state.checkpoints.notice(CheckpointState(id="ckpt-50", step=50, path="/c/50", ok=True))
    assert (
        probe_capabilities(AGAIN, state, ProbeStatus(**READY), ())["relaunch"]
        == "yes, from ckpt-50"
    )
