"""Which signals wait for a checkpoint, until when, and what people are notified of."""

from __future__ import annotations

import pytest

from supervise.core.model import Exited, JobSettings, Notice, Preempt, Preemption, Settled

from .conftest import crashing, messages

SIGINT, SIGTERM, SIGUSR1, SIGUSR2 = "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"
NOW, GRACE = 100.0, 20.0


@pytest.fixture
def offered():
    """A preemption that holds signals for up to `GRACE` seconds, offered until NOW + 4."""
    made = Preemption()
    made.offer(GRACE, NOW + 4)
    return made


def test_a_signal_waits_for_the_checkpoint_and_is_then_passed_on(offered):
    assert offered.on_signal(SIGTERM, NOW, handled=False) == []
    assert offered.expire(NOW + GRACE - 0.01) == []
    assert offered.settle(NOW + 3) == [SIGTERM]

    assert list(offered.settled) == [Settled("SIGTERM", "", 3.0, ("SIGTERM",))]
    assert offered.on_signal(SIGUSR1, NOW + 3.1, handled=False) == [SIGUSR1]  # it had its turn


def test_no_signal_waits_longer_than_its_grace(offered):
    """Also one that joins late, behind a request that may wait for longer."""
    assert offered.ask("walltime", NOW, NOW + 120)
    assert offered.on_signal(SIGTERM, NOW + 5, handled=False) == []
    assert offered.on_signal(SIGUSR2, NOW + 10, handled=False) == []
    assert offered.request.deadline_s == NOW + 5 + GRACE
    assert offered.expire(NOW + 5 + GRACE) == [SIGTERM, SIGUSR2]

    (settled,) = offered.settled
    assert (settled.cause, settled.refusal) == ("walltime", "it was not written within 25 s")


def test_the_same_signal_again_goes_through_at_once(offered):
    assert offered.on_signal(SIGUSR1, NOW, handled=False) == []
    assert offered.on_signal(SIGTERM, NOW + 1, handled=False) == []
    assert offered.on_signal(SIGTERM, NOW + 2, handled=False) == [SIGUSR1, SIGTERM, SIGTERM]
    assert offered.settled[0].refusal == "a second SIGTERM came"


def test_a_signal_that_comes_on_two_ways_is_one(offered):
    """Slurm signals every process of a step, and `srun` passes on what it got."""
    assert not offered.is_echo(SIGTERM, NOW)
    assert offered.on_signal(SIGTERM, NOW, handled=False) == []
    assert offered.is_echo(SIGTERM, NOW + 0.9) and not offered.is_echo(SIGUSR1, NOW + 0.1)
    assert not offered.is_echo(SIGTERM, NOW + 1.0)
    assert offered.settle(NOW + 1.1) == [SIGTERM]
    assert not offered.is_echo(SIGTERM, NOW + 1.2)


def test_what_never_waits(offered):
    """Signals that the job handles, those of a terminal, and all without a fresh offer."""
    assert offered.on_signal(SIGTERM, NOW, handled=True) == [SIGTERM]
    assert offered.on_signal(SIGINT, NOW, handled=False) == [SIGINT]
    assert offered.on_signal(SIGTERM, NOW + 4.1, handled=False) == [SIGTERM]  # the loop hangs
    offered.withdraw()
    assert offered.on_signal(SIGTERM, NOW, handled=False) == [SIGTERM]
    assert Preemption().on_signal(SIGTERM, NOW, handled=False) == [SIGTERM]


def test_a_request_without_a_signal_may_be_repeated_until_one_is_answered(offered):
    assert offered.ask("drain", NOW, NOW + 10)
    assert not offered.ask("walltime", NOW + 1, NOW + 10)
    assert offered.settle(NOW + 2, "the newest step was not finite") == []
    assert offered.ask("walltime", NOW + 3, NOW + 10)
    assert offered.settle(NOW + 4) == []
    assert not offered.ask("drain", NOW + 5, NOW + 10)


def test_the_next_process_gets_what_waited(offered):
    offered.on_signal(SIGTERM, NOW, handled=False)
    assert offered.restart(NOW + 1) == [SIGTERM]
    assert offered.on_signal(SIGTERM, NOW + 1, handled=False) == [SIGTERM]  # not offered yet
    offered.offer(GRACE, NOW + 10)
    assert offered.on_signal(SIGTERM, NOW + 2, handled=False) == []


def test_the_terms_of_a_policy():
    terms = Preempt(grace_s=5.0, margin_s=60.0)

    assert JobSettings().preemption is None
    assert JobSettings(preempt="checkpoint").preemption == Preempt(20.0, 120.0)
    assert JobSettings(preempt=terms).preemption is terms


@pytest.mark.parametrize(
    ("phase", "severity", "title"),
    [
        ("saved", "INFO", "ended at step 49 after SIGTERM, with a checkpoint"),
        ("failed", "INFO", "ended at step 49 after SIGTERM, without a checkpoint"),
        ("requested", "SEV1", "the job ended with signal 12 (SIGUSR2) at step 49"),
    ],
)
def test_people_are_notified_once_of_what_is_lost(tell, phase, severity, title):
    """At the moment; the end itself, which was asked for, is then no news. Nothing restarts it."""
    story = crashing(tell)
    held = {"signal": "SIGTERM", "final": True, "held": True}
    story.send(Notice(story.at_ns, "signal", "SIGTERM waits", data=held))
    assert story.state.job.held_signals == ("SIGTERM",)
    before = len(messages(story))
    data = {"phase": phase, "cause": "SIGTERM", "signals": ["SIGTERM"], "path": "out/c.pt"}
    story.send(Notice(story.at_ns, "preempt", "SIGTERM: a checkpoint", data=data))
    at_once = [each["severity"] for each in messages(story)[before:]]
    assert story.state.job.held_signals == (("SIGTERM",) if phase == "requested" else ())
    story.send(Exited(story.at_ns, -12))

    assert at_once == {"saved": ["SEV2"], "failed": ["SEV1"], "requested": []}[phase]
    assert story.state.job.over and story.actions() == []
    assert (messages(story)[-1]["severity"], messages(story)[-1]["title"]) == (severity, title)
