"""Checkpoints that are found and verified, and verified at once when a rollback needs them."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from supervise.checkpoints import (
    Entry,
    Evaluation,
    RunPosition,
    VerifierProcess,
    predecessors,
    read_registry,
    seconds_between_saves,
)
from supervise.core.model import Evaluate, LateFrame, Notice
from tests.support.waiting import slack, wait_until

from .guard_driver import copies, overwrite_during_verification, slow_verification

pytestmark = pytest.mark.slow  # it waits for files to be still


def test_reported_checkpoint(driver):
    path = driver.write("a.pt", "good 1", step=99)

    assert driver.run_once() == [("ckpt-1", 99, True)]
    assert driver.events[0].data["seconds"] == 0.5 and driver.events[0].data["path"] == str(path)
    assert driver.guard.frame_values() == {"checkpoint_ok": 1.0, "checkpoint_size": 6.0}
    assert driver.guard.frame_values() == {}
    entry = driver.entry("ckpt-1")
    assert (entry["state"], entry["pinned"], entry["bytes"]) == ("verified", True, 6)
    assert (driver.run / "checkpoints/ckpt-1/data/a.pt").read_text() == "good 1"
    made = json.loads((driver.run / "checkpoints/ckpt-1/manifest.json").read_text())
    assert made["argv"] == ["python", "train.py"] and made["metrics"] == {"train_loss_raw": 2.5}
    assert made["environment"]["lock"] and made["inputs"]["../tokenizer.json"].startswith("sha256:")
    assert made["code"] == {"commit": "1f2e"}
    assert made["rng"] == "random states are in the checkpoint"


def test_register_is_written_before_the_event(driver):
    """An adopting supervisor must know what the engine chose; a full disk is reported first."""
    driver.write("a.pt", "good 1", step=9)
    driver.guard.scan()
    (driver.run / "checkpoints.json").unlink()
    (driver.run / "checkpoints.json").mkdir()

    assert driver.guard.verify_next()

    assert [e.kind for e in driver.guard.poll()] == ["note", "checkpoint"]


def test_growing_file_is_not_verified(driver):
    driver.write("a.pt", "go", step=9)
    driver.guard.scan()
    driver.write("a.pt", "good but not yet")
    driver.guard.scan()
    assert not driver.guard.verify_next() and driver.entries()[0]["state"] == "found"

    assert driver.run_once() == [("ckpt-1", 9, True)]


def test_file_renamed_after_the_report_is_followed_before_a_scan_and_after(driver):
    driver.write("a.partial", "good a", step=9).rename(driver.out / "a.pt")
    late = driver.write("b.partial", "good b", step=19)
    driver.guard.scan()
    driver.guard.scan()
    late.rename(driver.out / "b.pt")

    assert sorted(driver.run_once()) == [("ckpt-1", 9, True), ("ckpt-2", 19, True)]
    assert [Path(e["path"]).name for e in driver.entries()] == ["a.pt", "b.pt"]


def test_pattern_finds_unreported_files(driver, monkeypatch):
    """Not those from before the run. The step is that inside it, if plausible."""
    monkeypatch.undo()  # our own interpreter
    driver.guard.close()
    shutil.rmtree(driver.run)
    driver.run.mkdir()
    driver.write("old.pt", "good old")
    driver.position = RunPosition(step=7)
    driver.open(glob=("*.pt",))
    driver.guard.poll()
    driver.write("new.pt", "bad: an unreported file is verified by our own interpreter")

    assert driver.run_once() == [("ckpt-1", 7, False)]
    assert "cannot be loaded" in driver.entry("ckpt-1")["problems"][0]


@pytest.mark.parametrize(
    ("text", "state", "problem"),
    [
        ("bad", "bad", "it is damaged"),
        ("code", "unverified", "it needs code"),
        ("crash", "bad", "reading it crashes a process: Segmentation fault"),
        ("memory", "unverified", "the verifier was killed (Killed), perhaps out of memory"),
        ("hang", "unverified", "the verifier took longer than 0 s"),
    ],
)
def test_failed_verification(driver, text, state, problem):
    """Never pinned or reported as good; one that could not be read is tried twice."""
    driver.open(limit_s=0.4 if text == "hang" else 60.0)
    driver.write("a.pt", text, step=9)

    events = driver.run_once() + driver.run_once()

    entry, event = driver.entry("ckpt-1"), driver.events[0]
    assert (entry["state"], entry["problems"], driver.pinned()) == (state, [problem], [])
    assert problem in event.message
    values, given_up = driver.guard.frame_values(), dict(event.data).get("unverified")
    verdict = (events, given_up, values.get("checkpoint_ok"))
    assert verdict == (
        ([("ckpt-1", 9, False)], None, 0.0) if state == "bad" else ([], [0, 9], None)
    )


def test_files_of_several_ranks_are_no_checkpoint(driver):
    driver.save("rank0.pt", "good 0", step=9)
    path = driver.write("rank1.pt", "good 1")
    driver.guard.on_save(Notice(0, "checkpoint-saved", "", 1, 10, {"path": str(path)}))

    assert driver.run_once() == [("ckpt-1", 9, False)]
    assert {e["state"] for e in driver.entries()} == {"unverified"}
    driver.run_once()
    assert driver.pinned() == []


def test_close_cancels_a_verification(driver):
    driver.write("a.pt", "hang", step=9)
    driver.guard.start()
    wait_until(driver.python.with_name("hanging").exists)

    driver.guard.close()

    assert driver.entry("ckpt-1")["state"] == "found"
    assert not [t for t in threading.enumerate() if t.name in ("checkpoints", "verify")]


def test_undelivered_verdicts_are_reported_after_a_crash(driver):
    driver.write("a.pt", "good 1", step=5)
    driver.write("b.pt", "bad 1", step=6)
    delivered = {name: ok for name, _, ok in driver.run_once()}
    assert sorted(delivered.values()) == [False, True]

    for known, reported in (
        (delivered, {}),
        ({"ckpt-1": False, "ckpt-2": True}, delivered),
        ({}, delivered),
    ):
        driver.open()
        driver.guard.resume_after_crash(known)
        assert dict(driver.verdicts()) == reported


def test_verifier_is_in_the_supervisors_process_group(tmp_path):
    """Signals to the job and its memory accounting must not include it."""
    (tmp_path / "a.pt").write_text("good")
    python = tmp_path / "python"
    group = "print(json.dumps({'environment': {'packages': os.getpgrp()}}))"
    python.write_text(f"#!{sys.executable}\nimport json, os\n{group}\n")
    python.chmod(0o755)

    answer = VerifierProcess(("load",)).verify(str(tmp_path / "a.pt"), 4, str(python))

    assert answer.environment.packages == os.getpgrp()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_root_does_not_run_what_another_user_may_change(mode):
    """The job of that user names its interpreter; where everybody may change it, nobody runs it."""
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        (home / "a.pt").write_text("good")
        (home / "python").write_text(f"#!/bin/sh\nid -u > {home}/out\n")
        (home / "python").chmod(mode)
        home.chmod(0o755)
        for path in (home, home / "a.pt", home / "python"):
            os.chown(path, 65534, 65534)

        verdict = VerifierProcess(("load",)).verify(str(home / "a.pt"), 4, str(home / "python"))

        assert verdict.ok is None
        if mode == 0o755:
            assert (home / "out").read_text() == "65534\n"
        else:
            assert "several users" in verdict.problems[0] and not (home / "out").exists()
    finally:
        shutil.rmtree(home)


def test_verify_now_after_a_crash(driver):
    """Newest first, without pauses, and unreported files need not settle."""
    driver.open(glob=("*.pt",), settle=600.0, share=0.001)
    driver.guard.start()
    driver.write("a.pt", "good 1", step=9)
    wait_until(driver.guard.poll)  # from here on the guard pauses
    for number in (2, 3):
        driver.write(f"{number}.pt", f"good {number}", step=number * 10)
    driver.write("4.pt", "torn")

    driver.verify_now()

    assert driver.verdicts() == [("ckpt-4", False), ("ckpt-3", True), ("ckpt-2", True)]
    assert driver.pinned() == ["ckpt-1", "ckpt-2", "ckpt-3"]


@pytest.mark.parametrize(
    ("word", "patient", "verdicts"),
    [("hang", False, []), ("hang", True, []), ("works", True, [("ckpt-1", True)])],
)
def test_verify_now_is_bounded(driver, word, patient, verdicts):
    """A crash before the first good checkpoint is not given up while one is being read."""
    within_s = slack()  # work is a second of CPU in that time
    driver.write("a.pt", f"{word} {2.5 * within_s}", step=9)

    driver.verify_now(within_s=within_s, patient=patient)

    assert driver.verdicts() == verdicts
    assert driver.entry("ckpt-1")["state"] == ("verified" if verdicts else "found")


def test_verify_now_takes_the_newest_alone(driver):
    """Of a job that has ended for good, and older ones only where the newest is not good."""
    driver.write("a.pt", "good a", step=9)
    driver.write("b.pt", "good b", step=19)
    driver.verify_now(newest=True)
    assert driver.verdicts() == [("ckpt-2", True)]
    driver.write("c.pt", "torn", step=29)
    driver.write("shards/model-00001-of-00002.safetensors", "good")
    driver.report(driver.out / "shards", step=39)

    driver.verify_now(newest=True)

    assert driver.verdicts() == [("ckpt-4", False), ("ckpt-3", False)]
    assert driver.states("found") == ["ckpt-1"]


def test_verify_now_takes_those_that_are_newer_than_a_good_one(driver):
    """A good one lets older ones be: not those of after it, of which the newest is damaged."""
    driver.open(glob=("*.pt",), settle=600.0, soon_s=0.0)
    hold = driver.python.with_name("hold")
    hold.touch()
    driver.write("a.pt", "slow good", step=9)
    driver.guard.start()
    wait_until(driver.python.with_name("started").exists)  # a is being verified
    driver.write("b.pt", "good b")
    driver.write("c.pt", "torn")
    driver.guard.verify_now()
    wait_until(lambda: len(driver.entries()) == 3)
    hold.unlink()

    wait_until(lambda: not driver.guard.is_verifying_now)

    assert driver.verdicts() == [("ckpt-1", True), ("ckpt-3", False), ("ckpt-2", True)]


@pytest.mark.parametrize(("where", "step"), [(2, 4), (60, 4), (300, 300)])
def test_a_step_count_in_an_unreported_file_corrects_where_the_run_was(driver, where, step):
    """Known a second late, before or behind it; another count is of something else."""
    driver.open(glob=("*.pt",))
    driver.position = RunPosition(step=where)
    driver.guard.poll()
    driver.write("a.pt", "good")
    assert driver.run_once() == [("ckpt-1", step, True)]


def test_verify_now_takes_only_steps_in_range(driver):
    driver.open(glob=("*.pt",), settle=600.0)
    for name, step in (("a", 9), ("b", 19), ("c", 29), ("d", 50)):
        driver.write(f"{name}.pt", f"good {name}", step=step)
    driver.position = RunPosition(step=60)
    driver.guard.poll()
    driver.write("e.pt", "torn")

    driver.verify_now(above=9, below=50)

    assert driver.verdicts() == [("ckpt-5", False), ("ckpt-3", True), ("ckpt-2", True)]
    assert driver.entry("ckpt-5")["step"] == 60


def test_lower_priority_when_the_job_restarts(driver):
    def niceness():
        return {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in verifier.threads()}

    driver.write("b.pt", "good b", step=4)
    driver.write("a.pt", "hang", step=9)
    others = psutil.Process().children()  # other tests' servers
    driver.guard.verify_now()
    wait_until(driver.python.with_name("hanging").exists)
    (verifier,) = (each for each in psutil.Process().children() if each not in others)
    (thread,) = (t for t in threading.enumerate() if t.name == "verify now")
    assert niceness() == {os.getpriority(os.PRIO_PROCESS, 0)}

    driver.guard.end_urgent_verifications()

    assert niceness() == {os.getpriority(os.PRIO_PROCESS, thread.native_id)} == {19}
    assert not driver.guard.is_verifying_now
    for process in (*verifier.children(recursive=True), verifier):
        process.kill()
    thread.join(60)
    assert driver.states("found") == ["ckpt-1", "ckpt-2"]  # no other was started


def verify_awaited(driver, before):
    driver.guard.verify_awaited(before)
    wait_until(lambda: not driver.guard.is_verifying_awaited)
    return driver.verdicts()


def test_verify_awaited_takes_the_newest_candidate(driver):
    """While the job runs; one good checkpoint is enough, unless it holds weights only."""
    for number in range(1, 6):
        word = {2: "weights", 3: "bad"}.get(number, "good")
        driver.write(f"{number}.pt", f"{word} {number}", step=number * 10)
    driver.guard.scan()

    verdicts = [("ckpt-3", False), ("ckpt-2", True), ("ckpt-1", True)]
    assert verify_awaited(driver, before=35) == verdicts
    assert not driver.guard.is_verifying_now  # a job that trains and is silent may hang
    assert ("ckpt-5", 50, True) in driver.run_once()


def test_verify_awaited_goes_on_with_the_copy_that_is_being_verified(driver):
    """The job has overwritten the file since: nothing else is left of that checkpoint."""
    driver.write("a.pt", "slow good 1", step=9)
    overwrite_during_verification(driver, lambda: driver.write("a.pt", "slow good 2", step=19))
    driver.guard.scan()
    driver.guard.scan()
    with slow_verification(driver, driver.guard.verify_next):
        (copy,) = copies(driver)
        driver.write("a.pt", "slow good 3", step=29)
        driver.guard.verify_awaited(before_step=25)
        wait_until(lambda: driver.guard.count_unverified(25) == 1, "the search")

    assert verify_awaited(driver, before=25) == [("ckpt-1", True)]
    assert (copy.with_name("ckpt-1") / "data/a.pt").read_text() == "slow good 2"


def test_verify_awaited_cancels_a_verification_at_low_priority(driver):
    driver.write("a.pt", "good 1", step=9)
    driver.write("b.pt", "hang", step=50)
    driver.guard.scan()
    hanging = driver.python.parent / "hanging"
    for verdicts in ([("ckpt-1", True)], []):
        verifying = threading.Thread(target=driver.guard.verify_next)
        verifying.start()
        wait_until(hanging.exists)
        hanging.unlink()

        assert verify_awaited(driver, before=20) == verdicts
        verifying.join()
        assert driver.entry("ckpt-2")["state"] == "found"  # it is verified again


def test_a_set_of_files_is_registered_once(driver):
    """Reported or found; the newest step that has all of its files is the newest good one."""
    driver.open(glob=("*_*",))
    for step in (100, 200):
        for name in ("model_{}.pt", "meta_{}.json", "optim_{}_rank0.pt"):
            if (step, name[:5]) != (200, "optim"):
                driver.write(name.format(f"{step:05}"), "weights 1", step=step - 1)

    assert driver.run_once() == [("ckpt-1", 99, True)]
    assert [Path(e["path"]).name for e in driver.entries()] == ["model_00100.pt", "model_00200.pt"]
    assert driver.entry("ckpt-1")["resumable"] == "unknown"  # the model's file is not all of it
    driver.write("optim_00200_rank0.pt", "weights 1", step=199)
    assert driver.run_once() == [("ckpt-2", 199, True)]


def test_the_newest_verified_checkpoint_is_evaluated_and_what_ends_that_is_told(
    driver, monkeypatch
):
    """As frames at its own step; what is not known is never taken for good."""
    driver.open(evaluate=Evaluate(every="checkpoint"))
    driver.write("before.pt", "good 1", step=3)

    def evaluate(name, step, **about):
        driver.report(driver.write(name, f"good {name}"), step, **about)
        driver.run_once()
        assert driver.guard.evaluator.evaluate_newest()
        events = driver.guard.poll()
        assert not driver.guard.evaluator.evaluate_newest()
        (frame,) = (e for e in events if isinstance(e, LateFrame))
        notes = [e.message for e in events if isinstance(e, Notice) and e.kind == "note"]
        return (frame.stream, frame.step, frame.values), notes

    batch, model = driver.run / "batch.pt", 32 * "0"
    for file in (batch, driver.run / f"structure.{model}.pkl"):
        file.touch()
    known = {"probe_batch": {"path": str(batch), "value": 1.5, "model": model}}
    good, overtaken = evaluate("good", 9, **known)
    other, others = evaluate("other", 19, **known)
    killed, kills = evaluate("killed", 29, **known)
    without, reasons = evaluate("nothing", 39)
    changed, changes = evaluate("changed", 44, **known)
    monkeypatch.setattr("supervise.checkpoints.verification.START_S", 0.0)
    driver.guard.close()
    driver.open(evaluate=Evaluate(every="checkpoint", limit_s=0.2))
    late, delays = evaluate("late", 49, **known)

    values = {"checkpoint_probe_loss": 2.0, "checkpoint_proved": 1.0, "checkpoint_unknown": 0.0}
    values["codec_score"] = 72.0
    assert good == ("checkpoint", 9, values) and "ckpt-1 of step 3" in overtaken[0]
    suspicion, artefact, unmeasured = overtaken[1:]  # once a run
    assert suspicion.startswith("codec_score of checkpoint ckpt-2 of step 9 is 72 %: above 60 %")
    assert f"sha256:{8 * '1f2e'}" in artefact and unmeasured.endswith("zlib_ratio: too short")
    assert changed == ("checkpoint", 44, values) and not changes  # of its pin
    assert other[1:] == (19, {"checkpoint_proved": 0.0, "checkpoint_unknown": 1.0})
    assert [row[1:] for row in (killed, without, late)] == [
        (step, {"checkpoint_unknown": 1.0}) for step in (29, 39, 49)
    ]
    assert "other weights" in others[0] and "killed" in kills[0]
    assert "job: {evaluate: {}}" in reasons[0] and "longer than" in delays[0]


@pytest.fixture
def evaluated(driver):
    """Open a guard that evaluates; return it, its evaluator, and how the job saves."""

    def build(share=0.05, **settings):
        driver.open(share=share, evaluate=Evaluate(every="checkpoint", **settings))
        batch, model = driver.run / "batch.pt", 32 * "0"
        for file in (batch, driver.run / f"structure.{model}.pkl"):
            file.touch()
        known = {"probe_batch": {"path": str(batch), "value": 1.5, "model": model}}

        def save(name, step):
            driver.report(driver.write(name, f"good {name}"), step, **known)
            driver.verify_now()

        return driver.guard, driver.guard.evaluator, save

    return build


def late_steps(guard):
    return [frame.step for frame in guard.poll() if isinstance(frame, LateFrame)]


def test_evaluation_rests_in_proportion_and_then_takes_the_newest(evaluated):
    guard, evaluator, save = evaluated()
    save("first.pt", 9)
    assert evaluator.evaluate_newest()
    save("second.pt", 19)
    assert not evaluator.evaluate_newest()
    assert evaluator.list_missing_metrics() == {"the job ended first": ["ckpt-2"]}
    save("third.pt", 29)
    wait_until(evaluator.evaluate_newest, "the end of the rest")
    assert late_steps(guard) == [9, 29] and evaluator.count == 2
    assert evaluator.list_missing_metrics() == {"newer ones came": ["ckpt-2"]}


def test_behind_the_end_of_the_job_the_newest_takes_the_place_of_one_that_is_late(
    evaluated, driver
):
    """Without a rest, and within a limit; what nobody evaluated is listed with the reason."""
    guard, evaluator, save = evaluated(limit_s=8.0)
    save("first.pt", 9)
    assert evaluator.evaluate_newest()
    assert not evaluator.awaits_newest_evaluation()
    evaluator.finish()
    save("late", 19)
    worker = threading.Thread(target=evaluator.evaluate_newest)
    worker.start()
    wait_until(lambda: evaluator.current is not None, "an evaluation")
    save("newest.pt", 29)
    driver.write("unseen.pt", "good but late", step=39)
    guard.scan()
    wait_until(
        lambda: not (evaluator.awaits_newest_evaluation() and worker.is_alive()), "the cancellation"
    )
    worker.join()

    assert evaluator.awaits_newest_evaluation() and evaluator.evaluate_newest()
    assert late_steps(guard) == [9, 29] and not evaluator.awaits_newest_evaluation()
    assert evaluator.list_missing_metrics() == {
        "newer ones came": ["ckpt-2"],
        "not verified": ["ckpt-4"],
    }


def test_no_evaluation_begins_once_the_time_behind_the_end_is_over(evaluated):
    _, evaluator, save = evaluated(limit_s=0.01)
    save("first.pt", 9)
    evaluator.finish()
    wait_until(lambda: not evaluator.awaits_newest_evaluation(), "the end of the time")

    assert not evaluator.evaluate_newest()
    assert evaluator.list_missing_metrics() == {"the job ended first": ["ckpt-1"]}


def test_another_process_of_the_job_takes_back_the_end_of_evaluations(evaluated):
    _, evaluator, save = evaluated(limit_s=0.01)
    save("first.pt", 9)
    evaluator.finish()
    wait_until(lambda: not evaluator.awaits_newest_evaluation(), "the end of the time")
    evaluator.on_relaunch()

    assert evaluator.evaluate_newest() and evaluator.count == 1


def test_behind_the_end_saves_that_were_near_each_other_shorten_no_evaluation(
    evaluated, monkeypatch
):
    """A last save often comes soon after one in its turn."""
    _, evaluator, save = evaluated(limit_s=100.0)
    limits = []

    def evaluate(request, python, limit_s):
        limits.append(limit_s)
        return Evaluation(reason="not asked")

    monkeypatch.setattr(evaluator.process, "evaluate", evaluate)
    save("a.pt", 9)
    save("b.pt", 19)
    assert evaluator.evaluate_newest()
    save("last.pt", 20)
    evaluator.finish()
    assert evaluator.evaluate_newest()

    assert limits[0] == 30.0 and limits[1] > 90.0


def test_the_time_between_two_saves_is_that_of_the_newest_steps():
    """Several files of one step are one save."""
    saves = [(9, 0), (19, 10), (29, 130), (29, 131)]
    entries = [
        Entry(str(n), "", step=step, saved=f"2031-05-04T03:{s // 60:02}:{s % 60:02}.000Z")
        for n, (step, s) in enumerate(saves)
    ]

    assert seconds_between_saves(entries) == 121.0
    entries.append(Entry("4", "", step=9, saved="2031-05-04T03:04:00.000Z"))  # after a rollback
    assert seconds_between_saves(entries) == 109.0
    assert seconds_between_saves(entries[:1]) == seconds_between_saves([]) == math.inf


@pytest.mark.parametrize(
    ("first_steps", "expected"),
    [({1: 201}, [100]), ({1: 301}, [100, 300]), ({}, [100, 300]), ({1: 301, 2: 51}, [])],
)
def test_branches_that_rollbacks_left_lead_to_no_later_checkpoint(driver, first_steps, expected):
    """Attempts may save first beyond what they undid, or never; the register outlives its guard."""
    for attempt, step in ((0, 100), (0, 300)):
        driver.report(driver.write(f"{step}", "good 1"), step, attempt=attempt)
    driver.run_once()
    newest = max(first_steps, default=1)
    driver.position = RunPosition(step=390, attempt=newest, first_steps=first_steps)
    driver.report(driver.write("400", "good 1"), 400, attempt=newest)
    driver.run_once()
    driver.guard.close()
    driver.position = RunPosition(step=390, attempt=newest)
    driver.open()
    driver.guard.scan()

    register = read_registry(driver.run)
    known = dict(register.first_steps)
    entry = register.checkpoints[-1]
    assert [e.step for e in predecessors(register.checkpoints, known, entry)] == expected
    undone = register.checkpoints[1]  # by hand, later on: its own branch
    assert [e.step for e in predecessors(register.checkpoints, known, undone)] == [100]
