"""A job that is hit comes back from its own checkpoint, in a process of its own, for real."""

from __future__ import annotations

import json
import re
import signal

import pytest

from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

COUNTERS = ("steps_seen", "skipped_updates", "tokens_seen", "tokens_applied")
HIT = "lr_spike:factor=3000,steps=8@210"


def test_a_job_that_was_hit_comes_back_from_its_own_checkpoint(supervise, comes_back, resuming_job):
    """Steps go on behind the checkpoint in a new attempt; it ends well, and so do the records.

    What was saved just before is verified when the job has been stopped, and gone back to. In its
    second life it crashes, and is started once more, from what it saved meanwhile.
    """
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
    for row in rows[-1], next(row for row in rows if row["attempt"] == "1"):
        done = int(row["step"]) + 1  # as in a run that nothing happened to
        tokens = sum(64 + n % 3 for n in range(done))
        assert [float(row[name]) for name in COUNTERS] == [done, 0, tokens, tokens]

    marks = [json.loads(path.read_text()) for path in (run.directory / "relaunch").iterdir()]
    assert sorted(mark["attempt"] for mark in marks) == [1, 2]
    run.prove()


@pytest.mark.chaos
def test_arguments_that_the_script_does_not_know_are_named_and_need_a_person(
    supervise, comes_back, resuming_job, tmp_path
):
    """It dies at once, is started once more as the policy allows, and dies again. None of its
    checkpoints is verified when it is hit: it is paused until one is."""
    given = "--resume_from={checkpoint}"
    comes_back.write_text(comes_back.read_text().replace("--init_from=resume", given))
    (tmp_path / "no-wait").write_text("was verified")
    job = resuming_job("--every=200", "--max_iters=400", f"--wait_file={tmp_path / 'no-wait'}")
    run = supervise.run("--policy", comes_back, "--drill", HIT, job=job)

    assert run.returncode == 78, run.stderr
    assert run.actions == ["pause", "relaunch", "relaunch"], run.stderr
    assert "KeyError: 'resume_from'" in run.stderr
    given = given.format(checkpoint=tmp_path / "out" / "ckpt.pt")
    assert (
        f"or a newer one that is verified meanwhile, with job.relaunch.args {given}" in run.stderr
    )
    why = f"restarted with job.relaunch.args {given}, the job ended with code 1 "
    why += "before its first step"
    assert [r["reason"] for r in run.kinds("verify", "failed")] == [why] * 2
    (closed,) = run.kinds("incident", "closed")
    assert closed["reason"].startswith(f"closed: {why}; not started again: it already ended at ")
    told = run.kinds("notify_intent")[-1]["data"]["message"]
    assert told["next"].startswith("check job.relaunch in the policy")
    run.prove()


@pytest.mark.chaos
def test_who_ends_the_run_ends_it_for_good(supervise, comes_back, resuming_job):
    """TERM while what the stopped job left is looked at: nothing is launched, and people are told
    how the run ended."""
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
