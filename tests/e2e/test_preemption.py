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


@pytest.mark.parametrize("cause", ["SIGTERM", "drain"])
def test_the_step_of_the_end_is_in_a_checkpoint(supervise, script, tmp_path, cause):
    """TERM to all processes: it waits for the checkpoint, 143. A drain file: stopped, 75."""
    (tmp_path / "p.yaml").write_text(
        "version: supervise/v1\npolicy: p\nextends: nano\njob: {preempt: {margin: 60s}}\n"
    )
    options = ("--policy", tmp_path / "p.yaml", "--run-dir", "run")
    watcher = supervise.start(*options, "--", *script(JOB))
    wait_until(lambda: (tmp_path / "ckpt.pt").exists(), "the job's own checkpoint")
    if cause == "SIGTERM":
        wait_until(lambda: supervise.run_of().kinds("note", "checkpoint-saved"), "the report of it")
        wait_until(
            lambda: str(supervise.run_of().state).count("yes, a checkpoint before the end"),
            "status",
        )
        pid = supervise.run_of().state["ranks"]["0"]["pid"]
        wait_until(lambda: is_handled(pid, signal.SIGTERM), "the probe's handler")
        for each in (pid, watcher.pid):  # as Slurm signals a step
            os.kill(each, signal.SIGTERM)
    else:
        (tmp_path / "run" / "drain").touch()
    _, printed = watcher.communicate(timeout=120)

    assert watcher.returncode == (143 if cause == "SIGTERM" else 75), printed
    (written,) = tmp_path.glob("ckpt.supervise-*.pt")
    run = supervise.run_of()
    (note,) = (n for n in run.kinds("note", "preempt") if n["data"]["details"]["phase"] == "saved")
    assert note["data"]["details"]["step"] == int(written.stem.rpartition("-")[2])
    assert 0 <= run.state["step"] + 1 - note["data"]["details"]["step"] <= 10
    assert f"resume from {written}" in printed
    assert run.intents == ([] if cause == "SIGTERM" else ["stop"])
    supervise.prove()
