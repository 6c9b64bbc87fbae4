"""Every rank at one step, or none: real probes without torch, each in a process of its own."""

import os
import signal
import time

import pytest

from supervise.core.model import Payload
from supervise.errors import ActionError
from supervise.runtime import Answer, Standing, agree_on_step, common_step, find_step_mismatch
from supervise.store import Quarantine
from supervise_probe.ipc import fences
from tests.support.waiting import wait_until

from .conftest import FakeRank


def test_all_ranks_do_it_at_one_step_and_once(gang):
    ranks = gang(world=3)

    seen = [ranks.scale(value, key=str(value)) for value in (0.5, 0.25)]
    again = ranks.scale(0.25, key="0.25")

    expected = [f"{one['ack_step']} lr_scale {one['lr_scale']}" for one in seen]
    assert ranks.done() == [expected] * 3
    assert [one["ranks"] for one in seen] == [3, 3] and again["ack_step"] == seen[1]["ack_step"]
    assert ranks.verdicts() == ["commit"] * 2


def test_evidence_is_of_one_step_on_all_ranks_that_train_and_waits_for_none(gang):
    """Without a promise: at that step by itself, or at once where it stands in a pause."""
    ranks = gang(world=3)
    where = Payload({"directory": str(ranks.shm)})

    asked = [ranks.control.send_command("snapshot", where, key=key, partly=True) for key in "ab"]
    steps = [{ack.step for ack in each.wait(10.0).values()} for each in asked]
    ranks.control.command("pause", {"lease_s": 30.0}, key="p", deadline_s=20.0)
    paused = ranks.control.send_command("snapshot", where, key="c", partly=True).wait(10.0)

    assert [len(each) for each in steps] == [1, 1] and len(paused) == 3
    assert {ack.step for ack in paused.values()} == set(ranks.steps().values())


def test_a_pause_holds_all_at_one_step_and_what_comes_meanwhile_is_fenced_there(gang):
    ranks = gang()

    paused = ranks.control.command("pause", {"lease_s": 30.0}, key="p", deadline_s=20.0)
    changed = ranks.scale()
    time.sleep(0.8)  # twice as long as its first lease
    steps = ranks.steps()
    ranks.control.command("resume", {}, key="r", deadline_s=20.0)

    assert set(steps.values()) == {paused["paused_step"]}
    assert changed["ack_step"] == paused["paused_step"]
    wait_until(lambda: min(ranks.steps().values()) > paused["paused_step"] + 5)


def test_ranks_that_count_their_steps_otherwise_are_not_changed(gang):
    ranks = gang(rank1=("astray", 4))

    with pytest.raises(ActionError, match="they do not mean the same step") as refused:
        ranks.scale()

    assert refused.value.refused and ranks.done() == [[], []]
    assert "they do not mean the same step" in refused.value.unfenceable
    assert set(ranks.verdicts()) == {"abort"}


@pytest.mark.slow
def test_a_rank_that_does_not_promise_is_named_and_blocks_nobody(gang):
    """One after the other is late, evaluates, and is stopped when the command has just come."""
    ranks = gang(world=4, rank1=("sleeps", 1), rank2=("evaluates", 2), rank3=("stops", 3))
    late = r"rank (\d, )*1(, \d)* did not promise"  # on a busy machine others may be late as well
    reasons = (late, "rank 2 is in eval", "rank 3 is stopped by a signal")

    for number, reason in enumerate(reasons):
        began, before = time.monotonic(), min(ranks.steps().values())
        with pytest.raises(ActionError, match=reason) as refused:
            ranks.scale(key=str(number), deadline_s=0.7)
        assert refused.value.refused and not refused.value.unfenceable
        assert time.monotonic() - began < 10.0
        if "stopped" in reason:
            os.kill(ranks.pids()[3], signal.SIGCONT)
        wait_until(lambda before=before: min(ranks.steps().values()) > before + 20)

    assert ranks.done() == [[]] * 4
    assert set(ranks.verdicts()) == {"abort"}
    assert ranks.scale(key="at last")["ranks"] == 4


