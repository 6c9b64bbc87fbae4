"""Files wake who waits for them."""

import errno
import json
import os
import threading
from types import SimpleNamespace

import pytest

from supervise.catalog import load_policy
from supervise.runtime import ControlInbox, FileWatch, PolicyWatch, checkpoint_targets, post_command
from supervise.store import Reloader
from tests.support.waiting import wait_until

pytest.importorskip("watchdog")
WITHIN_S = 60.0


@pytest.fixture
def woken():
    return threading.Event()


@pytest.fixture
def watch(tmp_path, woken):
    started = []

    def start(pattern):
        started.append(FileWatch(checkpoint_targets([pattern], tmp_path, woken.set), retry_s=0.05))
        started[-1].start()

    yield start
    for each in started:
        each.close()


def settle(woken):
    """The first call is that of the watch itself, for what came before it."""
    assert woken.wait(WITHIN_S)
    while woken.is_set():
        woken.clear()
        woken.wait(0.1)


@pytest.mark.parametrize(
    ("pattern", "folder", "how"),
    [
        ("out/step-*/model.pt", "out", "moved in"),
        ("**/*.pt", ".", "written"),
        ("{}/out/last.pt", "out", "moved in"),
    ],
)
def test_a_file_where_the_literal_beginning_of_a_pattern_leads_wakes(
    tmp_path, watch, woken, pattern, folder, how
):
    aside = tmp_path.with_name(f"{tmp_path.name}-aside")
    aside.write_text("x")
    (tmp_path / "out").mkdir()
    watch(pattern.format(tmp_path))
    settle(woken)

    if how == "written":
        (tmp_path / folder / "new").write_text("x")
    else:
        aside.rename(tmp_path / folder / "new")

    assert woken.wait(WITHIN_S)


def test_a_directory_that_comes_later_and_one_below_are_watched(tmp_path, watch, woken):
    out = tmp_path / "out"
    watch("out/checkpoint-*/model.pt")
    out.mkdir()
    settle(woken)
    (out / "checkpoint-10").mkdir()
    settle(woken)

    (out / "checkpoint-10" / "model.pt").write_text("x")
    assert woken.wait(WITHIN_S)


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
    watch = PolicyWatch(run, reloader, lambda: policy, told.append, quiet_s=0.2)
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
    edited.watch.start()
    wake = {target.directory: target.wake for target in edited.watch.targets()}
    for bound in ("10.0", "gt", "9.0"):
        getattr(edited, name).write_text(POLICY.replace("12.0", bound))
        wake[getattr(edited, name).parent]()
    wait_until(lambda: commands(edited), "the reload")
    edited.watch.close()

    assert len(commands(edited)) == 1 and not edited.told


# ── files in which operators leave their words ────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    [
        *(
            f'{{"command": "lr", "operator": "anna", "args": {args}}}'
            for args in (
                '{"value": ' + "[" * 100_000 + "]" * 100_000 + "}",
                '{"value": [[1]]}',
                '{"value": {"a": 1}}',
                '{"value": NaN}',
                "[1]",
            )
        ),
        '{"command": "lr", "args": {}}',
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


def test_a_command_that_cannot_be_read_at_once_is_read_later(tmp_path, monkeypatch):
    path = post_command(tmp_path, "stop", "anna", {"key": "k"}, at_ns=7)
    clock, opened = iter(range(0, 10**12, 2 * 10**9)), os.open
    inbox = ControlInbox(tmp_path, lambda: next(clock))

    def fail(name, *args, **more):
        if str(name) == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(name))
        return opened(name, *args, **more)

    monkeypatch.setattr(os, "open", fail)
    assert inbox.poll() == [] and inbox.poll() == []
    monkeypatch.undo()
    assert path.exists()
    (command,) = inbox.poll()
    assert command.command == "stop"
    assert inbox.poll() == [] and not path.exists()
