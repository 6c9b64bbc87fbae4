"""Orders of checkpoints, and their outcomes: a probe in memory, no process."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from supervise.core.model import JobSettings, Notice, OperatorCommand, Payload
from supervise.runtime import PendingCommand, Preemptor, RankView, SignalForwarder

PATH = "out/ckpt.supervise-8.pt"


class FakeJob:
    def __init__(self):
        self.paused, self.status, self.asked = False, {}, []

    def ranks(self):
        return {0: RankView(1, document=Payload(self.status))}

    def send_command(self, verb, args, *, key, partly=False):
        assert verb == "checkpoint" and args["until_ns"] > 0
        self.asked.append(PendingCommand(verb, key, threading.Condition()))
        return self.asked[-1]

    def stop_waiting(self, asked):
        assert asked in self.asked

    def answer(self, result=None, error=None):
        ack = SimpleNamespace(ok=error is None, result=result or {}, error=error)
        self.asked[-1].answers[0] = ack


class FakeProcessor:
    def __init__(self):
        self.policy = SimpleNamespace(mode="enforce", job=JobSettings(preempt="checkpoint"))
        self.state = SimpleNamespace(job=SimpleNamespace(world_size=1, held_signals=()))
        self.performing, self.events = "", []

    def process(self, event):
        self.events.append(event)

    def phases(self):
        return [event.data["phase"] for event in self.events if isinstance(event, Notice)]


@pytest.fixture
def run(tmp_path):
    """A preemptor with its fakes, in the last seconds of an allocation if `end` says so."""

    def make(end=""):
        processor, forwarder, job = FakeProcessor(), SignalForwarder(), FakeJob()
        forwarder.allow_holding()
        clock = SimpleNamespace(now_s=1000.0)
        allocation = {"SLURM_JOB_END_TIME": end}
        made = Preemptor(forwarder, processor, tmp_path, allocation, lambda: clock.now_s)

        def go():
            made.run_every_second(job)
            made.run_round(job, ended=False)

        return SimpleNamespace(
            made=made, job=job, processor=processor, forwarder=forwarder, clock=clock, go=go
        )

    return make


def report_saved(it, **data):
    it.made.observe(Notice(0, "checkpoint-saved", "", data=data))


def test_walltime_orders_a_checkpoint_and_then_stops_the_job(run):
    it = run(end="2000")
    it.go()
    assert it.job.asked == []
    it.clock.now_s = 1881.0
    it.go()
    it.job.answer({"path": PATH, "step": 8})
    report_saved(it, path="out/other.pt", step=7)
    it.go()
    assert it.processor.phases() == ["requested"]
    report_saved(it, path=PATH, step=8, how="on-demand")
    it.go()

    assert it.processor.phases() == ["requested", "saved"]
    stop = it.processor.events[-1]
    assert isinstance(stop, OperatorCommand)
    assert (stop.operator, stop.command, stop.args["requeue"]) == ("walltime", "stop", True)
    it.go()
    assert len(it.job.asked) == 1


def test_a_drain_file_from_before_the_start_means_nothing(run, tmp_path):
    """One that is written later does; what is refused is tried again, and ends nothing."""
    (tmp_path / "drain").touch()
    os.utime(tmp_path / "drain", (10, 10))
    it = run()
    it.go()
    assert it.job.asked == []
    (tmp_path / "drain").touch()
    it.go()
    it.job.answer(error="the newest step was not finite")
    it.go()

    assert it.processor.phases() == ["requested"]
    assert it.forwarder.request is not None
    it.forwarder.settle_request("it was not written within 120 s")
    it.go()
    assert it.processor.phases() == ["requested", "failed"]
    assert it.processor.events[-1].data["why"] == "the newest step was not finite"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda it: setattr(it.processor.policy, "mode", "observe"), "mode observe changes"),
        (lambda it: setattr(it.processor.state.job, "world_size", 2), "2 ranks would have to save"),
        (lambda it: setattr(it.processor, "performing", "relaunch"), "a relaunch is in progress"),
        (lambda it: setattr(it.job, "paused", True), "the job is paused"),
        (
            lambda it: it.job.status.update(unavailable={"checkpoint": "not saved yet"}),
            "not saved yet",
        ),
    ],
)
def test_where_no_checkpoint_can_be_made_the_signal_is_not_held_and_people_know(run, change, why):
    """A lasting reason is reported once at the start: the job handles the signals itself."""
    it = run()
    change(it)
    it.go()
    it.go()
    lasting = ["unavailable"] if "ranks" in why or "mode" in why else []
    assert it.processor.phases() == lasting
    assert not lasting or why in it.processor.events[0].message
    data = {"signal": "SIGTERM", "final": True, "killed": False, "handled": False}
    for handled in (False, True):
        data["handled"] = handled
        it.made.observe(Notice(0, "signal", "SIGTERM was passed on", data=data))

    assert it.processor.phases() == [*lasting, "failed"]
    assert it.processor.events[-1].data["why"].startswith(why)


def test_what_a_dead_supervisor_held_is_passed_on(run):
    it, passed = run(), []
    it.processor.state.job.held_signals = ("SIGUSR1", "SIGTERM")
    it.made.adopt(SimpleNamespace(signal=passed.append))

    assert passed == [signal.SIGUSR1, signal.SIGTERM]
    assert it.processor.phases() == ["failed"]
