"""Messages of runs that have ended, sent to a real server: late, once, to their channel only."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from supervise.cli import invoke
from supervise.notifiers import Undelivered, build_senders
from supervise.runtime import UNDELIVERED_FILE, Courier, read_undelivered, write_undelivered
from supervise.store import RunDir, add_run
from tests.support.recorded_run import WALL, shipped_policy

SECRET = f"whsec_{base64.b64encode(bytes(32)).decode()}"
SETTINGS = {"url_env": "HOOK_URL", "secret_env": "HOOK_SECRET", "min_sev": "SEV1"}


@pytest.fixture
def environ(monkeypatch, tmp_path, hook):
    """The user's environment, with the channel's address and secret."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOOK_URL", hook.url)
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    return dict(os.environ)


@pytest.fixture
def run(tmp_path):
    """The directory of a run."""
    policy = shipped_policy("observe")
    return RunDir.create(tmp_path / "run", argv=["train"], policy=policy, wall=WALL)


@pytest.fixture
def ended(environ, run, message):
    """A function that ends a run with undelivered messages, due two hours ago."""

    def end(*titles: str, age_s: float = 7200.0, severity: str = "SEV1") -> RunDir:
        texts = [message(title=title, severity=severity) for title in titles]
        undelivered = [
            Undelivered("webhook", text, (f"run-1:{number}", "x"), age_s, 2, "503")
            for number, text in enumerate(texts)
        ]
        write_undelivered(run, undelivered, {"webhook": SETTINGS}, pytest.fail)
        add_run(run, environ)
        return run

    return end


@pytest.fixture
def outbox(environ, capsys):
    """A function that runs `supervise outbox ...` and returns `(exit code, output)`."""

    def call(*words: str) -> tuple[int, str]:
        code = invoke(["outbox", *words])
        return code, "".join(capsys.readouterr())

    return call


def deliver(environ) -> tuple[list[str], list[str]]:
    """Let a next run send; return the printed lines, and the outcomes on its record."""
    lines: list[str] = []
    recorded: list[str] = []
    courier = Courier(environ, lambda late: recorded.append(late.state), lines.append)
    courier.deliver_pending()
    return lines, recorded


def test_a_late_message_arrives_under_its_first_id(hook, environ, ended, outbox, message):
    """The id is that of its first posting, the signature good, and nobody can take it for news."""
    [sender], _ = build_senders({"webhook": SETTINGS}, environ)
    sender.send(message(title="spike"), key="run-1:0")

    run = ended("spike")
    code, listed = outbox("list")
    assert code == 0
    assert "SEV1 webhook run-1 2 h 2 spike (last error: 503)" in " ".join(listed.split())
    code, flushed = outbox("flush")
    assert (code, "1 delivered, 0 remain" in flushed) == (0, True)
    assert outbox() == (0, "no undelivered messages\n")

    (path, first, _), (path_then, late, body) = hook.requests
    assert path == path_then
    assert first["webhook-id"] == late["webhook-id"]
    assert late["webhook-signature"].startswith("v1,")
    data = json.loads(body)["data"]
    assert data["title"].startswith("late, was due 20") and data["title"].endswith(": spike")
    assert data["next"] == "the run has ended since; it said: rollback to step 125"
    assert [step["text"] for step in data["steps"]] == data["next"].split("; ")
    assert data["facts"][0]["name"] == "late" and "in run run-1" in data["facts"][0]["value"]
    [sent] = read_undelivered(run.path)
    assert (sent.state, sent.attempts) == ("delivered", 3)
    for text in (listed, flushed, (run.path / UNDELIVERED_FILE).read_text()):
        assert "SECRET" not in text.replace("HOOK_SECRET", "") and SECRET not in text


@pytest.mark.parametrize(
    ("status", "state", "remain"), [(400, "refused", 0), (410, "refused", 0), (503, "waits", 2)]
)
def test_a_refusal_is_final_and_a_receiver_that_is_down_gets_one_try(
    hook, ended, outbox, status, state, remain
):
    hook.answers = [(status, {}, b"")]
    run = ended("a", "b")

    code, output = outbox("flush")

    assert code == 1
    assert f"0 delivered, {remain} remain" in output and str(status) in output
    assert {late.state for late in read_undelivered(run.path)} == {state}
    if remain:
        assert len(hook.requests) == 1


@pytest.mark.parametrize(
    ("severity", "age_s", "sent"),
    [
        ("SEV0", 60.0, 1),
        ("SEV1", 7 * 86_400 - 600.0, 1),
        ("SEV1", 7 * 86_400 + 60.0, 0),
        ("SEV2", 60.0, 0),
    ],
)
def test_the_next_run_sends_recent_pages_and_flush_sends_all(
    hook, environ, ended, outbox, severity, age_s, sent
):
    ended("a", age_s=age_s, severity=severity)

    assert deliver(environ)[1] == ["delivered"] * sent
    assert len(hook.requests) == sent
    assert f"{1 - sent} delivered, 0 remain" in outbox("flush")[1]
    assert len(hook.requests) == 1


