"""Which shards the steps before an incident had their data from, in its bundle and its story."""

import json
from types import SimpleNamespace

import msgspec
import pytest

from supervise.core.model import NOTHING, Frame, Payload
from supervise.report import Action, outcome_text
from supervise.runtime import Evidence, RankView, trace_origins

STEPS = range(90, 104)
NAMES = ("train_loss_raw", "batch_shard", "batch_offset", "batch_fingerprint")


def shard(step, rank=0):
    return f"web-{rank}-{step // 4}.tar"


def batches(rank=0, attempt=0):
    """The newest batches as a probe writes them; one step in the middle has two shards."""
    tape = [
        {
            "step": step,
            "attempt": attempt,
            "fingerprint": 7.0 * step,
            "shards": [{"shard": shard(step, rank), "offset": step % 4}],
        }
        for step in STEPS
    ]
    tape[8]["shards"].append({"shard": "extra.tar", "offset": None})
    return tape


def window(rank=0):
    return [
        (NAMES, Frame(1000 + step, rank, 0, step, (2.5, step // 4, step % 4, 7.0 * step)))
        for step in STEPS
    ]


def test_the_five_steps_before_the_breach_and_it():
    found = trace_origins({0: batches()}, {}, (), 100)
    assert [row["step"] for row in found["steps"]] == [95, 96, 97, 98, 99, 100]
    assert found["breach_step"] == 100
    assert list(found["shards"].items()) == [
        ("web-0-25.tar", "step 100"),
        ("web-0-24.tar", "steps 96 to 99"),
        ("extra.tar", "step 98"),
        ("web-0-23.tar", "step 95"),
    ]
    assert found["steps"][0] == {"rank": 0, **batches()[5]}


def test_a_rank_that_does_not_answer_is_known_from_its_frames():
    ranks = {1: RankView(1, document=Payload({"shards": {"25": "web-1-25.tar"}}))}
    found = trace_origins({0: batches()}, ranks, [*window(0), *window(1)], 100)
    assert [row["rank"] for row in found["steps"]] == [0, 1] * 6
    assert found["shards"]["web-1-25.tar"] == "step 100"
    assert found["shards"]["shard number 24"] == "steps 96 to 99"
    assert found["steps"][-1] == {
        "rank": 1,
        "attempt": 0,
        "step": 100,
        "fingerprint": 700.0,
        "shards": [{"shard": "web-1-25.tar", "offset": 0}],
    }


@pytest.mark.parametrize("tape", [None, {}, "x", [], [1], [{"step": "a"}], [{"step": 1}]])
def test_nothing_is_said_where_nobody_says(tape):
    assert trace_origins({0: tape}, {}, [(("loss",), Frame(1, 0, 0, 1, (1.0,)))], 1) is None


@pytest.fixture
def collector(tmp_path):
    """An Evidence over a run whose incident inc-1 broke out at step 100."""
    (tmp_path / "run" / "probe").mkdir(parents=True)
    return Evidence(
        tmp_path / "run" / "incidents",
        tmp_path / "run" / "probe",
        window,
        onset=lambda: SimpleNamespace(id="inc-1", breach_step=100),
        directory=tmp_path,
    )


def answers(directory, rank):
    for name in ("stacks.txt", "rng.json"):
        (directory / f"rank-{rank}-{name}").write_text("x\n")
    (directory / f"rank-{rank}-batches.json").write_text(json.dumps(batches(rank)))


def test_the_bundle_and_the_story_name_the_shard(collector, witness, hung, view, tmp_path):
    job = witness([hung().pid], {0: view(1)}, answers)
    seen = collector.collect(job, "inc-1", "k1", 30.0)
    content = json.loads((tmp_path / "run" / seen.path / "shards.json").read_text())
    assert content["shards"] == seen.shards
    assert seen.shards["web-0-24.tar"] == "steps 96 to 99"
    assert [row["step"] for row in content["steps"]] == [95, 96, 97, 98, 99, 100]
    assert "shards.json" in seen.files
    assert collector.collect(job, "inc-1", "k1", 30.0) == seen
    moment = {"record": 1, "step": 100, "attempt": 0, "wall": None, "outcome_record": 2}
    order = {
        "id": "a-1",
        "verb": "snapshot",
        "runbook": "hold",
        "args": NOTHING,
        "touches_job": False,
    }
    end = {"is_undo": False, "outcome": "done", "ok": True, "took_s": 1.0}
    action = Action(result=Payload(msgspec.to_builtins(seen)), **moment, **order, **end)
    assert "shards=(web-0-25.tar=step 100, web-0-24.tar=steps 96 to 99" in outcome_text(action)


def test_a_hung_job_is_told_by_its_frames(collector, witness, hung, view):
    seen = collector.collect(witness([hung().pid], {0: view(1, silent_s=99)}), "inc-1", "k1", 30.0)
    assert seen.shards["shard number 25"] == "step 100"