@pytest.mark.slow
def test_a_rank_that_waits_for_those_at_the_fence_shows_that_the_job_has_none(gang):
    """It has no more data, and only takes part in the collectives of those that have."""
    ranks = gang(rank1=("shadows", 20))
    wait_until(lambda: ranks.steps()[0] > 30)
    began = time.monotonic()

    with pytest.raises(ActionError, match="rank 1 waits in a collective for what rank 0") as apart:
        ranks.scale()

    assert apart.value.refused and "rank 1 waits" in apart.value.unfenceable
    assert time.monotonic() - began < 15.0
    before = ranks.steps()[0]
    wait_until(lambda: ranks.steps()[0] > before + 20)
    assert ranks.done() == [[], []]


def test_a_rank_that_hears_of_the_fence_one_step_too_late_holds_nobody_up(gang):
    """It waits in its next step for those that stand there, and can veto only when they go on."""
    ranks = gang(rank1=("misses", 2))

    seen = ranks.scale()

    aborts = [f.read_text() for f in ranks.shm.glob("fence-*") if '"abort"' in f.read_text()]
    assert len(aborts) == 2 and not any("had no verdict" in text for text in aborts)
    assert ranks.done() == [[f"{seen['ack_step']} lr_scale 0.5"]] * 2


def test_a_fence_is_near_where_the_ranks_are_not_where_their_frames_were(gang):
    ranks = gang(rank0=("lags", 20), rank1=("lags", 20))
    wait_until(lambda: min(ranks.boundaries().values()) > 1000)

    before = max(ranks.boundaries().values())
    seen = ranks.scale()

    assert max(ranks.steps().values()) == 19
    assert before < seen["ack_step"] < before + 300


@pytest.mark.parametrize("burst_s", [0.06, 0.2])
def test_what_was_done_while_the_main_loop_judged_a_burst_counts_as_done(gang, burst_s):
    ranks = gang()
    ranks.burst_s = burst_s

    seen = [ranks.scale(1.0 / number, key=str(number)) for number in range(1, 5)]

    expected = [f"{each['ack_step']} lr_scale {each['lr_scale']}" for each in seen]
    assert ranks.done() == [expected] * 2


def test_where_ranks_cannot_agree_each_round_has_its_verdict_and_none_waits(gang):
    """The promises of ranks that stand there already are read behind the look at where they are."""
    ranks = gang()
    ranks.burst_s = 0.1
    began = time.monotonic()

    with pytest.raises(ActionError, match="no savepoint before step 5") as refused:
        ranks.control.command("rollback", Payload({"before_step": 5}), key="k", deadline_s=20.0)

    assert refused.value.refused and set(ranks.verdicts()) == {"abort"}
    assert time.monotonic() - began < 5.0


def test_who_takes_over_finds_what_was_done_after_a_wait_for_a_rank(gang):
    ranks = gang(rank1=("evaluates", 1))
    with pytest.raises(ActionError, match=r"rank 1 is in eval|the main loop is busy"):
        ranks.scale(key="before", deadline_s=0.3)

    seen = ranks.scale()
    order = {"value": 0.5, "rewarm_steps": 0}
    again = ranks.taken_over().command("lr_scale", order, key="k", deadline_s=20.0)

    assert again["ack_step"] == seen["ack_step"]
    assert ranks.done() == [[f"{seen['ack_step']} lr_scale 0.5"]] * 2


@pytest.mark.slow
def test_a_rank_that_dies_after_its_promise_leaves_no_other_behind(gang):
    ranks = gang(rank1=("dies", 60))

    with pytest.raises(ActionError, match="rank 1 has exited") as died:
        [ranks.scale(0.5, key=str(number), deadline_s=1.0) for number in range(40)]

    first, second = ranks.done()
    assert first[: len(second)] == second and len(first) - len(second) <= died.value.inconsistent


