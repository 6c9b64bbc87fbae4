"""Quarantine through the job: disk first, then every rank, once for a key."""

from __future__ import annotations

import pytest

from supervise.errors import ActionError
from supervise.job.controller import Control
from supervise.store.quarantine_list import Quarantine
from tests.support.waiting import wait_until

ADD = {"add": [{"kind": "shard", "name": "a.tar"}], "attempt": 2, "incident": "inc-1"}


@pytest.fixture
def build(start, fake_segments, looping, tmp_path):
    """A control with a manifest, over the given ranks."""

    def make(*ranks, manifest=True):
        held = Quarantine(tmp_path / "quarantine.json") if manifest else None
        process = start("sleep", "60")
        segments = fake_segments({rank.rank: rank for rank in ranks})
        control = Control(process, segments, None, None, held)
        looping(control, process)
        wait_until(lambda: control.world_size == len(ranks))
        return control, Quarantine(tmp_path / "quarantine.json")

    return make


def takes(args):
    """A probe that read the file."""
    return {"held": args["generation"], "shards": 1}


def test_the_file_is_there_before_a_rank_hears_of_it(build, fake_rank):
    """One rank: it takes effect now. The same key again writes nothing and is asked again."""
    seen = []
    rank = fake_rank(answer={"quarantine": lambda a: seen.append(held.read()) or takes(a)})
    control, held = build(rank)
    first = control.quarantine(ADD, key="k", deadline_s=10)
    again = control.quarantine(ADD, key="k", deadline_s=10)

    assert first == again and first["generation"] == first["held"] == 1 and first["ranks"] == 1
    assert first["takes_effect"] == "now" and first["entries"] == 1
    assert seen[0]["generation"] == 1 and seen[0]["entries"][0]["from_attempt"] == 0
    assert rank.letters[0][2]["path"] == str(held.path) and held.read()["generation"] == 1


def test_several_ranks_wait_for_the_next_launch(build, fake_rank):
    """All of them answer; attempts after this one are the next launch."""
    control, held = build(*(fake_rank(n, 2, answer={"quarantine": takes}) for n in (0, 1)))
    seen = control.quarantine(ADD, key="k", deadline_s=10)

    assert (seen["ranks"], seen["takes_effect"]) == (2, "at the next launch")
    assert held.read()["entries"][0]["from_attempt"] == 3


def test_what_cannot_be_is_said(build, fake_rank):
    """Nothing to add; a rank that refuses; a run that keeps none."""
    control, _ = build(fake_rank(answer={"quarantine": lambda args: "on the accelerator"}))
    with pytest.raises(ActionError, match="rank 0 refused quarantine: on the accelerator"):
        control.quarantine(ADD, key="k1", deadline_s=10)
    with pytest.raises(ActionError, match=r"a\.tar is in it already"):
        control.quarantine(ADD, key="k2", deadline_s=10)
    control, _ = build(fake_rank(), manifest=False)
    with pytest.raises(ActionError, match="keeps no quarantine"):
        control.quarantine(ADD, key="k3", deadline_s=10)
