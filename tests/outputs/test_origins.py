"""Which shards the steps before an incident had their data from, in its bundle and its story."""

import json
from types import SimpleNamespace

import msgspec
import pytest

from supervise.core.model import NOTHING, Frame, Payload
from supervise.report import Action, outcome_text

from .conftest import FakeWitness, view

STEPS = range(90, 104)
NAMES = ("train_loss_raw", "batch_shard", "batch_offset", "batch_fingerprint")
BREACH = SimpleNamespace(id="inc-1", breach_step=100)


def batches(rank=0):
    """The newest batches as a probe writes them; one step in the middle has two shards."""
    tape = []
    for step in STEPS:
        shard = {"shard": f"web-{rank}-{step // 4}.tar", "offset": step % 4}
        tape.append({"step": step, "attempt": 0, "fingerprint": 7.0 * step, "shards": [shard]})
    tape[8]["shards"].append({"shard": "extra.tar", "offset": None})
    return tape


def window(*ranks):
    return [
        (NAMES, Frame(1000 + step, rank, 0, step, (2.5, step // 4, step % 4, 7.0 * step)))
        for rank in ranks
        for step in STEPS
    ]


def writing(tape):
    """Return a probe that writes this record of its newest batches, that of rank 0 only."""

    def answers(directory, rank):
        if rank != 0:
            return "silence"
        for name, content in (("stacks.txt", "x"), ("rng.json", "x"), ("batches.json", tape)):
            text = content if content == "x" else json.dumps(content)
            (directory / f"rank-{rank}-{name}").write_text(f"{text}\n")
        return None

    return answers


def test_the_bundle_and_the_story_name_the_shards_of_the_five_steps_before_the_breach(bundle):
    """And of it, however many are kept: in a file, the audit log and `supervise why`."""
    job = FakeWitness([], {0: view(1)}, writing(batches()))
    seen, path = bundle(job, window=lambda: window(0), onset=lambda: BREACH)

    content = json.loads((path / "shards.json").read_text())
    assert [row["step"] for row in content["steps"]] == [95, 96, 97, 98, 99, 100]
    assert content["breach_step"] == 100 and content["shards"] == seen.shards
    assert list(seen.shards.items()) == [
        ("web-0-25.tar", "step 100"),
        ("web-0-24.tar", "steps 96 to 99"),
        ("extra.tar", "step 98"),
        ("web-0-23.tar", "step 95"),
    ]
    assert content["steps"][0] == {"rank": 0, **batches()[5]}
    assert "shards.json" in seen.files
    moment = {"record": 1, "step": 100, "attempt": 0, "wall": None, "outcome_record": 2}
    order = {"id": "a-1", "verb": "snapshot", "runbook": "hold", "args": NOTHING}
    end = {"touches_job": False, "is_undo": False, "outcome": "done", "ok": True, "took_s": 1.0}
    action = Action(result=Payload(msgspec.to_builtins(seen)), **moment, **order, **end)
    assert "shards=(web-0-25.tar=step 100, web-0-24.tar=steps 96 to 99" in outcome_text(action)


def test_a_rank_that_does_not_answer_is_known_from_its_frames(bundle):
    """Its numbers, with names from its last status; a number without a name stays a number."""
    views = {0: view(1), 1: view(1, shards={"25": "web-1-25.tar"})}
    job = FakeWitness([], views, writing(batches()))
    seen, path = bundle(job, window=lambda: window(0, 1), onset=lambda: BREACH)

    rows = json.loads((path / "shards.json").read_text())["steps"]
    assert [row["rank"] for row in rows] == [0, 1] * 6
    assert seen.shards["web-1-25.tar"] == "step 100"
    assert seen.shards["shard number 24"] == "steps 96 to 99"
    shards = [{"shard": "web-1-25.tar", "offset": 0}]
    assert rows[-1] == {
        "rank": 1,
        "attempt": 0,
        "step": 100,
        "fingerprint": 700.0,
        "shards": shards,
    }


@pytest.mark.parametrize("tape", [None, {}, "y", [], [1], [{"step": "a"}], [{"step": 1}]])
def test_nothing_is_said_where_nobody_says(bundle, tape):
    """No shards in a tape, or no tape at all."""
    frames = [(("loss",), Frame(1, 0, 0, 1, (1.0,)))]
    seen, path = bundle(FakeWitness([], {0: view(1)}, writing(tape)), window=lambda: frames)
    assert not seen.shards and not (path / "shards.json").exists()
