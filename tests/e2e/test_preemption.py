"""A job that handles no signal writes a checkpoint before it is ended from outside."""

from __future__ import annotations

import os
import signal

import pytest

from supervise.runtime import is_handled
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

JOB = """
import glob
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
while step < 2000:
    if step == 10:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "step": step}, "ckpt.pt")
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    step += 1
    time.sleep(1.0 if glob.glob("ckpt.supervise-*.pt") else 0.02)  # it is ended soon
"""


def test_term_waits_for_a_checkpoint_of_the_last_step(supervise, script, tmp_path):
    """TERM to all processes, as Slurm signals a step; then the job dies of it: 143."""
    (tmp_path / "p.yaml").write_text(
        "version: supervise/v1\npolicy: p\nextends: nano\njob: {preempt: {margin: 60s}}\n"
    )
    options = ("--policy", tmp_path / "p.yaml", "--run-dir", "run")
    watcher, run = supervise.start(*options, "--", *script(JOB)), supervise.run_of()
    wait_until(lambda: run.kinds("note", "checkpoint-saved"), "the job's own checkpoint")
    wait_until(lambda: "yes, a checkpoint before the end" in str(run.state), "status")
    pid = run.state["ranks"]["0"]["pid"]
    wait_until(lambda: is_handled(pid, signal.SIGTERM), "the probe's handler")
    for each in (pid, watcher.pid):
        os.kill(each, signal.SIGTERM)
    _, printed = watcher.communicate(timeout=120)

    assert (watcher.returncode, run.intents) == (143, []), printed
    (written,) = tmp_path.glob("ckpt.supervise-*.pt")
    (note,) = (n for n in run.kinds("note", "preempt") if n["data"]["details"]["phase"] == "saved")
    step = note["data"]["details"]["step"]
    assert step == int(written.stem.rpartition("-")[2]) and 0 <= run.state["step"] + 1 - step <= 10
    assert f"resume from {written}" in printed
    run.prove()
