"""What a run has come to is told by its records, and by them alone."""

from __future__ import annotations

import shutil

import pytest

from supervise.catalog import load_policy
from supervise.core import record_run
from supervise.core.model import Exited, OperatorCommand
from supervise.errors import StoreError
from supervise.runtime import RecoveredRun
from supervise.store import read_audit

SECOND = 10**9


@pytest.fixture
def troubled(keep_run, make_frames):
    """A run with one incident, whose learning rate was halved."""
    return keep_run(make_frames(0, *[2.0] * 20, 8.0, *[2.0] * 20), ended=False)


def cut(run, records):
    """Let the audit log end after so many records, as a kill leaves it."""
    lines = run.audit_path.read_bytes().splitlines(keepends=True)
    run.audit_path.write_bytes(b"".join(lines[:records]))


def engine_records(run):
    return [r for r in read_audit(run.audit_path) if r["actor"] == "engine"]


def test_nothing_is_missing_where_nobody_died(troubled):
    """State, names and window are those after the newest event."""
    past = RecoveredRun.read(troubled, load_policy)

    assert past.unwritten == []
    assert (past.state.step, past.state.machine) == (40, "probation")
    assert past.names == {0: ("train_loss_raw", "grad_global_norm")}
    assert [frame.step for _, frame in past.window] == list(range(41))
    assert (past.exited, past.launched.pid) == (False, 2**22 + 7)
    assert past.last is not None


def test_decisions_that_were_not_written_any_more_are_known(troubled):
    """Wherever the log was cut after the last judged event: what is left is what replay says."""
    whole = engine_records(troubled)
    total = len(list(read_audit(troubled.audit_path)))
    for length in range(total, 1, -1):
        cut(troubled, length)
        left = engine_records(troubled)
        past = RecoveredRun.read(troubled, load_policy)
        again = [record_run(decision) for _, _, decision in past.unwritten]
        assert [r["reason"] for r in whole] == [r["reason"] for r in left] + [
            d["reason"] for d in again
        ]
        assert [n for n, _, _ in past.unwritten] == [r["event"] for r in whole[len(left) :]]


def test_a_log_that_says_something_else_is_not_gone_on_with(troubled, keep_run, make_frames):
    """Its journal belongs to another run: decisions would not follow from it."""
    other = keep_run(make_frames(0, *[2.0] * 9, 8.0, *[2.0] * 40), ended=False, name="other")
    shutil.rmtree(troubled.journal_path)
    shutil.copytree(other.journal_path, troubled.journal_path)

    with pytest.raises(StoreError, match="does not follow from its journal from record"):
        RecoveredRun.read(troubled, load_policy)


def test_a_run_whose_journal_lost_its_end_is_not_gone_on_with(troubled):
    """What was decided then cannot be judged again; the cause is told as it is."""
    [segment] = troubled.journal_path.iterdir()
    segment.write_bytes(segment.read_bytes()[:-900])

    with pytest.raises(StoreError, match="is incomplete, so nobody can take the run over"):
        RecoveredRun.read(troubled, load_policy)


def test_the_policy_of_a_reload_is_in_force(keep_run, make_frames, small):
    """And the next reload reads the file that the last one read."""
    second = small.with_name("second.yaml")
    second.write_text(small.read_text().replace("gt: 5.0", "gt: 6.0"))
    reload = OperatorCommand(12 * SECOND, "anna", "reload", {"policy": str(second), "key": "9-9"})
    run = keep_run([*make_frames(0, 2.0, 2.0), reload, *make_frames(2, 5.5)], ended=False)

    past = RecoveredRun.read(run, load_policy)

    assert past.started.digest != past.policy.digest == load_policy(second).digest
    assert past.reload == (str(second), None)
    assert (past.asked, past.received) == (None, {"9-9"})
    assert past.state.incident is None  # 5.5 is none of its breaches


def test_what_the_job_was_told_is_known(keep_run, make_frames, small):
    """A stop that was carried out decides with which code the supervisor exits."""
    text = small.read_text().replace("{lr_scale: {set: 0.5, rewarm: 10}}", "snapshot, {stop: {}}")
    small.write_text(
        text.replace("    verify: {within: 30, clear_for: 5}\n", "").replace(
            "  lr_scale: {max: 2, per: 1000}\n", ""
        )
    )
    stopped = {"how": "term", "returncode": -15, "survivors": [], "exit_code": 78}
    run = keep_run(
        [*make_frames(0, *[2.0] * 20, 8.0), Exited(99 * SECOND, -15)],
        ended=False,
        answer=lambda action: stopped if action["verb"] == "stop" else {},
    )

    past = RecoveredRun.read(run, load_policy)

    assert (past.exit_code, past.exited) == (78, True)
