"""One command, two programs one after the other: both are watched."""

from __future__ import annotations

import shlex
import sys

import pytest

pytestmark = pytest.mark.slow

# Its gradient at step 30 is no number.
PROGRAM = """
import sys, time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(40):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    if i == 30:
        model.weight.grad.fill_(float("nan"))
    optimizer.step()
    time.sleep(0.01)
"""


def test_the_second_program_is_watched_as_the_first_was(supervise, tmp_path):
    """The record says that step numbers come again. The incident of the first program ends with
    it; the same rules fire in the second, and that is another incident."""
    script = tmp_path / "ex.py"
    script.write_text(PROGRAM)
    python = shlex.join([sys.executable, str(script)])
    job = ["bash", "-c", f"{python} && {python}"]
    run = supervise.run("--policy", "nano", "--mode", "shadow", job=job)

    assert run.returncode == 0
    assert "internal error" not in run.stderr
    (note,) = run.kinds("note", "program-replaced")
    assert note["data"]["last_step"] == 39 and note["data"]["rank"] == 0
    assert [int(row["step"]) for row in supervise.rows("run")] == [*range(40)] * 2
    fired = [r for r in run.kinds("rule", "fired") if r["rule"].startswith("nonfinite.")]
    second = [r["step"] for r in fired if r["seq"] > note["seq"]]
    assert min(second) in (30, 31) and len(fired) > len(second)
    assert [one["incident"] for one in run.kinds("incident", "opened")] == ["inc-1", "inc-2"]
    ends = [one["reason"] for one in run.kinds("incident", "closed")]
    assert ends[0] == "closed: over: its training session ended after step 39; another one starts"
    assert ends[1].startswith("closed: the job ended with code 0")
    run.prove()
