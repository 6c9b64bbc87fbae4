"""The guard in a real run: told by the probe, verified in the job's interpreter, pinned, judged."""

from __future__ import annotations

import json

import pytest

from supervise.core.model import LateFrame
from supervise.store import read_journal

pytestmark = pytest.mark.slow

# Deletes its first checkpoint, spoils its second, and waits until both were looked at. The disk is
# full at the last, or its copy was cut off.
JOB = """
import json

register, out = Path("run/checkpoints.json"), Path("out")
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
while not (register.parent / "probe_batch/outputs.ckpt-1.pt").exists():
    step()
    time.sleep(0.05)
with torch.no_grad():
    model.weight[0, 0] = float("nan")
save("b.pt")
until("ckpt-2", "bad")
while "checkpoint.verification_failed" not in (register.parent / "audit.log").read_text():
    step()
    time.sleep(0.05)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out / "last.pt")
(out / "last.pt").write_bytes((out / "last.pt").read_bytes()[:20_000])
"""

# Ends before the first of its checkpoints can be evaluated.
HASTY = (
    JOB.partition("for _ in range(5):")[0]
    + """
for name in "abc":
    for _ in range(5):
        step()
    save(f"{name}.pt")
"""
)

POLICY = """
version: supervise/v1
policy: guarded
mode: observe
use: [checkpoint]
job: {checkpoints: {verify: [load, finite, optimizer]}, evaluate: {every: checkpoint}}
"""


def test_checkpoints_are_verified_while_the_job_runs_and_after_its_end(supervise, script, tmp_path):
    """The good one outlives the job's rotation; the last one is looked at before it is needed."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    register, out = tmp_path / "run" / "checkpoints.json", tmp_path / "out"
    out.mkdir()

    run = supervise.run("--policy", tmp_path / "policy.yaml", job=script(JOB))

    assert run.returncode == 0, run.stderr
    good, bad, last = json.loads(register.read_text())["checkpoints"]
    assert (good["step"], good["state"], good["pinned"]) == (4, "verified", True)
    assert (bad["state"], bad["problems"]) == ("bad", ["model.weight has NaN"])
    assert (run.directory / "checkpoints/ckpt-1/data/a.pt").exists()
    assert not (out / "a.pt").exists() and run.actions == []
    assert last["state"] == "bad" and "not verified" not in run.stderr
    told = [one["data"]["message"] for one in run.kinds("notify_intent")]
    (end,) = (one for one in told if one["title"].startswith("finished at step "))
    title = end["title"]
    assert "its loss is NaN or Inf" in title and "ckpt-3" in end["verdict"]
    assert "is damaged: last.pt cannot be loaded" in end["verdict"]
    assert "\n  SEV1 newest checkpoint is damaged: ckpt-3 of step " in run.stderr
    assert title in supervise("events", "run").stdout
    (opened,) = run.kinds("incident", "opened")
    assert (
        opened["rule"] == "checkpoint.verification_failed"
        and "cannot be loaded" in opened["reason"]
    )
    (frame,) = (e for _, e in read_journal(run.directory / "journal", only=(LateFrame,)))
    assert (frame.stream, frame.step, frame.values["checkpoint_proved"]) == ("checkpoint", 4, 1.0)
    evaluated = supervise("checkpoint", "eval", "ckpt-1", "--run", run.directory, "--json")
    answer = json.loads(evaluated.stdout)
    assert answer["now"] == answer["was"] == good["probe_batch"]["value"]
    assert answer["parts"]["optimizer"] == "restored" and answer["reason"] == ""
    run_id = json.loads((run.directory / "run.json").read_text())["run"]
    assert supervise("checkpoints", run_id).returncode == 0  # as messages name it, not below ./runs
    run.prove()


def test_the_last_checkpoint_of_a_job_is_evaluated_behind_its_end(supervise, script, tmp_path):
    """And the run lists those that were not, with the reason."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "out").mkdir()

    run = supervise.run("--policy", tmp_path / "policy.yaml", job=script(HASTY))

    assert run.returncode == 0, run.stderr
    entries = json.loads((run.directory / "checkpoints.json").read_text())["checkpoints"]
    frames = [e for _, e in read_journal(run.directory / "journal", only=(LateFrame,))]
    proved = {frame.step for frame in frames if frame.values["checkpoint_proved"]}
    assert [e["step"] for e in entries] == [4, 9, 14] and 14 in proved
    listed = [line for line in run.stderr.splitlines() if "checkpoints were evaluated" in line]
    missing = [e["id"] for e in entries if e["step"] not in proved]
    assert bool(listed) == bool(missing)
    for line in listed:
        assert f"{len(proved)} of 3 checkpoints" in line and all(name in line for name in missing)
        assert "newer ones came" in line or "not verified" in line
    run.prove()
