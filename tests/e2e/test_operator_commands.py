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
probation: 20
detectors:
  always: {kind: threshold, metric: train_loss_raw, gt: 0.0, for: 20}
rules:
  - {id: always, when: always, sev: SEV1, run: slow, keep: 100000}
runbooks:
  slow: [snapshot, {lr_scale: {set: 0.5}}, verify]
budgets: {all: {max: 9}, lr_scale: {max: 9}}
"""


def scraped(port):
    """Return the samples that Prometheus would get, by name and the values of their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = parser.text_string_to_metric_families(answer.read().decode())
    found = ((s, f) for f in families for s in f.samples)
    return Counter({(s.name, *s.labels.values()): s.value for s, _ in found})


def test_operator_commands_are_answered_and_recorded(supervise, tmp_path):
    """Each command runs once, on record under its operator; replay and the chain agree."""
    (tmp_path / "mine.yaml").write_text(POLICY)
    job = tiny("--steps", 100000, "--sleep", 0.01)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--policy", "mine.yaml", "--run-dir", "runs/r1", "--metrics-port", str(port))
    watcher = supervise.start(*options, "--", *job)
    run = supervise.run_of("runs/r1")
    request = wait_until(lambda: run.state.get("approvals"), "an approval request")[0]
    assert request["steps"] == [{"verb": "lr_scale", "args": {"value": 0.5, "rewarm_steps": 0}}]
    allowed = supervise("approve", "ask-1", "--sha", request["args_sha256"], "--by", "anna")
    assert allowed.returncode == 0, allowed.stderr
    wait_until(lambda: "lr_scale" in str(run.kinds("commit")), "the approved action")
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
            assert scraped(port)["supervise_actions_total", "lr_scale", "done"] == 2
            assert scraped(port)["supervise_step_total",] > 20
        answer = supervise(*line, "--by", "bo")
        assert answer.returncode == 0 and text in answer.stderr, (line, answer.stderr)
    watcher.communicate(timeout=60)

    assert watcher.returncode == 78
    assert run.intents[:3] == ["snapshot", "snapshot", "lr_scale"]
    verbs = [verb for verb in run.intents[3:] if verb != "snapshot"]
    assert verbs[-4:] == ["lr_scale", "pause", "resume", "stop"]
    (approved,) = run.kinds("approval", "approved")
    assert approved["data"]["operator"] == "anna"
    run.prove()


# Where the test says so, it reports a trouble once, and dies once.
OBEYING = """\
import numpy.random  # as torch does with its compiler
import supervise_probe

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
step = 0
for argument in sys.argv[1:]:
    checkpoint = torch.load(argument.partition("=")[2], weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    step = checkpoint["step"]
while step < 100000:
    trouble = Path("trouble").exists()
    if trouble:
        Path("trouble").unlink()
    if Path("die").exists():
        Path("die").unlink()
        sys.exit(1)
    supervise_probe.report(knob=float(trouble))
    loss = model(torch.randn(32, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.01)
    step += 1
    if step % 20 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"ckpt_{step:06d}.pt")
"""
GENTLER = """\
version: supervise/v1
policy: gentler
mode: enforce
detectors:
  knob: {kind: threshold, metric: knob, gt: 0.5}
rules:
  - {id: turned, when: knob, sev: SEV1, run: back}
job:
  on_crash: restart
  relaunch: {args: ["--resume={checkpoint}"]}
  checkpoints: {glob: ["ckpt_*.pt"], settle: 0.1s}
savepoints: {every: 5, keep: 4}
runbooks:
  back: [snapshot, {rollback: {at_least: 2, rewarm: 2000}}, {verify: {clear_for: 5}}]
  restart: [snapshot, {relaunch: {at_least: 0, rewarm: 0}}, {verify: {clear_for: 5}}]
budgets: {all: {max: 9}, rollback: {max: 9}, restart: {max: 9}, lr_scale: {max: 9}}
warmup: 5
probation: 5
"""


@pytest.mark.chaos
def test_an_operators_rate_composes_with_what_the_policy_does(supervise, script):
    """Set before a rollback, within its re-warm, and before the job dies: it is applied, and stays
    through the relaunch."""
    (supervise.home / "gentler.yaml").write_text(GENTLER)
    options = ("--policy", "gentler.yaml", "--run-dir", "runs/r1")
    watcher = supervise.start(*options, "--", *script(OBEYING))
    run = supervise.run_of("runs/r1")
    verified_checkpoint = lambda: any(  # noqa: E731
        r["data"]["details"].get("ok") for r in run.kinds("note", "checkpoint")
    )
    wait_until(verified_checkpoint, "a checkpoint")

    def set_rate(value):
        answer = supervise("lr", value, "--by", "anna")
        assert answer.returncode == 0 and f"lr_scale={value}" in answer.stderr, answer.stderr

    def verified(count):
        """Wait until so many runbooks were verified; all passed."""

        def results():
            ends = [r for r in run.kinds("verify") if r["data"]["what"] in ("passed", "failed")]
            return ends if len(ends) >= count else None

        ends = wait_until(results, f"verification {count}", every_s=0.05)
        assert [r["data"]["what"] for r in ends] == ["passed"] * count, ends

    set_rate("0.25")
    (supervise.home / "trouble").touch()
    verified(1)
    set_rate("1")
    set_rate("0.5")
    (supervise.home / "die").touch()
    verified(2)
    assert supervise("stop", "--by", "anna").returncode == 0
    watcher.communicate(timeout=60)

    run.prove()
    rows = supervise.rows("runs/r1", "--metrics", "lr_scale,lr_rewarm")
    held = {
        a: [float(r["lr_scale"]) / float(r["lr_rewarm"] or 1.0) for r in rows if r["attempt"] == a]
        for a in ("0", "1", "2")
    }
    assert held["0"][-1] == held["1"][0] == pytest.approx(0.25)
    assert held["1"][-1] == pytest.approx(0.5)
    assert set(held["2"]) == {0.5}
    assert any("still multiplied by 0.5, as requested before" in r["reason"] for r in run.records)
