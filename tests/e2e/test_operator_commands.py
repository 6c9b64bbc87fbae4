"""Operators command a real run: a rate, an approval, a pause, a stop."""

from __future__ import annotations

import socket
import urllib.request
from collections import Counter

import pytest
from prometheus_client import parser

from tests.support.supervised_run import tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

POLICY = """\
version: supervise/v1
policy: mine
mode: approve
warmup: 10
probation: 20
savepoints: {every: 10, keep: 8}
detectors: {always: {kind: threshold, metric: steps_seen, gt: 48.0}}
rules: [{id: always, when: always, sev: SEV1, run: back, keep: 100000}]
runbooks: {back: [snapshot, {rollback: {at_least: 10, rewarm: 2000}}, verify]}
budgets: {all: {max: 9}, rollback: {max: 9}, lr_scale: {max: 9}}
"""


def scraped(port):
    """Return the samples that Prometheus would get, by name and the values of their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = parser.text_string_to_metric_families(answer.read().decode())
    found = ((s, f) for f in families for s in f.samples)
    return Counter({(s.name, *s.labels.values()): s.value for s, _ in found})


def test_operator_commands_are_answered_and_recorded(supervise, tmp_path):
    """Each command runs once, on record under its operator; replay and the chain agree. At a late
    approval eight savepoints reach back 80 steps: the rollback takes the one that was retained."""
    (tmp_path / "mine.yaml").write_text(POLICY)
    job = tiny("--steps", 100000, "--sleep", 0.01)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--policy", "mine.yaml", "--run-dir", "runs/r1", "--metrics-port", str(port))
    watcher = supervise.start(*options, "--", *job)
    run = supervise.run_of("runs/r1")
    request = wait_until(lambda: run.state.get("approvals"), "an approval request")[0]
    (rollback,) = request["steps"]
    before = rollback["args"]["before_step"]
    wait_until(lambda: run.state["step"] > before + 120, "120 more steps")
    allowed = supervise("approve", "ask-1", "--sha", request["args_sha256"], "--by", "anna")
    assert allowed.returncode == 0, allowed.stderr
    ended = lambda: "from_step" in str(run.kinds("commit")) or run.kinds("abort")  # noqa: E731
    wait_until(ended, "the approved action")
    for line, text in (
        (("lr", "0.25"), "lr_scale=0.25"),
        (("pause", "runs/r1"), "paused_step"),
        (("resume",), "resumed=True"),
        (("stop",), "stop"),
    ):
        if line == ("stop",):
            wait_until(
                lambda: scraped(port)["supervise_actions_total", "resume", "done"], "a scrape"
            )
            assert scraped(port)["supervise_actions_total", "lr_scale", "done"] == 1
            assert scraped(port)["supervise_step_total",] > 20
        answer = supervise(*line, "--by", "bo")
        assert answer.returncode == 0 and text in answer.stderr, (line, answer.stderr)
    watcher.communicate(timeout=60)

    assert watcher.returncode == 78
    assert run.intents[:3] == ["snapshot", "snapshot", "rollback"]
    verbs = [verb for verb in run.intents[3:] if verb != "snapshot"]
    assert verbs[-4:] == ["lr_scale", "pause", "resume", "stop"]
    (back,) = (r["data"]["result"] for r in run.kinds("commit") if "rollback" in r["reason"])
    assert back["step"] < before and back["from_step"] > before + 120
    (approved,) = run.kinds("approval", "approved")
    assert approved["data"]["operator"] == "anna"
    last = supervise.rows("runs/r1", "--metrics", "lr_scale,lr_rewarm")[-1]
    assert 0 < float(last["lr_rewarm"]) < 1  # of the rollback; the rate of the operator stays
    assert float(last["lr_scale"]) == pytest.approx(0.25 * float(last["lr_rewarm"]))
    run.prove()
