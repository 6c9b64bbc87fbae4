"""A policy file that is edited."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from supervise.catalog import load_policy
from supervise.runtime import PolicyWatch, watches
from supervise.store import Reloader
from tests.support.waiting import wait_until

POLICY = """\
version: supervise/v1
mode: MODE
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 12.0}}
rules: [{id: spike, when: high, sev: SEV2}]
"""


@pytest.fixture
def edited(tmp_path):
    """A run under a policy in mode shadow, the file of it, and what people were told."""
    path = tmp_path / "p.yaml"
    path.write_text(POLICY.replace("MODE", "shadow"))
    policy = load_policy(path)
    run = tmp_path / "run"
    run.mkdir()
    told = []
    reloader = Reloader(SimpleNamespace(path=run), policy, load_policy, str(path))
    watch = PolicyWatch(run, reloader, lambda: policy, told.append)
    commands = lambda: [json.loads(p.read_text()) for p in sorted((run / "control").glob("*.json"))]  # noqa: E731
    return SimpleNamespace(path=path, watch=watch, told=told, commands=commands)


def test_an_edit_that_loads_is_posted_as_a_reload(edited):
    """It is on record like any command, with who gave it."""
    edited.path.write_text(POLICY.replace("MODE", "shadow").replace("12.0", "9.0"))

    assert edited.watch.check()
    (command,) = edited.commands()
    assert (command["command"], command["operator"]) == ("reload", watches.OPERATOR)
    assert command["args"]["mode"] is None


def test_an_edit_of_the_base_is_one_of_the_policy(tmp_path, monkeypatch):
    """Both folders are watched."""
    base = tmp_path / "team" / "base.yaml"
    base.parent.mkdir()
    base.write_text(POLICY.replace("MODE", "shadow"))
    path = tmp_path / "p.yaml"
    path.write_text("version: supervise/v1\nextends: team/base.yaml\n")
    policy = load_policy(path)
    reloader = Reloader(SimpleNamespace(path=tmp_path), policy, load_policy, str(path))
    monkeypatch.setattr(watches, "QUIET_S", 0.1)
    watch = PolicyWatch(tmp_path, reloader, lambda: policy, print)
    watch.start()
    wake = {target.directory: target.wake for target in watch.targets()}
    base.write_text(POLICY.replace("MODE", "shadow").replace("12.0", "9.25"))
    wake[base.parent]()
    (posted,) = wait_until(lambda: [*(tmp_path / "control").glob("*.json")], "the reload")
    watch.close()

    assert json.loads(posted.read_text())["command"] == "reload"


def test_an_edit_never_raises_the_mode(edited):
    """An editor of a file does not get the right to stop a job."""
    edited.path.write_text(POLICY.replace("MODE", "enforce").replace("12.0", "9.0"))

    assert edited.watch.check()
    assert edited.commands()[0]["args"]["mode"] == "shadow"


def test_an_edit_that_does_not_load_is_reported_once(edited):
    """The policy in force stays."""
    edited.path.write_text(POLICY.replace("MODE", "shadow").replace("gt:", "above:"))

    assert not edited.watch.check()
    assert not edited.watch.check()
    (line,) = edited.told
    assert "stays in force: supervise policy check" in line


def test_writes_in_a_burst_are_one_edit(edited, monkeypatch):
    """Editors write a file in several steps, of which only the last one is whole."""
    monkeypatch.setattr(watches, "QUIET_S", 0.2)
    edited.watch.start()
    (wake,) = {target.wake for target in edited.watch.targets()}
    for bound in ("10.0", "gt", "9.0"):
        edited.path.write_text(POLICY.replace("MODE", "shadow").replace("12.0", bound))
        wake()
    wait_until(edited.commands, "the reload")
    edited.watch.close()

    assert len(edited.commands()) == 1 and not edited.told
