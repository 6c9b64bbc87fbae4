"""Quarantine through the job: disk first, then every rank, once for a key."""

import pytest

from supervise.errors import ActionError
from supervise.store import Quarantine
from tests.support.waiting import wait_until

from .conftest import FakeRank

ADD = {"add": [{"kind": "shard", "name": "a.tar"}], "attempt": 2, "incident": "inc-1"}


@pytest.fixture
def held(tmp_path):
    return Quarantine(tmp_path / "quarantine.json")


@pytest.fixture
def keeping(controlled, held):
    """A function that makes a control with a manifest over a rank with this answer."""

    def make(answer):
        control = controlled(FakeRank(answer={"quarantine": answer}), held=held)
        wait_until(lambda: control.world_size)
        return control

    return make


def test_the_file_is_there_before_a_rank_hears_of_it(keeping, held):
    """One rank: it takes effect now. The same key again writes nothing and is asked again."""
    seen = []
    control = keeping(lambda args: seen.append((held.read(), args)) or {"held": args["generation"]})
    first, again = (control.quarantine(ADD, key="k", deadline_s=10) for _ in range(2))

    assert first == again and first["generation"] == first["held"] == 1 and first["ranks"] == 1
    assert first["takes_effect"] == "now" and first["entries"] == 1
    file, args = seen[0]
    assert file.generation == 1 and file.entries[0].from_attempt == 0
    assert args["path"] == str(held.path) and held.read().generation == 1


def test_ranks_that_ask_take_it_up_and_let_it_go_at_one_step(gang, held):
    """The file says so once they have; repeated under its key, nothing changes."""
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
    assert [line.split(maxsplit=1)[1] for line in first] == [
        "quarantined True",
        "quarantined False",
    ]


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
