"""supervise reload: the word, and the answer that comes back through the audit log."""

from __future__ import annotations

import threading
import time

import pytest

from supervise.catalog import load_policy
from supervise.cli import _send_command
from supervise.core import engine
from supervise.inputs.control_inbox import ControlInbox
from supervise.store.audit import Audit
from supervise.store.journal import Journal
from supervise.store.policies import Reloader
from supervise.store.recorder import Recorder


@pytest.fixture
def supervised(keep_run, make_frames, small):
    """A run whose supervisor is there and takes words, on a thread."""
    run = keep_run(make_frames(0, 2.0), ended=False)
    audit = Audit.open(run.audit_path, run.id, at_ns=0, wall="")
    recorder = Recorder(Journal.open(run.journal_path), audit, lambda: (0, ""), print)
    policy = load_policy(small)
    reloader = Reloader(run, policy, load_policy, str(small))
    over = threading.Event()

    def loop():
        now, state = policy, engine.start(policy)
        words = ControlInbox(run.path, time.monotonic_ns)
        while not over.wait(0.02):
            for told in words.poll():
                now, events = reloader.reload(told, now, state)
                for event in (told, *events):
                    number = recorder.event(event)
                    state, made = engine.step(now, state, event)
                    for decision in made:
                        recorder.decision(decision, number, event.at_ns)

    thread = threading.Thread(target=loop)
    thread.start()
    yield run
    over.set()
    thread.join()
    recorder.close()


def test_a_reload_is_answered_with_its_record(supervise, supervised, small, monkeypatch):
    monkeypatch.setattr(_send_command, "POLL_S", 0.05)
    small.write_text(small.read_text().replace("gt: 5.0", "gt: 4.0"))

    code, out, err = supervise("reload", supervised.path, "--by", "anna")

    assert (code, out) == (0, "")
    assert "anna reloaded the policy: detectors ~high" in err
    assert len(list(supervised.path.glob("policies/*.yaml"))) == 1


def test_a_refusal_is_exit_65_with_the_cause(supervise, supervised, tmp_path, monkeypatch):
    """The file is read from where the person stands; each word gets its own answer."""
    monkeypatch.setattr(_send_command, "POLL_S", 0.05)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("policy: [\n")

    code, _, err = supervise("reload", supervised.path, "--policy", "bad.yaml")
    assert code == 65
    assert "bad.yaml:" in err and "the old one stays in force" in err
    assert supervise("reload", supervised.path)[0] == 0


def test_nobody_answers(supervise, keep_run, make_frames, monkeypatch):
    """A supervisor that is there and stuck: said, with exit 64; one that is gone: at once."""
    run = keep_run(make_frames(0, 2.0), ended=False)
    code, _, err = supervise("reload", run.path)
    assert code == 64 and "has no supervisor" in err
    assert not (run.path / "control").exists()

    monkeypatch.setattr(_send_command, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(_send_command, "POLL_S", 0.02)
    held = Audit.open(run.audit_path, run.id, at_ns=0, wall="")
    code, _, err = supervise("reload", run.path)
    held.close()
    assert code == 64
    assert "has not answered within" in err


def test_a_replay_needs_every_policy(supervise, keep_run, make_frames, small, tmp_path):
    """Over a reload the decisions are the same; a policy that is gone is named."""
    from supervise.core.model.events import OperatorCommand

    later = tmp_path / "later.yaml"
    later.write_text(small.read_text().replace("gt: 5.0", "gt: 4.0"))
    word = OperatorCommand(29_000_000_000, "anna", "reload", {"policy": str(later)})
    run = keep_run([*make_frames(0, *[2.0] * 20), word, *make_frames(20, *[4.5] * 20)])

    assert supervise("replay", run.path)[0] == 0
    assert supervise("audit", "verify", run.path)[0] == 0
    next(run.path.glob("policies/*.yaml")).unlink()
    code, _, err = supervise("replay", run.path)
    assert code == 64
    assert "is missing: the run was reloaded with the policy sha256:" in err
