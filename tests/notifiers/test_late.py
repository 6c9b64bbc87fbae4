"""Pages of runs that have ended, sent to a real server: late, once, and to their channel only."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from supervise.app.late_page_delivery import Courier, Flush, keep
from supervise.cli import invoke
from supervise.notifiers import build, destination, reopen
from supervise.outputs.outbox import Undelivered
from supervise.store.late_page_spool import Spool, spool_directory

WALL = "2026-01-05T10:11:12.345Z"
SECRET = f"whsec_{base64.b64encode(bytes(32)).decode()}"
KEYS = {"url_env": "HOOK_URL", "secret_env": "HOOK_SECRET", "min_sev": "SEV1"}


@pytest.fixture
def environ(monkeypatch, tmp_path, hook):
    """The user's environment, with the channel's address and secret."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return {**os.environ, "HOOK_URL": hook.url, "HOOK_SECRET": SECRET}


@pytest.fixture
def kept(environ, message):
    """A function that keeps pages as the end of a run does; due two hours ago."""

    def keep_(*titles: str, age_s: float = 7200.0) -> dict:
        found = [
            Undelivered("webhook", message(title=title), (f"run-1:{n}", "x"), age_s, 2, "503")
            for n, title in enumerate(titles)
        ]
        return keep(found, {"webhook": KEYS}, environ, pytest.fail, within_s=60.0)

    return keep_


@pytest.fixture
def outbox(environ, capsys):
    """A function that runs `supervise outbox ...` and returns `(exit code, all that it said)`."""

    def call(*words: str) -> tuple[int, str]:
        code = invoke(["outbox", *words])
        return code, "".join(capsys.readouterr())

    return call


def log(environ) -> list[dict]:
    text = (spool_directory(environ) / "delivered.log").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_page_arrives_late_as_itself(hook, environ, kept, outbox, message):
    """The id is that of its first posting, the signature good, and nobody can take it for news."""
    [sender], _ = build({"webhook": KEYS}, environ)
    sender.send(message(title="spike"), key="run-1:0")

    told = kept("spike")["spooled"]
    code, said = outbox("list")
    assert code == 0
    row = "SEV1 webhook run-1 2 h 2 7 d spike (last error: 503)"
    assert row in " ".join(said.split())
    code, said_then = outbox("flush")
    assert code == 0
    assert "1 delivered, 0 left" in said_then
    assert outbox() == (0, "no undelivered messages\n")

    (path, first, _), (path_then, late, body) = hook.requests
    assert path == path_then
    assert first["webhook-id"] == late["webhook-id"]
    assert late["webhook-signature"].startswith("v1,")
    data = json.loads(body)["data"]
    assert data["title"].startswith("late, was due 20") and data["title"].endswith(": spike")
    assert data["next"] == "the run has ended since; it said: rollback to step 125"
    assert data["facts"][0]["name"] == "late" and "in run run-1" in data["facts"][0]["value"]
    [record] = log(environ)
    assert (record["what"], record["attempts"], record["by"]) == ("delivered", 3, "flush")
    assert told[0]["keys"] == record["keys"] == ["run-1:0", "x"]
    for text in (said, said_then, json.dumps([record, told])):
        assert "SECRET" not in text and SECRET not in text and "127.0.0.1" not in text


@pytest.mark.parametrize(
    ("status", "what", "left"),
    [
        *[(status, "refused", 0) for status in (301, 400, 410)],
        *[(status, None, 2) for status in (429, 503)],
    ],
)
def test_a_refusal_is_final_and_the_rest_waits(hook, environ, kept, outbox, status, what, left):
    """What is final is told and on record; of a receiver that is down, one page is tried."""
    hook.answers = [(status, {}, b"")]
    kept("a", "b")

    code, said = outbox("flush")

    assert code == 1
    assert f"0 delivered, {left} left" in said
    assert str(status) in said
    if what is None:
        assert len(hook.requests) == 1
        assert sorted(each["attempts"] for each in json.loads(outbox("list", "--json")[1])) == [
            2,
            3,
        ]
    else:
        assert [record["what"] for record in log(environ)] == [what] * 2


