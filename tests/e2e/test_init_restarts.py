"""The policy that `supervise init` writes brings a job back from a crash and a standstill."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from supervise.core.model import Frame
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

# In the manner of nanoGPT. It writes a checkpoint every 40 steps, is slow from 80 on until one is
# verified and it is killed, and stands still for ever at 270, unless it was started a third time:
# by then the incident of the crash is closed, and what was saved since is good.
JOB = """\
import os, sys, threading, time, torch
init_from, out_dir = "scratch", "out"
for word in sys.argv[1:]:
    key, _, value = word.removeprefix("--").partition("=")
    globals()[key] = value
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(0)
torch.set_num_threads(1)
model, target = torch.nn.Linear(16, 8), torch.nn.Linear(16, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
iter_num = 0
if init_from == "resume":
    state = torch.load(os.path.join(out_dir, "ckpt.pt"))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    iter_num = state["iter_num"]
open("starts", "a").write(f"{iter_num}\\n")
starts = len(open("starts").readlines())
while iter_num < 300:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(iter_num))
    loss = torch.nn.functional.mse_loss(model(x), target(x).detach())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    iter_num += 1
    if iter_num % 40 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "iter_num": iter_num}, os.path.join(out_dir, "ckpt.pt"))
    if iter_num == 270 and starts == 2:
        threading.Event().wait()
    time.sleep(0.3 if starts == 1 and iter_num > 80 else 0.005)
print("done at", iter_num)
"""
SOONER = """\
  hang.stalled: {after: {min: 2s, p99_multiple: 8}}
runbooks:
  restart-if-stuck:
    steps: [snapshot, {relaunch: {at_least: 0, rewarm: 0, if_idle: 2s}}]
    verify: {within: 100, clear_for: 10}
"""


@pytest.mark.chaos  # takes long, and others look at each part
def test_a_crash_and_a_standstill_come_back_by_themselves(supervise, tmp_path):
    (tmp_path / "train.py").write_text(JOB)
    job = [sys.executable, "train.py", "--out_dir=out"]
    assert supervise("init", "--", *job).returncode == 0
    written = (tmp_path / "supervise.yaml").read_text()
    (tmp_path / "supervise.yaml").write_text(written + SOONER)
    running = supervise.start("--policy", "supervise.yaml", "--run-dir", "run", "--", *job)
    run = supervise.run_of()
    wait_until(lambda: any(each["state"] == "verified" for each in run.checkpoints), "a good one")
    launch = json.loads((tmp_path / "run" / "launch.json").read_text())
    os.kill(launch["pid"], signal.SIGKILL)
    out, err = running.communicate(timeout=120)

    assert running.returncode == 0 and "done at 300" in out, err
    assert run.actions == ["relaunch", "relaunch"]
    starts = [int(line) for line in (tmp_path / "starts").read_text().split()]
    assert starts[0] == 0 and 0 < starts[1] <= starts[2] == 240
    begun = {frame.attempt: frame.step for frame in reversed(run.events(Frame))}
    assert list(begun.values())[::-1] == starts
    run.prove()
