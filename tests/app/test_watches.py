"""Files that operators and editors write are seen."""

import json
from types import SimpleNamespace

import pytest

from supervise.catalog import load_policy
from supervise.runtime import ControlInbox, PolicyWatch, post_command
from supervise.store import Reloader
from tests.support.waiting import wait_until

# ── a policy file that is edited ──────────────────────────────────────────────────────────────────


POLICY = """\
version: supervise/v1
mode: shadow
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 12.0}}
rules: [{id: spike, when: high, sev: SEV2}]
"""


@pytest.fixture
def edited(tmp_path):
    """A run under a policy that extends another, the files of both, and what people were told."""
    base, path, run = tmp_path / "team" / "base.yaml", tmp_path / "p.yaml", tmp_path / "run"
    for folder in (base.parent, run):
        folder.mkdir()
    base.write_text(POLICY)
    path.write_text("version: supervise/v1\nextends: team/base.yaml\n")
    policy, told = load_policy(path), []
    reloader = Reloader(SimpleNamespace(path=run), policy, load_policy, str(path))
    watch = PolicyWatch(run, reloader, lambda: policy, told.append, look_s=0.2)
    yield SimpleNamespace(base=base, path=path, watch=watch, told=told, folder=run / "control")
    watch.close()


def commands(edited):
    return [json.loads(path.read_text()) for path in sorted(edited.folder.glob("*.json"))]


@pytest.mark.parametrize(("mode", "asked"), [("shadow", None), ("enforce", "shadow")])
def test_an_edit_that_loads_is_posted_as_a_reload_that_never_raises_the_mode(edited, mode, asked):
    """An editor of a file does not get the right to stop a job."""
    edited.path.write_text(POLICY.replace("shadow", mode).replace("12.0", "9.0"))

    assert edited.watch.check()
    (command,) = commands(edited)
    assert (command["command"], command["operator"]) == ("reload", "watch-policy")
    assert command["args"]["mode"] == asked


def test_an_edit_that_does_not_load_is_reported_once(edited):
    edited.path.write_text(POLICY.replace("gt:", "above:"))

    assert not edited.watch.check()
    assert not edited.watch.check()
    (line,) = edited.told
    assert "stays in force: supervise policy check" in line


@pytest.mark.parametrize("name", ["path", "base"])
def test_writes_in_a_burst_to_the_policy_or_its_base_are_one_edit(edited, name):
    """Editors write a file in several steps, of which only the last one is whole."""
    edited.watch.start()
    for bound in ("10.0", "gt", "9.0"):
        getattr(edited, name).write_text(POLICY.replace("12.0", bound))
    wait_until(lambda: commands(edited), "the reload")
    edited.watch.close()

    assert len(commands(edited)) == 1 and not edited.told


# ── files in which operators leave their words ────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    [
        '{"command": "lr", "operator": "anna", "args": {"value": '
        + "[" * 100_000
        + "]" * 100_000
        + "}}",
        '{"command": "lr", "operator": "anna", "args": {"value": [[1]]}}',
        '{"command": "lr", "operator": "anna", "args": {"value": {"a": 1}}}',
        '{"command": "lr", "operator": "anna", "args": {"value": NaN}}',
        '{"command": "lr", "operator": "anna", "args": [1]}',
        '{"command": "lr", "args": {}}',
        "[]",
        "",
    ],
)
def test_what_is_no_word_is_dropped_and_those_after_it_are_heard(tmp_path, text):
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "0.json").write_text(text)
    args = {"key": "k", "shards": ["a", "b"], "value": 0.5, "requeue": True}
    post_command(tmp_path, "stop", "anna", args, at_ns=7)
    heard = ControlInbox(tmp_path, lambda: 9)

    (told,) = heard.poll()
    assert (told.at_ns, told.operator, told.command, told.args) == (9, "anna", "stop", args)
    assert heard.poll() == []
    assert not list((tmp_path / "control").iterdir())
