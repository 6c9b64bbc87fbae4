"""Policies of a run: kept before they judge, found again, reloaded whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from supervise.catalog import load_policy
from supervise.core import Intent, initial_state
from supervise.core.model import Notice, OperatorCommand, PartChanges, PolicyChanges, Reloaded
from supervise.errors import StoreError
from supervise.store import Reloader, RunDir, make_policy_finder

WALL = "2026-01-05T10:11:12.345Z"


@pytest.fixture
def begun(tmp_path, small):
    def begin(path=small, mode=None):
        policy = load_policy(path, mode=mode)
        run = RunDir.create(tmp_path / "run", argv=["x"], policy=policy, wall=WALL)
        return run, policy, Reloader(run, policy, load_policy, str(path), mode)

    return begin


def word(**args):
    return OperatorCommand(7, "anna", "reload", args)


def ask(reloader, now, /, **args):
    return reloader.reload(word(**args), now, initial_state(now))


def test_a_changed_file_is_read_again_and_kept(begun, small):
    run, policy, reloader = begun()
    small.write_text(small.read_text().replace("gt: 5.0", "gt: 4.0"))

    new, [event] = ask(reloader, policy)

    assert isinstance(event, Reloaded)
    assert (event.refused, event.before, event.digest) == (None, policy.digest, new.digest)
    assert event.changes == PolicyChanges(detectors=PartChanges(changed=["high"]))
    (kept,) = (run.path / "policies").iterdir()
    assert kept.read_text() == new.resolved
    assert make_policy_finder(run, load_policy)(new.digest).digest == new.digest
    kept.unlink()
    with pytest.raises(StoreError, match=r"policies/.*\.yaml is missing"):
        make_policy_finder(run, load_policy)(new.digest)


def test_a_mode_holds_for_the_policy_that_it_was_given_with(begun, small, tmp_path):
    """Another file is taken as it is written, whatever mode an earlier word or the start gave."""
    _, policy, reloader = begun(mode="enforce")
    looks = tmp_path / "looks.yaml"
    looks.write_text(small.read_text().replace("mode: enforce", "mode: observe"))

    same, _ = ask(reloader, policy, mode="shadow")
    new, [event] = ask(reloader, same, policy=str(looks))
    assert (same.mode, new.mode, event.refused) == ("shadow", "observe", None)
    again, _ = ask(reloader, new)
    assert again.mode == "observe"


def test_a_run_without_means_cannot_be_reloaded_into_acting(begun, small):
    _, policy, reloader = begun(mode="shadow")

    for mode in ("approve", "enforce"):
        same, [event] = ask(reloader, policy, mode=mode)
        assert same is policy
        assert f"mode {mode} needs a restart: the probe was started without" in event.refused
    new, [event] = ask(reloader, policy)  # the mode of the start stands in for the file's
    assert (event.refused, new.mode) == (None, "shadow")
    new, [event] = ask(reloader, policy, mode="observe")
    assert (event.refused, new.mode) == (None, "observe")


def test_what_goes_wrong_refuses(begun):
    run, policy, reloader = begun()
    (run.path / "policies").write_text("in the way")

    same, [event] = ask(reloader, policy)
    assert same is policy
    assert f"cannot write {run.path}/policies/" in event.refused

    reloader.load = lambda name_or_path, *, mode=None: 1 / 0
    assert ask(reloader, policy)[1][0].refused == (
        "internal error: ZeroDivisionError: division by zero"
    )


def test_a_job_that_is_being_started_again_has_its_policy(begun):
    """The way in which it is started is the one under which that was decided."""
    _, policy, reloader = begun()
    state = initial_state(policy)
    run = SimpleNamespace(intent=Intent("inc-1/1/2", verb="relaunch"))
    state.incident = SimpleNamespace(run=run)

    same, [event] = reloader.reload(word(), policy, state)

    assert same is policy and "being relaunched" in event.refused


def test_savepoints_that_nobody_keeps_are_told_once(begun):
    """Before any rollback relies on them; the record names what needs a restart."""
    _, policy, reloader = begun()

    def with_savepoints(name_or_path, *, mode=None):
        return replace(policy, savepoints={"every": 25, "keep": 4}, digest="sha256:" + "1" * 64)

    reloader.load = with_savepoints
    new, [event, noticed] = ask(reloader, policy)

    assert isinstance(noticed, Notice)
    assert noticed.kind == "rollback-unavailable"
    assert event.changes.restart == ["savepoints"]
    assert len(ask(reloader, new)[1]) == 1
