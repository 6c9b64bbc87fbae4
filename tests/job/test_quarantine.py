"""Quarantine through the job: disk first, then every rank, once for a key."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from supervise.errors import ActionError
from supervise.runtime import Control, Segments
from supervise.store import Quarantine
from tests.support.waiting import wait_until

RANK = str(Path(__file__).parents[1] / "support" / "fenced_rank.py")
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
    assert seen[0].generation == 1 and seen[0].entries[0].from_attempt == 0
    assert rank.letters[0][2]["path"] == str(held.path) and held.read().generation == 1


@pytest.fixture
def gang(start, fake_segments, looping, tmp_path):
    """Return a control over two real ranks, their logs, and the manifest."""

    def make(*asking):
        for name in ("shm", "probe"):
            (tmp_path / name).mkdir()
        faults = json.dumps({str(rank): ("asks", 0) for rank in asking})
        process = start(sys.executable, RANK, str(tmp_path), "2", "0.002", faults)
        segments = Segments(tmp_path / "shm", tmp_path / "probe", time.monotonic_ns)
        held = Quarantine(tmp_path / "quarantine.json")
        control = Control(process, segments, None, None, held)
        pump = control.pump

        def poll_and_pump(now_ns, **how):
            segments.poll()
            pump(now_ns, **how)

        control.pump = poll_and_pump
        looping(control, process)
        wait_until(lambda: len(segments.ranks) == 2)
        wait_until(lambda: min(rank.step for rank in segments.ranks.values()) > 5)
        logs = [tmp_path / f"log.{rank}" for rank in range(2)]
        return control, held, lambda: [log.read_text().splitlines() for log in logs]

    return make


def test_ranks_that_ask_take_it_up_and_let_it_go_at_one_step(gang):
    """The file says so once they have; repeated under its key, nothing changes."""
    control, held, done = gang(0, 1)
    put = control.quarantine(ADD, key="k", deadline_s=10)
    again = control.quarantine(ADD, key="k", deadline_s=10)
    assert [e.from_attempt for e in held.read().entries] == [0]
    out = {"release": ["a.tar"], "attempt": 2}
    freed = control.quarantine(out, key="r", deadline_s=10)

    assert (put["ranks"], put["takes_effect"], put["generation"]) == (2, "now", 2)
    assert again == put and freed["generation"] == 4 and not held.read().entries
    wait_until(lambda: all(len(each) == 2 for each in done()))
    first, second = done()
    assert first == second and [line.split()[1:] for line in first] == [
        ["quarantined", "True"],
        ["quarantined", "False"],
    ]


def test_where_one_rank_cannot_leave_it_out_all_wait_for_the_next_launch(gang):
    control, held, done = gang(0)
    seen = control.quarantine(ADD, key="k", deadline_s=10)

    assert (seen["ranks"], seen["takes_effect"]) == (2, "at the next launch")
    assert "rank 1" in seen["why"] and "does not ask is_quarantined" in seen["why"]
    assert held.read().entries[0].from_attempt == 3 and done() == [[], []]


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
