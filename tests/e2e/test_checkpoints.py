"""The guard in a real run: told by the probe, verified in the job's interpreter, pinned, judged."""

from __future__ import annotations

import json
import sys

import pytest

pytestmark = pytest.mark.slow

# Deletes its first checkpoint, spoils its second, and waits until both were looked at.
JOB = """
import json, os, pathlib, sys, time
import torch

register, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())


def step():
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def until(name, *states):
    while True:  # until the limit of the whole run
        if register.exists():
            known = json.loads(register.read_text())["checkpoints"]
            if {e["id"]: e["state"] for e in known}.get(name) in states:
                return
        step()
        time.sleep(0.05)


def save(name):
    with (out / "fresh.partial").open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    os.replace(out / "fresh.partial", out / name)


for _ in range(5):
    step()
save("a.pt")
until("ckpt-1", "verified")
(out / "a.pt").unlink()
with torch.no_grad():
    model.weight[0, 0] = float("nan")
save("b.pt")
until("ckpt-2", "bad")
while "checkpoint.verification_failed" not in (register.parent / "audit.log").read_text():
    step()
    time.sleep(0.05)
"""

POLICY = """
version: supervise/v1
policy: guarded
mode: observe
use: [checkpoint]
job: {checkpoints: {verify: [load, finite, optimizer]}}
"""


def test_a_good_and_a_bad_one(supervise, tmp_path):
    """The good one outlives the job's rotation; the bad one is an incident."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "policy.yaml").write_text(POLICY)
    register, out = tmp_path / "run" / "checkpoints.json", tmp_path / "out"
    out.mkdir()
    job = [sys.executable, str(tmp_path / "job.py"), str(register), str(out)]

    run = supervise.run("--policy", str(tmp_path / "policy.yaml"), job=job)

    assert run.returncode == 0, run.stderr
    good, bad = json.loads(register.read_text())["checkpoints"]
    assert (good["step"], good["state"], good["pinned"]) == (4, "verified", True)
    assert (bad["state"], bad["problems"]) == ("bad", ["model.weight has NaN"])
    assert (run.directory / "checkpoints/ckpt-1/data/a.pt").exists()
    assert not (out / "a.pt").exists() and run.actions == []
    (opened,) = run.kinds("incident", "opened")
    assert (
        opened["rule"] == "checkpoint.verification_failed" and "checkpoint_ok 0" in opened["reason"]
    )


LAST = """
import pathlib, sys
import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "a.pt")
path = pathlib.Path("last.pt")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
path.write_bytes(path.read_bytes()[:20_000])  # the disk was full, or a copy was cut off
"""


def test_the_last_one_is_verified_after_the_end(supervise, tmp_path):
    """Nobody would look at it before it is needed; the exit code stays the job's."""
    (tmp_path / "job.py").write_text(LAST)
    (tmp_path / "policy.yaml").write_text(POLICY)

    run = supervise.run(
        "--policy", tmp_path / "policy.yaml", job=[sys.executable, str(tmp_path / "job.py")]
    )

    assert run.returncode == 0, run.stderr
    good, bad = run.checkpoints
    assert (good["state"], bad["state"]) == ("verified", "bad")
    told = [one["data"]["message"] for one in run.kinds("notify_intent")]
    titles = [(one["severity"], one["title"]) for one in told]
    assert ("SEV1", "finished at step 4, and the newest checkpoint is damaged") in titles
    assert "not verified" not in run.stderr
    run_id = json.loads((run.directory / "run.json").read_text())["run"]
    assert supervise("checkpoints", run_id).returncode == 0  # as messages name it, not below ./runs
    run.prove()
