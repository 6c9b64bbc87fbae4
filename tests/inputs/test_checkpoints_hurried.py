"""Checkpoints that are verified in a hurry, before the job is started again."""

from __future__ import annotations

import os
import threading
import time

import psutil
import pytest

from supervise.checkpoints.save_report import RunPosition

from .desk import Overwriter

pytestmark = pytest.mark.slow  # it waits for files to be still


def test_after_a_crash_the_guard_hurries(desk):
    """Newest first, without a rest, and what nobody told of need not settle any more."""
    desk.open(glob=("*.pt",), settle=600.0, share=0.001)
    desk.guard.start()
    desk.write("a.pt", "good 1", step=9)
    while not desk.guard.poll():
        time.sleep(0.01)  # from here on the guard rests
    for number in (2, 3):
        desk.write(f"{number}.pt", f"good {number}", step=number * 10)
    desk.write("4.pt", "torn")

    desk.verify_now()

    news = [(e.data["id"], e.data["ok"]) for e in desk.guard.poll()]
    assert news == [("ckpt-4", False), ("ckpt-3", True), ("ckpt-2", True)]
    assert desk.pinned() == ["ckpt-1", "ckpt-2", "ckpt-3"]


def test_a_hurry_that_has_a_good_one_is_soon_over(desk):
    """With one that is good, late is too late for more; without, it goes on."""
    desk.open(soon_s=0.0)
    desk.write("a.pt", "good 1", step=9)
    desk.write("b.pt", "good 2", step=19)
    desk.write("c.pt", "bad 3", step=29)

    desk.verify_now()

    news = [(e.data["id"], e.data["ok"]) for e in desk.guard.poll()]
    assert news == [("ckpt-3", False), ("ckpt-2", True)]


def test_a_hurry_is_bounded(desk):
    """What takes too long is left as it was found."""
    desk.write("a.pt", "hang", step=9)

    desk.verify_now(within_s=1.0)

    assert desk.guard.poll() == [] and desk.entry("ckpt-1")["state"] == "found"


def test_before_a_relaunch_only_what_it_may_go_back_to_is_hurried(desk):
    """What is of the trouble, and what is older than the one that is known, would cost time.

    One that nobody told of is of an earlier step than it seems, perhaps.
    """
    desk.open(glob=("*.pt",), settle=600.0)
    for name, step in (("a", 9), ("b", 19), ("c", 29), ("d", 50)):
        desk.write(f"{name}.pt", f"good {name}", step=step)
    desk.moment = RunPosition(step=60)
    desk.guard.poll()
    desk.write("e.pt", "torn")

    desk.verify_now(above=9, before=50)

    news = [(e.data["id"], e.data["step"]) for e in desk.guard.poll()]
    assert news == [("ckpt-5", 60), ("ckpt-3", 29), ("ckpt-2", 19)]


def test_a_copy_that_is_being_verified_is_waited_for(desk):
    """Of a job that writes one file over and over it is the newest there is."""
    desk.open()
    desk.guard.start()
    with Overwriter(desk) as job:
        assert len(job.run_until(told=1)) == 1
        until = time.monotonic() + 60
        while not any(e.state == "copied" for e in desk.guard._register.entries):
            assert time.monotonic() < until
            time.sleep(0.005)
    desk.verify_now(above=0, before=10_000)

    news = [(e.data["step"], e.data["ok"]) for e in desk.guard.poll() if e.data]
    assert news and news[-1] == (max(step for step, _ in news), True)
    assert not any(e.state == "copied" for e in desk.guard._register.entries)


def niceness(pid):
    return {os.getpriority(os.PRIO_PROCESS, t.id) for t in psutil.Process(pid).threads()}


def test_what_is_still_verified_when_the_job_starts_again_yields(desk):
    """It began at the priority of the job, with all cores to itself."""
    desk.open(share=1.0)
    desk.write("b.pt", "good b", step=4)
    desk.write("a.pt", "hang", step=9)
    others = psutil.Process().children()  # other tests' servers
    desk.guard.verify_now()
    until = time.monotonic() + 60
    while not (begun := desk.python.with_name("hanging")).exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert begun.exists()
    (verifier,) = (each for each in psutil.Process().children() if each not in others)
    (thread,) = (t for t in threading.enumerate() if t.name == "hurry")
    assert niceness(verifier.pid) == {os.getpriority(os.PRIO_PROCESS, 0)}

    desk.guard.lower_priority()

    assert niceness(verifier.pid) == {19}
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == 19
    assert not desk.guard.is_verifying_now
    verifier.kill()
    thread.join(60)
    assert desk.states("found") == ["ckpt-1", "ckpt-2"]  # no other was begun


def seek(desk, before):
    desk.guard.seek(before)
    while desk.guard.seeking:
        time.sleep(0.01)
    return [(e.data["id"], e.data["ok"]) for e in desk.guard.poll() if e.data]


def test_while_an_incident_waits_the_newest_that_can_serve_comes_first(desk):
    """The job trains on: what is of the trouble is left, and one that is good is enough."""
    for number in range(1, 6):
        desk.write(f"{number}.pt", "bad" if number == 3 else f"good {number}", step=number * 10)
    desk.guard.look()

    assert seek(desk, before=35) == [("ckpt-3", False), ("ckpt-2", True)]
    assert not desk.guard.is_verifying_now, "the silence of a job that trains still means something"
    assert ("ckpt-5", 50, True) in desk.turn(), "after that it goes on as before"


def test_what_is_verified_at_low_priority_is_begun_again(desk):
    """On busy cores it would take minutes: nobody waits for it."""
    desk.write("a.pt", "good 1", step=9)
    desk.write("b.pt", "hang", step=50)
    desk.guard.look()
    hanging = desk.python.parent / "hanging"
    for verdicts in ([("ckpt-1", True)], []):
        verifying = threading.Thread(target=desk.guard.work)
        verifying.start()
        while not hanging.exists():
            time.sleep(0.01)
        hanging.unlink()

        assert seek(desk, before=20) == verdicts
        verifying.join()
        assert desk.entry("ckpt-2")["state"] == "found", "it has no verdict: it is looked at again"
