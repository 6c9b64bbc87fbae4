"""A receiver that is down when a run ends, and the user's next run."""

from __future__ import annotations

import base64
import json
import sys

import pytest

from ..notifiers.conftest import hook

__all__ = ["hook"]  # the fixture

pytestmark = pytest.mark.slow

POLICY = """\
version: supervise/v1
policy: paged
mode: observe
use: [nonfinite]
notify: {webhook: {url_env: HOOK_URL, secret_env: HOOK_SECRET}}
"""
SECRET = base64.b64encode(b"0123456789abcdef" * 2).decode()
CRASH = [sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"]
WAIT = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nsys.exit(3)"


@pytest.fixture
def paged(supervise, hook, tmp_path):
    """A policy whose messages go to the receiver."""
    supervise.env |= {"HOOK_URL": hook.url, "HOOK_SECRET": f"whsec_{SECRET}"}
    policy = tmp_path / "paged.yaml"
    policy.write_text(POLICY)
    return str(policy)


def test_the_next_run_sends_what_was_not_delivered(supervise, hook, paged):
    hook.answers = [(503, {}, b"")]
    run = supervise.run("--policy", paged, job=CRASH)
    tried = {headers["webhook-id"] for _, headers, _ in hook.requests}

    assert run.returncode == 139
    undelivered = run.kinds("run_end")[0]["data"]["undelivered"]
    [message] = [message for message in undelivered if message["severity"] == "SEV1"]
    assert message["channel"] == "webhook"
    assert f"not delivered to webhook: SEV1 {message['title']}" in run.stderr
    assert "(SIGSEGV): the job is DOWN: it ended with signal 11 (SIGSEGV)" in message["title"]
    assert "supervise outbox flush run" in run.stderr
    count = len(undelivered)
    assert f"{count} messages of the end of the run" in supervise("status", run.directory).stdout
    assert message["title"] in supervise("outbox").stdout

    sent = run.directory.parent / "sent"
    hook.requests.clear()
    hook.answers, hook.before = [(200, {}, b"")], sent.touch
    wait = [sys.executable, "-c", WAIT, str(sent)]
    later = supervise.run("--policy", "observe", job=wait, name="later")

    assert later.returncode == 3
    [(_, headers, body)] = hook.requests
    assert headers["webhook-id"] in tried
    data = json.loads(body)["data"]
    assert data["run"] == run.records[0]["run"] and data["title"].startswith("late, was due")
    assert message["title"] not in supervise("outbox").stdout
    [note] = later.kinds("note", "late-message")
    assert note["data"]["keys"] == message["keys"]
    for directory in (run.directory, later.directory):
        supervise.prove(directory)
        files = [path for path in directory.rglob("*") if path.is_file()]
        text = b"".join(path.read_bytes() for path in files).decode("utf-8", "replace")
        assert "SECRETSECRET" not in text and SECRET not in text
    assert "SECRETSECRET" not in run.stderr + later.stderr
