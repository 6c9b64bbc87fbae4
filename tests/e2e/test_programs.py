"""One command, two programs one after the other: both are watched."""

from __future__ import annotations

import shlex
import sys

import pytest

pytestmark = pytest.mark.slow

# The second program, or both, has a gradient at its step 30 that is no number.
PROGRAM = """
import os, sys, time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(40):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    if ("again" in sys.argv or "both" in sys.argv) and i == 30:
        model.weight.grad.fill_(float("nan"))
    optimizer.step()
    time.sleep(0.01)
if "exec" in sys.argv:
    os.execv(sys.executable, [sys.executable, sys.argv[0], "again"])
"""


@pytest.fixture
def watched(supervise, tmp_path):
    """A function that runs both programs under nano, and returns what both must come to."""
    script = tmp_path / "ex.py"
    script.write_text(PROGRAM)

    def watch(*command):
        run = supervise.run("--policy", "nano", "--mode", "shadow", job=list(command))
        assert run.returncode == 0
        assert "internal error" not in run.stderr
        (note,) = run.kinds("note", "program-replaced")
        assert note["data"]["last_step"] == 39 and note["data"]["rank"] == 0
        assert [int(row["step"]) for row in supervise.rows("run")] == [*range(40)] * 2
        run.prove()
        fired = [r for r in run.kinds("rule", "fired") if r["rule"].startswith("nonfinite.")]
        second = [r["step"] for r in fired if r["seq"] > note["seq"]]
        assert min(second) in (30, 31)
        return run, len(fired) - len(second)

    return watch, str(script)


def test_the_second_program_is_watched_as_the_first_was(watched):
    """It is judged, its rows are there, and the record says that step numbers come again."""
    watch, script = watched
    _, fired_before = watch(sys.executable, script, "exec")

    assert fired_before == 0


def test_an_incident_of_the_first_program_ends_with_it(watched):
    """The same rules fire in the second, and that is another incident."""
    watch, script = watched
    python = shlex.join([sys.executable, script])
    run, fired_before = watch("bash", "-c", f"{python} both && {python} again")

    assert fired_before > 0
    assert [one["incident"] for one in run.kinds("incident", "opened")] == ["inc-1", "inc-2"]
    ends = [one["reason"] for one in run.kinds("incident", "closed")]
    assert ends[0] == "closed: over: its training ended after step 39, and another one begins"
    assert ends[1].startswith("closed: the job ended with code 0")