@pytest.mark.parametrize(
    ("page", "is_follow_up", "sent"),
    [("SEV1", False, ["a", "b"]), ("SEV2", False, []), ("SEV2", True, ["b"])],
)
def test_the_end_of_an_incident_follows_its_page(
    hook, environ, run, message, page, is_follow_up, sent
):
    """Else an alert that a late page opens is never resolved. What nobody knows of has no end."""
    texts = message(title="a", severity=page), message(title="b", severity="INFO", kind="closed")
    items = [
        Undelivered("webhook", text, (f"run-1:{number}",), 60.0, 1, "503", is_follow_up)
        for number, text in enumerate(texts)
    ]
    write_undelivered(run, items, {"webhook": SETTINGS}, pytest.fail)
    add_run(run, environ)

    deliver(environ)
    titles = [json.loads(body)["data"]["title"] for _, _, body in hook.requests]
    assert [title[-1] for title in titles] == sent


def test_the_end_waits_for_its_page(hook, environ, run, message):
    hook.answers = [(503, {}, b"")]
    texts = message(title="a"), message(title="b", severity="INFO", kind="closed")
    items = [Undelivered("webhook", text, (text.title,), 60.0, 1, "503") for text in texts]
    write_undelivered(run, items, {"webhook": SETTINGS}, pytest.fail)
    add_run(run, environ)

    deliver(environ)
    assert len(hook.requests) == 1
    assert [late.state for late in read_undelivered(run.path)] == ["waits", "waits"]


def test_a_message_waits_where_its_variable_is_not_set(hook, environ, ended, outbox, monkeypatch):
    """Another shell may have it."""
    ended("a")
    monkeypatch.delenv("HOOK_URL")
    code, output = outbox("flush")
    assert (code, "HOOK_URL is not set" in output) == (1, True)
    monkeypatch.setenv("HOOK_URL", hook.url)
    code, output = outbox("flush", "--json")
    flushed = json.loads(output)
    assert (code, flushed["sent"][0]["state"], flushed["remaining"]) == (0, "delivered", 0)


@pytest.mark.slow
def test_the_claim_of_a_process_that_died_is_released(hook, environ, ended, outbox):
    """While it lives nobody else sends its message; afterwards it is sent under the same id."""
    arrived = threading.Event()
    hook.before = arrived.set
    hook.answers = [(0, {}, b""), (200, {}, b"")]
    ended("a")
    command = [sys.executable, "-m", "supervise", "outbox", "flush"]
    process = subprocess.Popen(command, env=environ)
    assert arrived.wait(60)
    assert "0 delivered, 1 remain" in outbox("flush")[1]
    assert len(hook.requests) == 1
    process.send_signal(signal.SIGKILL)
    process.wait()

    assert outbox("flush")[0] == 0

    assert len(hook.requests) == 2
    assert len({headers["webhook-id"] for _, headers, _ in hook.requests}) == 1


def test_a_run_sends_at_the_rate_of_the_channel_and_stops_when_told(hook, environ, ended):
    ended(*[f"page {number}" for number in range(22)])
    stopped = Courier(environ, lambda late: pytest.fail(late.text), pytest.fail)
    stopped.stop()
    stopped.deliver_pending()

    lines, recorded = deliver(environ)

    assert lines == ["supervise: webhook: 20 messages were delivered late"]
    assert len(recorded) == len(hook.requests) == 20


@pytest.mark.parametrize("damage", ["owner", "content", "link"])
def test_a_directory_that_others_may_have_written_sends_nothing(
    hook, environ, ended, outbox, damage, tmp_path
):
    run = ended("a")
    path = run.path / UNDELIVERED_FILE
    if damage == "owner":
        if os.geteuid():
            pytest.skip("only root can give a file to another user")
        os.chown(path, 65534, -1)
    elif damage == "content":
        path.write_text('[{"channel": 1}]')
    else:
        path.rename(tmp_path / "elsewhere.json")
        path.symlink_to(tmp_path / "elsewhere.json")

    lines, _ = deliver(environ)
    assert "messages of an earlier run are not sent" in lines[0]
    assert outbox("flush")[0] == 1
    assert outbox("flush", str(run.path))[0] == 64
    assert hook.requests == []


def test_messages_that_cannot_be_written_are_printed(run, message):
    """With the reason, on the terminal; the last record of the run has them all the same."""
    lines: list[str] = []
    (run.path / UNDELIVERED_FILE).mkdir()
    item = Undelivered("webhook", message(), ("run-1:1",), 1.0, 1, "503")

    [summary] = write_undelivered(run, [item], {"webhook": SETTINGS}, lines.append)

    assert summary.title == "loss spike"
    [line] = lines
    assert "1 message was not delivered and cannot be kept: Is a directory" in line
