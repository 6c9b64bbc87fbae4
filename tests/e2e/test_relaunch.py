"""A job that is hit comes back from its own checkpoint, in a process of its own, for real."""

from __future__ import annotations

import json
import re
import signal

import pytest

from tests.support.run_readers import read_everywhere
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

HIT = "lr_spike:factor=3000,steps=8@210"


def test_a_job_that_was_hit_comes_back_from_its_own_checkpoint(
    supervise, comes_back, resuming_job, tmp_path
):
    job = resuming_job("--max_iters=350")
    given = ("--policy", comes_back, "--logs", "--drill", HIT, "--drill", "crash@310")
    run = supervise.run(*given, job=job)

    assert run.returncode == 0, run.stderr
    assert run.actions == ["relaunch", "relaunch"]
    done = [r["data"]["result"] for r in run.kinds("commit") if "pid" in r["data"]["result"]]
    hit, crashed = done
    assert (hit["step"], hit["attempt"], hit["how"]) == (199, 1, "interrupt")
    assert [
        r["data"]["action"]["args"]["step"]
        for r in run.kinds("intent")
        if r["data"]["action"]["verb"] == "relaunch"
    ] == [99, 299]
    (chosen,) = run.kinds("note", "replanned")
    assert chosen["data"]["action"]["args"]["step"] == 199
    assert hit["moved"] == []  # it lies where the job looks for it
    assert (crashed["attempt"], crashed["how"], crashed["step"]) == (2, "ended", 299)
    assert "resumed at 200\n" in run.stdout
    assert "resumed at 200\n" in (run.directory / "output/output.log").read_text()
    assert float(re.search(r"done at 350 loss ([\d.]+)", run.stdout)[1]) < 0.5
    assert run.kinds("verify", "passed")
    assert [(r["data"]["attempt"], r["data"].get("differs")) for r in run.kinds("identity")] == [
        (0, None),
        (1, []),
        (2, []),
    ]
    looks = [r["data"]["details"]["checks"] for r in run.kinds("note", "host-health")]
    whole = ["memory", "disk", "devices", "matmul"]
    assert [list(checks) for checks in looks] == [["disk", "devices"], whole, whole]
    assert {checks["disk"]["verdict"] for checks in looks} == {"good"}
    proofs = [r["data"]["details"]["probe_batch"] for r in run.kinds("note", "continuity")]
    assert [(p["verdict"], p["was"] == p["is"]) for p in proofs] == [("equal", True)] * 2
    assert {each["probe_batch"]["value"] for each in run.checkpoints} >= {p["was"] for p in proofs}

    rows = supervise.rows("run")
    steps = {a: [int(r["step"]) for r in rows if r["attempt"] == a] for a in ("0", "1", "2")}
    assert steps["0"] == list(range(steps["0"][-1] + 1))
    assert steps["1"] == list(range(200, steps["1"][-1] + 1))
    assert steps["2"] == list(range(300, 350))
    rewarmed = [float(r["learning_rate"]) for r in rows if r["attempt"] == "1"]
    assert rewarmed[0] == pytest.approx(1e-4)
    assert rewarmed[25] == pytest.approx(1e-3)
    assert float(rows[-1]["steps_seen"]) == 350  # as in a run that nothing happened to

    marks = [json.loads(path.read_text()) for path in (run.directory / "relaunch").iterdir()]
    assert sorted(mark["attempt"] for mark in marks) == [1, 2]
    run.prove()
    read_everywhere(run.directory, tmp_path)


@pytest.mark.chaos
def test_who_ends_the_run_ends_it_for_good(supervise, comes_back, resuming_job):
    job = resuming_job("--max_iters=9999")
    options = ("--policy", comes_back, "--run-dir", "run", "--drill", HIT)
    watcher = supervise.start(*options, "--", *job)
    run = supervise.run_of()
    log = run.directory / "audit.log"
    ready = lambda: log.exists() and '"what":"relaunching"' in log.read_text()  # noqa: E731
    wait_until(ready, "the relaunch", every_s=0.002)
    watcher.send_signal(signal.SIGTERM)
    _, stderr = watcher.communicate(timeout=60)
    notes = [r["data"].get("what") for r in run.kinds("note")]

    assert watcher.returncode not in (0, 78), stderr
    assert "launched" not in notes[notes.index("signal") :]
    assert run.kinds("incident", "closed")
    assert "the job was ended by SIGTERM, as asked" in run.kinds("notify_intent")[-1]["reason"]
    run.prove()
