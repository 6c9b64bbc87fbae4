"""Whether a host is fit: only what is certain prevents a start, the rest is told to people."""

from __future__ import annotations

import pytest

from supervise.core import (
    HEALTH_KIND,
    Device,
    Finding,
    health_summary,
    judge_devices,
    judge_disk,
    judge_matmul,
    judge_memory,
)
from supervise.core.model import Exited, FailureClass, Finished, Notice

from .conftest import crashing, messages, relaunched

GB = 1e9
CLASSES = (FailureClass("gpu-hardware", "a fault", match=["ECC error"]),)


@pytest.mark.parametrize(
    ("available", "peak", "wanted", "verdict"),
    [
        (31 * GB, 60 * GB, None, "good"),
        (29 * GB, 60 * GB, None, "bad"),
        (29 * GB, 60 * GB, 20 * GB, "good"),
        (61 * GB, None, 64 * GB, "bad"),
        (1 * GB, None, None, "skipped"),
        (None, 60 * GB, 64 * GB, "undecided"),
    ],
)
def test_memory_is_compared_with_what_the_job_had(available, peak, wanted, verdict):
    """Half of it, since a leak may have made it large; or with what the policy names."""
    assert judge_memory(available, peak, wanted).verdict == verdict


@pytest.mark.parametrize(
    ("free", "total", "wanted", "verdict"),
    [
        (3 * GB, 90 * GB, None, "good"),
        (1 * GB, 90 * GB, None, "bad"),
        (3 * GB, 90 * GB, 5 * GB, "bad"),
        (1 * GB, 90 * GB, 0.0, "good"),
        (0.0, 0.0, None, "undecided"),
        (None, 0.0, None, "undecided"),
    ],
)
def test_the_next_checkpoint_has_to_fit_on_the_disk(free, total, wanted, verdict):
    """Some file systems of object stores report 0 of 0."""
    assert judge_disk("/out", free, total, 2 * GB, wanted).verdict == verdict


def device(number=0, **facts):
    return Device(device=f"device {number}", name="H100", **facts)


@pytest.mark.parametrize(
    ("devices", "before", "some", "verdict", "text"),
    [
        ([], None, False, "skipped", "no NVIDIA device"),
        ([device(0), device(1)], 2, False, "good", "2 without a fault"),
        ([device(0)], 2, False, "bad", "1 devices, of 2 when the run began"),
        ([device(0)], 2, True, "undecided", "1 devices, of 2 when the run began"),
        ([device(3, lost="it does not answer")], 1, False, "bad", "device 3 (H100): it does not"),
        ([device(remap_failed=True)], 1, False, "bad", "more rows of its memory are faulty"),
        ([device(remap_pending=True)], 1, False, "undecided", "remapped at the next reset"),
        ([device(ecc_errors=4)], 1, False, "undecided", "4 uncorrected memory errors"),
        (None, 2, False, "undecided", "no answer"),
    ],
)
def test_what_the_driver_says(devices, before, some, verdict, text):
    found = judge_devices(devices, before, some=some, trouble="no answer within 30 s")
    assert found.verdict == verdict and text in found.text


def multiplied(number=0, **other):
    row = {"device": f"cuda:{number}", "name": "H100", "free": 79e9, "total": 80e9}
    row |= {"products": 900, "wrong": 0, "no_memory": False, "in_use": False, "error": ""}
    return Device(**row | other)


@pytest.mark.parametrize(
    ("devices", "verdict", "text"),
    [
        ([multiplied(0), multiplied(1)], "good", "1800 products on 2 devices are right, in 5 s"),
        ([multiplied(wrong=2)], "bad", "cuda:0 (H100): 2 of 900 products are wrong"),
        ([multiplied(0), multiplied(1, wrong=900)], "bad", "cuda:1 (H100): 900 of 900"),
        ([multiplied(0, wrong=900), multiplied(1, wrong=900)], "undecided", "900 of 900"),
        ([multiplied(products=0, error="CUDA error: ECC error")], "bad", "ECC error"),
        ([multiplied(products=0, error="no kernel image")], "undecided", "no kernel image"),
        ([multiplied(products=0, in_use=True, free=1e9)], "undecided", "79.0 of 80.0 GB are in"),
        ([multiplied(products=0, no_memory=True, free=0)], "bad", "80.0 of 80.0 GB are in use"),
    ],
)
def test_products_that_are_known(devices, verdict, text):
    """Where no device has a right one, the arithmetic may be another and no device broken."""
    found = judge_matmul(devices, CLASSES, 5.0)
    assert found.verdict == verdict and text in found.text


def looked(story, *found):
    checks = [Finding(check, verdict, "no answer") for check, verdict in found]
    text, data = health_summary(checks)
    story.send(Notice(story.at_ns, HEALTH_KIND, text, data=data))


def test_a_host_that_is_not_fit_is_in_the_message_of_the_end(tell):
    """One message, with what is wrong and what to do; the failure that ended the job is in it."""
    story = crashing(tell, answer=lambda key: None if "relaunch" in key else Finished(0, key, True))
    story.send(Exited(story.at_ns, -9))
    before = len(messages(story))
    looked(story, ("devices", "bad"), ("matmul", "undecided"))
    error = f"this host is not fit to start the job on: {'devices: no answer'}"
    story.send(Finished(story.at_ns, story.actions()[-1], False, {}, error))

    assert story.state.job.over
    (message,) = messages(story)[before:]
    assert message["severity"] == "SEV1" and "signal 9 (SIGKILL) at step 49" in message["title"]
    assert f"not restarted: the relaunch failed: {error}" in message["verdict"]
    assert message["next"].startswith("repair or free what is named, or start the job on another")


def test_a_doubt_prevents_no_start_and_is_told_once(tell):
    story = crashing(tell)
    for times in (1, 2):
        story.send(Exited(story.at_ns, -9))
        looked(story, ("memory", "good"), ("matmul", "undecided"))
        relaunched(story, 40)
        story.frames(2.0, times=40 * times)

    told = [m for m in messages(story) if "could not be checked in full" in m["title"]]
    assert [(m["severity"], m["verdict"]) for m in told] == [
        ("SEV2", "the job is started all the same")
    ]
    assert told[0]["title"].endswith("in full: matmul: no answer")
    assert not story.state.job.over
