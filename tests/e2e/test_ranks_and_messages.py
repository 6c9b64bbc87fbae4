"""Two ranks under torchrun, and messages to a real receiver."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time

import pytest

from supervise.catalog import load_policy
from tests.support.run_readers import read_everywhere
from tests.support.supervised_run import nano, tiny

pytestmark = pytest.mark.slow


def test_two_ranks_go_back_at_one_step(supervise, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    job = [*torchrun, *nano("--steps", 200, "--batch-size", 4, "--out", tmp_path / "out")[1:]]
    run = supervise.run("--policy", "nano", "--drill", "lr_spike@50", job=job)

    assert run.returncode == 0
    assert "val_loss" in run.stdout
    rows = supervise.rows("run")
    assert {row["rank"] for row in rows} == {"0", "1"}
    assert len(rows) == 400
    assert "rollback: yes" in run.stderr
    assert run.actions == ["hold_rate", "pause", "rollback", "resume"]
    results = [record["data"]["result"] for record in run.kinds("commit")]
    assert {result["ranks"] for result in results if "wait_ms" in result} == {2}
    back = next(result for result in results if "from_step" in result)
    firsts = {
        rank: next(row["step"] for row in rows if row["rank"] == rank and row["attempt"] == "1")
        for rank in "01"
    }
    assert firsts == dict.fromkeys("01", str(back["ack_step"] + 1))
    proofs = [r["data"]["details"]["probe_batch"] for r in run.kinds("note", "continuity")]
    assert [proof["verdict"] for proof in proofs] == ["equal"] * 2
    assert [saved["state"] for saved in run.checkpoints] == ["verified"]
    run.prove()
    read_everywhere(run.directory, tmp_path)


def test_people_are_notified_by_slack_and_of_a_webhook_that_fails(supervise, receiver, tmp_path):
    (good, received), (bad, refused), (monitor, pings) = receiver(200), receiver(500), receiver(200)
    supervise.env |= {"SLACK_URL": good + "/slack", "HOOK_URL": bad + "/hook?token=secret"}
    supervise.env |= {"MONITOR": monitor + "/ping?token=secret"}
    channels = ("webhook:HOOK_URL", "slack:SLACK_URL", "heartbeat:MONITOR")
    told = ("--policy", "nano", *(part for name in channels for part in ("--notify", name)))
    job = tiny("--steps", 200, "--sleep", 0.01)
    run = supervise.run(*told, "--drill", "nan_grad@100", job=job)

    kept = load_policy(run.directory / "policy.yaml").notify
    assert {"console", "slack", "webhook", "heartbeat"} == {*kept}
    assert supervise.env["SLACK_URL"] not in str(kept)
    assert {path for path, _ in pings[1:]} == {"/ping?token=secret"}
    assert run.state["heartbeat"]["error"] == "" and run.state["heartbeat"]["every_s"] == 60.0
    assert pings[0][0] == "/ping/start?token=secret" and pings[-1][1].endswith("exit code 0")
    assert run.returncode == 0 and "finite True" in run.stdout
    assert run.kinds("note", "safeguard")[0]["data"]["at_step"] == 100
    assert any("nonfinite" in json.dumps(body) for _, body in received) and refused
    assert len([r for r in run.kinds("notify_result") if r["data"]["ok"]]) >= 2
    failed = [line for line in run.stderr.splitlines() if "SEV2 webhook: " in line]
    assert len(failed) == 1 and "not delivered" in failed[0]
    status = " ".join(supervise("status", "run").stdout.split())
    assert "channel webhook: " in status and "last try: 500" in status
    assert "channel slack" not in status
    assert "secret" not in run.stderr + status
    run.prove()
    read_everywhere(run.directory, tmp_path)


@pytest.fixture
def silent_receiver():
    """A receiver that takes every message and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_signals_in_the_closing_seconds_lose_nothing(supervise, silent_receiver):
    """While a page waits for its answer: the last record and the exit code stay what they are."""
    supervise.env["HOOK_URL"] = "http://{}:{}/".format(*silent_receiver.getsockname())
    job = [sys.executable, "-c", "raise SystemExit(3)"]
    options = ("--policy", "nano", "--notify", "webhook:HOOK_URL", "--run-dir", "run")
    running = supervise.start(*options, "--", *job)
    silent_receiver.settimeout(60)
    page, _ = silent_receiver.accept()
    for name in ("TERM", "INT", "TERM", "HUP"):
        running.send_signal(getattr(signal, f"SIG{name}"))
        time.sleep(0.1)
    _, said = running.communicate(timeout=60)
    page.close()

    assert running.returncode == 3, said
    records = supervise.records("run")
    assert (records[-1]["kind"], records[-1]["data"]["exit_code"]) == ("run_end", 3)
    late = [r["reason"] for r in records if r["data"].get("what") == "signal"]
    assert late[0] == "SIGTERM came after the end of the job"
    results = {r["reason"] for r in records if r["kind"] == "notify_result"}
    assert "webhook: no answer before the supervisor ended" in results
    supervise.prove("run")
