"""Two ranks under torchrun, and messages to a real receiver."""

from __future__ import annotations

import csv
import json
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_two_ranks_are_watched_and_not_changed(supervise, nano_job, tmp_path):
    """One row per rank and step; a rollback is refused with its reason, and people are told."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    job = [*torchrun, *nano_job("--steps", 100, "--out", tmp_path / "out")[1:]]
    run = supervise.run("--policy", "nano", "--drill", "lr_spike@80", job=job)

    assert run.returncode == 0
    assert "val_loss" in run.stdout
    rows = list(
        csv.DictReader(supervise("export", str(run.directory), "--csv").stdout.splitlines())
    )
    assert {row["rank"] for row in rows} == {"0", "1"}
    assert len(rows) == 200
    assert run.actions == []
    refused = run.kinds("abort", "refused")
    assert refused
    assert "ranks" in refused[0]["reason"]
    told = [record["data"]["message"] for record in run.kinds("notify_intent")]
    assert any("nothing can be done about it here" in message["title"] for message in told)
    supervise.prove(run.directory)


@pytest.fixture
def told_by(tmp_path):
    """A function that writes the policy nano with these channels too."""

    def write(*channels: str) -> Path:
        nano = Path(__file__).parents[2] / "policies" / "nano.yaml"
        policy = tmp_path / "told.yaml"
        lines = "".join(f"  {channel}\n" for channel in channels)
        policy.write_text(nano.read_text().replace("notify:\n", f"notify:\n{lines}"))
        return policy

    return write


def test_people_are_told_by_webhook_and_slack(supervise, tiny_job, receiver, told_by):
    """Opened, contained and closed reach both receivers; the job never waits for them."""
    url, received = receiver(200)
    supervise.env |= {"HOOK_URL": url + "/hook", "SLACK_URL": url + "/slack"}
    policy = told_by("webhook: {url_env: HOOK_URL}", "slack: {url_env: SLACK_URL}")
    run = supervise.run(
        "--policy",
        str(policy),
        "--drill",
        "nan_grad@100",
        job=tiny_job("--steps", 200, "--sleep", 0.01),
    )

    assert run.returncode == 0
    assert {path for path, _ in received} == {"/hook", "/slack"}
    assert any("nonfinite" in json.dumps(body) for path, body in received if path == "/slack")
    sent = [r for r in run.kinds("notify_result") if r["data"]["ok"]]
    assert len(sent) >= 2
    assert "channel" not in supervise("status", str(run.directory)).stdout


def test_a_pager_that_does_not_work_is_told(supervise, tiny_job, receiver, told_by):
    """Once on the terminal, and in the status of the run, which is over; never its address."""
    url, received = receiver(500)
    supervise.env |= {"HOOK_URL": url + "/hook?token=secret"}
    run = supervise.run(
        "--policy",
        str(told_by("webhook: {url_env: HOOK_URL}")),
        "--drill",
        "nan_grad@100",
        job=tiny_job("--steps", 200, "--sleep", 0.01),
    )

    assert run.returncode == 0
    assert received
    told = [line for line in run.stderr.splitlines() if "SEV2 webhook: " in line]
    assert len(told) == 1 and "not delivered" in told[0]
    status = " ".join(supervise("status", str(run.directory)).stdout.split())
    assert "channel webhook: " in status and "last try: 500" in status
    assert "secret" not in run.stderr + status
    supervise.prove(run.directory)


@pytest.fixture
def silent_receiver():
    """A receiver that takes every message and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_signals_in_the_closing_seconds_lose_nothing(supervise, silent_receiver, told_by):
    """While a page waits for its answer: the last record and the exit code stay what they are."""
    supervise.env["HOOK_URL"] = "http://{}:{}/".format(*silent_receiver.getsockname())
    policy = told_by("webhook: {url_env: HOOK_URL}")
    job = [sys.executable, "-c", "raise SystemExit(3)"]
    running = supervise.start("--policy", policy, "--run-dir", "run", "--", *job)
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