def promise(ranks, trip_s, wait_s, **args):
    order = {"id": "fence", "wait_s": wait_s, "key": "k", "verb": "lr_scale"}
    order = Payload({**order, "args": {"value": 0.5, **args}})
    asked = ranks.control.send_command("fence", order, key="k/0", trip_s=trip_s)
    assert [ack.result["step"] for ack in asked.wait(20.0).values()] == [asked.step] * 2
    return asked.step


@pytest.mark.slow
def test_without_a_supervisor_a_promise_ends_by_itself(gang):
    ranks = gang()
    step = promise(ranks, 0.15, 0.5)

    wait_until(lambda: min(ranks.steps().values()) > step + 5)
    assert ranks.verdicts() == ["abort"] and ranks.done() == [[], []]


def test_ranks_go_back_to_a_step_that_all_have_and_none_doubts():
    """Right before damaged moments were used only where each rank found the weights good."""
    first, second = (Answer(steps=steps, undo=[34]) for steps in ([10, 30, 34], [10, 34]))
    args = Payload({"before_step": 25, "sign": 35})

    assert agree_on_step("rollback", args, [first, second]) == {"to_step": 34}
    unsigned = Payload({"before_step": 25})
    assert agree_on_step("rollback", unsigned, [first, second]) == {"to_step": 10}
    assert agree_on_step("rollback", args, [first, Answer(steps=[10, 34])]) == {"to_step": 10}
    with pytest.raises(ActionError, match="no savepoint before step 5 that all ranks have"):
        agree_on_step("rollback", Payload({"before_step": 5}), [first, second])


@pytest.mark.parametrize(
    ("phases", "step_s", "step"),
    [
        ("step step", 0.01, 12),
        ("step step", 0.0005, 15),
        ("step step", 65.0, 11),  # a spare step would be a minute
        ("paused paused", 0.0, 10),
        ("step paused", 0.01, -1),
        ("step eval", 0.01, -1),
        ("step step", 0.0, -1),
    ],
)
def test_the_step_of_a_fence_is_the_next_that_all_ranks_can_hear_of(phases, step_s, step):
    ranks = {n: Standing(10 - n, phase, step_s) for n, phase in enumerate(phases.split())}
    assert common_step(ranks, 0.002) == step


def test_a_verdict_is_written_once(tmp_path):
    path = str(tmp_path / "fence-1")

    assert fences.read_verdict(path) is None
    first = fences.decide_fence(path, fences.ABORT, "rank 1 is late", 7)
    second = fences.decide_fence(path, fences.COMMIT, "", 7, {"to_step": 3})

    assert first == second == fences.read_verdict(path)
    assert [each.name for each in tmp_path.iterdir()] == ["fence-1"]


def test_a_supervisor_that_takes_over_a_pause_acts_at_once(gang):
    ranks = gang()
    paused = ranks.control.command("pause", {"lease_s": 30.0}, key="p", deadline_s=20.0)
    next_one = ranks.taken_over()

    seen = next_one.command("lr_scale", {"value": 0.5, "rewarm_steps": 0}, key="k", deadline_s=5.0)

    assert (seen["ranks"], seen["ack_step"]) == (2, paused["paused_step"])


def test_what_was_decided_is_done_however_late(gang):
    ranks = gang()
    until_ns = time.monotonic_ns() + 100_000_000
    step = promise(ranks, 0.5, 5.0, until_ns=until_ns)
    fences.decide_fence(fences.verdict_path(str(ranks.shm), "fence"), fences.COMMIT, "", step)

    wait_until(lambda: min(ranks.steps().values()) > step + 5)
    assert time.monotonic_ns() > until_ns
    assert ranks.done() == [[f"{step} lr_scale 0.5"]] * 2


def rows(numbers, starts_ns=0, first=5):
    return [(first + i, n, starts_ns + 10 * i) for i, n in enumerate(numbers)]


def test_without_a_count_of_collectives_nobody_knows_what_a_step_is():
    row = {0: rows([12, 14, 16])}
    assert find_step_mismatch({**row, 1: rows([14, 16, 18], 7, first=6)}) is None
    assert "nobody knows" in find_step_mismatch({**row, 1: []}).why
    assert find_step_mismatch({**row, 1: []}).lasting
    assert not find_step_mismatch({**row, 1: rows([30, 32], first=14)}).lasting
    assert "not mean the same step" in find_step_mismatch({**row, 1: rows([12, 15])}).why


