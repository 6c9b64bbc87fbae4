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
    """A policy whose pages go to the receiver."""
    supervise.env |= {"HOOK_URL": hook.url, "HOOK_SECRET": f"whsec_{SECRET}"}
    policy = tmp_path / "paged.yaml"
    policy.write_text(POLICY)
    return str(policy)


def test_the_next_run_sends_what_nobody_got(supervise, hook, paged, tmp_path):
    """Once, late, under its first id, to that receiver; both logs say so, and none an address."""
    hook.answers = [(503, {}, b"")]
    run = supervise.run("--policy", paged, job=CRASH)
    tried = {headers["webhook-id"] for _, headers, _ in hook.requests}

    assert run.returncode == 139
    outbox = tmp_path / "state" / "supervise" / "outbox"
    [kept] = outbox.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600 and outbox.stat().st_mode & 0o777 == 0o700
    [page] = run.kinds("run_end")[0]["data"]["spooled"]
    assert (page["channel"], page["severity"]) == ("webhook", "SEV1")
    assert "not delivered to webhook: SEV1 the job ended" in run.stderr
    assert "supervise outbox flush" in run.stderr
    assert page["title"] in supervise("outbox").stdout

    del supervise.env["HOOK_URL"], supervise.env["HOOK_SECRET"]
    seen = tmp_path / "seen"
    wait = [sys.executable, "-c", WAIT, str(seen)]
    hook.answers, hook.before = [(0, {}, b"")], seen.touch
    hung = supervise.run("--policy", "observe", job=wait, name="hung")
    assert hung.returncode == 3
    [waiting] = json.loads(supervise("outbox", "list", "--json").stdout)
    assert waiting["attempts"] == page["attempts"]  # nobody waited for the answer

    seen.unlink()
    hook.requests.clear()
    hook.answers = [(200, {}, b"")]
    later = supervise.run("--policy", "observe", job=wait, name="later")

    assert later.returncode == 3
    [(_, headers, body)] = hook.requests
    assert headers["webhook-id"] in tried
    data = json.loads(body)["data"]
    assert data["run"] == run.records[0]["run"] and data["title"].startswith("late, was due")
    assert "no undelivered messages" in supervise("outbox").stdout
    [record] = [json.loads(line) for line in (outbox / "delivered.log").read_text().splitlines()]
    assert (record["what"], record["by"]) == ("delivered", later.records[0]["run"])
    [note] = later.kinds("note", "late-page")
    assert note["data"]["keys"] == page["keys"] == record["keys"]
    for directory in (run.directory, later.directory):
        supervise.prove(directory)
        files = [path for path in directory.rglob("*") if path.is_file()]
        text = b"".join(path.read_bytes() for path in files).decode("utf-8", "replace")
        assert "SECRETSECRET" not in text and SECRET not in text
    assert "SECRETSECRET" not in run.stderr + later.stderr