def flush(environ, wall: str | None = None) -> list[str]:
    """Flush once; return what came of each page."""
    more = {} if wall is None else {"wall": lambda: wall}
    sender = Flush("test", limited=False, stop=threading.Event(), **more)
    with Spool.open(spool_directory(environ), lambda: WALL) as spool:
        return [outcome.what for outcome in sender.once(spool)]


def test_after_seven_days_it_is_dropped_on_record(hook, environ, kept):
    """By the time at which it was due; nothing is sent then."""
    kept("old", age_s=7 * 86_400 + 60.0)
    assert flush(environ) == ["dropped"]
    kept("new", age_s=7 * 86_400 - 600.0)
    assert flush(environ) == ["delivered"]

    assert [record["what"] for record in log(environ)] == ["dropped", "delivered"]
    assert len(hook.requests) == 1


def test_the_claim_of_a_process_that_died_is_released(hook, environ, kept, outbox):
    """While it lives nobody else sends its page; afterwards it is sent under the same id."""
    arrived = threading.Event()
    hook.before = arrived.set
    hook.answers = [(0, {}, b""), (200, {}, b"")]
    kept("a")
    command = [sys.executable, "-m", "supervise", "outbox", "flush"]
    process = subprocess.Popen(command, env=environ)
    assert arrived.wait(60)
    assert "0 delivered, 1 left" in outbox("flush")[1]
    assert len(hook.requests) == 1
    process.send_signal(signal.SIGKILL)
    process.wait()

    assert outbox("flush")[0] == 0

    assert len(hook.requests) == 2
    assert len({headers["webhook-id"] for _, headers, _ in hook.requests}) == 1


def test_a_run_sends_at_its_own_pace_and_stops_when_told(hook, environ, kept):
    """No more messages an hour than the channel takes; what came of each is for its own log."""
    kept(*[f"page {n}" for n in range(22)])
    noted: list[dict] = []
    told: list[str] = []
    enough = threading.Event()

    def tell(line: str) -> None:
        told.append(line)
        enough.set()

    stopped = Courier("run-2", environ, lambda *note: noted.append(note), tell)
    stopped.stop()
    stopped.start()
    courier = Courier("run-2", environ, lambda *note: noted.append(note), tell)
    courier.start()
    assert enough.wait(60)
    courier.stop()

    assert told == ["supervise: webhook: 20 pages were delivered late, of earlier runs"]
    assert len(noted) == len(hook.requests) == 20
    assert {facts["outcome"] for _, facts in noted} == {"delivered"}


@pytest.mark.parametrize("kind", ["slack", "webhook"])
def test_a_destination_is_enough_to_send_there_again(hook, environ, message, kind):
    """Also where the variables of the policy are no longer set; nothing else is taken along."""
    keys = KEYS if kind == "webhook" else {"url_env": "HOOK_URL"}
    to = json.loads(json.dumps(destination(kind, keys, environ)))

    assert set(to["env"]) == set(keys.values()) & set(environ)
    assert reopen(to).send(message(), key="k").startswith("delivered")
    assert len(hook.requests) == 1


@pytest.mark.parametrize(
    "change", [{"kind": "pigeon"}, {"keys": {"url": 1}}, {"env": {}}, {"env": {"HOOK_URL": "no"}}]
)
def test_a_destination_that_is_none_is_refused_on_record(environ, kept, change):
    kept("a")
    with Spool.open(spool_directory(environ), lambda: WALL) as spool:
        [name] = spool.names()
        page = spool.read(name)
        spool.put(replace(page, to={**page.to, **change}))

    assert flush(environ) == ["refused"]
    assert log(environ)[-1]["what"] == "refused"


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"XDG_STATE_HOME": "/dev/null"}, "Not a directory"),
        ({"XDG_STATE_HOME": "", "HOME": "/nowhere"}, "there is no home directory /nowhere"),
    ],
)
def test_what_cannot_be_kept_is_said(environ, message, variables, reason):
    """With its reason, on the terminal and for the audit log; nothing is raised."""
    told: list[str] = []
    page = Undelivered("webhook", message(), ("run-1:1",), 1.0, 1, "503")

    found = keep([page], {"webhook": KEYS}, environ | variables, told.append, within_s=60.0)

    assert found["spooled"] == []
    assert found["not_spooled"]["count"] == 1 and reason in found["not_spooled"]["reason"]
    [line] = told
    assert "1 page was not delivered and cannot be kept for later" in line and reason in line