@pytest.mark.parametrize(
    ("starts_ns", "steps", "reason", "lasting"),
    [
        (9, 16, None, False),  # the stages of a pipeline
        (11, 16, "do not wait for each other: in 15 of 15 steps", True),
        (-35, 16, "do not wait for each other", True),
        (0, 1, "too few steps", False),
    ],
)
def test_ranks_without_a_common_collective_are_judged_by_their_times(
    starts_ns, steps, reason, lasting
):
    found = find_step_mismatch({0: rows([3] * steps), 1: rows([3] * steps, starts_ns)})

    assert (found is None) == (reason is None)
    assert found is None or (reason in found.why and found.lasting == lasting)


# ── quarantine through the job: disk first, then every rank, once for a key ───────────────────────


ADD = {"add": [{"kind": "shard", "name": "a.tar"}], "attempt": 2, "incident": "inc-1"}


@pytest.fixture
def held(tmp_path):
    return Quarantine(tmp_path / "quarantine.json")


@pytest.fixture
def keeping(controlled, held):
    def make(answer):
        control = controlled(FakeRank(answer={"quarantine": answer}), held=held)
        wait_until(lambda: control.world_size)
        return control

    return make


def test_the_file_is_there_before_a_rank_hears_of_it(keeping, held):
    seen = []
    control = keeping(lambda args: seen.append((held.read(), args)) or {"held": args["generation"]})
    first, again = (control.quarantine(ADD, key="k", deadline_s=10) for _ in range(2))

    assert first == again and first["generation"] == first["held"] == 1 and first["ranks"] == 1
    assert first["takes_effect"] == "now" and first["entries"] == 1
    file, args = seen[0]
    assert file.generation == 1 and file.entries[0].from_attempt == 0
    assert args["path"] == str(held.path) and held.read().generation == 1


def test_ranks_that_ask_take_it_up_and_let_it_go_at_one_step(gang, held):
    ranks = gang(held=held, rank0=("asks", 0), rank1=("asks", 0))
    put, again = (ranks.control.quarantine(ADD, key="k", deadline_s=10) for _ in range(2))
    assert [e.from_attempt for e in held.read().entries] == [0]
    out = {"release": ["a.tar"], "attempt": 2}
    freed = ranks.control.quarantine(out, key="r", deadline_s=10)

    assert (put["ranks"], put["takes_effect"], put["generation"]) == (2, "now", 2)
    assert again == put and freed["generation"] == 4 and not held.read().entries
    wait_until(lambda: all(len(each) == 2 for each in ranks.done()))
    first, second = ranks.done()
    assert first == second
    changes = [line.split(maxsplit=1)[1] for line in first]
    assert changes == ["quarantined True", "quarantined False"]


def test_where_one_rank_cannot_leave_it_out_all_wait_for_the_next_launch(gang, held):
    ranks = gang(held=held, rank0=("asks", 0))
    seen = ranks.control.quarantine(ADD, key="k", deadline_s=10)

    assert (seen["ranks"], seen["takes_effect"]) == (2, "at the next launch")
    assert "rank 1" in seen["why"] and "does not ask is_quarantined" in seen["why"]
    assert held.read().entries[0].from_attempt == 3 and ranks.done() == [[], []]


def test_a_refusal_a_repetition_and_a_run_that_keeps_none_are_errors(keeping, controlled):
    control = keeping(lambda args: "on the accelerator")
    with pytest.raises(ActionError, match="rank 0 refused quarantine: on the accelerator"):
        control.quarantine(ADD, key="k1", deadline_s=10)
    with pytest.raises(ActionError, match=r"a\.tar is in it already"):
        control.quarantine(ADD, key="k2", deadline_s=10)
    with pytest.raises(ActionError, match="keeps no quarantine"):
        controlled(FakeRank()).quarantine(ADD, key="k3", deadline_s=10)
