"""Standing at a fence is no cost of ours; a rank whose commands are off says so."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from supervise.runtime import Segment
from supervise_probe.ipc import fences
from supervise_probe.ipc.commands import Commands
from supervise_probe.ipc.segment import Mailbox, Writer
from supervise_probe.runtime import WINDOW, Guard

WAIT_S = 0.1


class Reporter:
    held = False

    def __init__(self, writer):
        self.writer = writer

    def beat(self, phase):
        pass

    def status_changed(self):
        pass


@pytest.fixture
def rank(tmp_path):
    """The commands of one of two ranks, its guard, and the supervisor's end of its mailbox."""
    writer = Writer.create(str(tmp_path), "run-7", 0, 4, slots=8, capacity=4)
    position = SimpleNamespace(rank=0, world_size=2, step=0, attempt=0, held_ns=0)
    off = []
    context = SimpleNamespace(
        torch=SimpleNamespace(distributed=None),
        guard=Guard(lambda part, reason: off.append((part.name, reason))),
        position=position,
        reporter=Reporter(writer),
        config=SimpleNamespace(lease_s=60.0, shm=str(tmp_path)),
    )
    commands = Commands(context, Mailbox(writer), None, None, list, str)
    segment = Segment.open(writer.path, lambda: 77)
    yield SimpleNamespace(
        commands=commands,
        guard=context.guard,
        position=position,
        segment=segment,
        folder=str(tmp_path),
        off=off,
    )
    segment.close()
    writer.close()


def order_fence(rank, name, ahead=0):
    """Ask for a promise to stand behind the step under way, or so many steps later."""
    args = {"id": name, "step": rank.position.step + ahead, "wait_s": 30.0}
    args |= {"key": name, "verb": "pause", "args": {}}
    rank.segment.send(f"{name}/0", "fence", args)


def make_step(rank, *, fence=""):
    """Make a step of 1 us; at its end stand at a fence that the other rank reaches later."""
    if fence:
        order_fence(rank, fence)
    rank.position.step += 1
    rank.commands.fetch()
    path = fences.verdict_path(rank.folder, fence)
    decide = (path, fences.ABORT, "rank 1 is late", rank.position.step)
    other = threading.Timer(WAIT_S, fences.decide_fence, decide)
    if fence:
        other.start()
    rank.commands.run()
    if fence:
        other.join()
    rank.guard.judge_costs(1000)
    rank.guard.finish_step_timing()


def test_waiting_at_fences_does_not_switch_commands_off(rank):
    """Each in a step whose pieces are weighed: half of these decides on the whole window."""
    weighed = [9, 25, 41, 57]  # of the 61 of a window

    for number in range(WINDOW):
        make_step(rank, fence=f"f{number}" if number in weighed else "")

    assert rank.off == [] and rank.guard.part("commands").on


@pytest.mark.parametrize("decision", [fences.ABORT, fences.COMMIT, None])
def test_a_promise_binds_until_its_fence_is_aborted(rank, decision):
    """Else the next fence is refused for as long as a step takes, for one that nobody waits at."""
    order_fence(rank, "f", ahead=4)
    make_step(rank)
    if decision is not None:
        fences.decide_fence(fences.verdict_path(rank.folder, "f"), decision, "", 4)
    order_fence(rank, "g", ahead=4)
    make_step(rank)

    rank.segment.poll()
    promised, later = rank.segment.acks()
    assert promised.ok and later.ok is (decision == fences.ABORT)
    assert later.result.get("busy", False) is not later.ok


def test_a_rank_that_begins_another_training_aborts_the_fence_that_it_promised(rank):
    """Nobody of the new one knows of it: the others would do it alone."""
    order_fence(rank, "f", ahead=4)
    make_step(rank)

    rank.commands.close()

    verdict = fences.read_verdict(fences.verdict_path(rank.folder, "f"))
    assert verdict.decision == fences.ABORT and "left its training before step 4" in verdict.why


def test_a_rank_that_leaves_a_fence_that_was_decided_says_that_it_did_not_act(rank):
    """Whatever the guard thinks of its price: the others act."""
    order_fence(rank, "f", ahead=4)
    make_step(rank)
    fences.decide_fence(fences.verdict_path(rank.folder, "f"), fences.COMMIT, "", 4)
    rank.guard.part("commands").on = False

    rank.commands.close()

    rank.segment.poll()
    answer = rank.segment.acks()[-1]
    assert not answer.ok and "left its training before step 4" in answer.error


def test_a_rank_whose_commands_are_off_says_so(rank):
    """Else its silence is taken for that of a rank that hangs, and has no reason."""
    rank.guard.switch_off(rank.guard.part("commands"), "cost 9.00 ms a step, 1.00 ms are allowed")
    order_fence(rank, "f")
    rank.position.step += 1
    rank.commands.fetch()

    rank.commands.run()

    rank.segment.poll()
    (ack,) = rank.segment.acks()
    assert not ack.ok and ack.result["refused"]
    assert ack.error == (
        "commands are off in this process: cost 9.00 ms a step, 1.00 ms are allowed"
    )
