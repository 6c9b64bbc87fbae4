"""Quarantine refuses before it harms: without suspects, with too many, with several ranks."""

from __future__ import annotations

import pytest

from supervise.actions.quarantine import Quarantine
from supervise.actions.unquarantine import Unquarantine
from supervise.core.model.action import Refused
from supervise.errors import ActionError

HELD = {"generation": 3, "held": 3, "entries": 4, "ranks": 1}


@pytest.fixture
def job(fake_job):

    def make(answer):
        made = fake_job(answer)

        def quarantine(args, *, key, deadline_s):
            made.calls.append((args, key))
            return dict(answer)

        made.quarantine = quarantine
        return made

    return make


def test_suspects_become_names(context, job):
    """Absolute, with the most that may be in quarantine at once, and what to answer for."""
    args = Quarantine().plan(context(suspects=("a.tar", "b.tar"), shards=149))

    assert args["add"] == [
        {"kind": "shard", "name": "a.tar"},
        {"kind": "shard", "name": "b.tar"},
    ]
    assert (args["most"], args["incident"], args["step"], args["attempt"]) == (2, "inc-1", 150, 0)
    made = job(HELD)
    assert Quarantine().perform(made, args, key="k")["generation"] == 3
    assert made.calls == [(args, "k")]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"shards": 40}, "none of the 40 shards seen is a suspect"),
        ({}, "does not report which shards"),
        (
            {"suspects": ("a.tar",), "shards": 40},
            "max_fraction 0.02 of the 40 shards seen so far is less than one shard, so it allows "
            "none; 0.025 is the smallest that allows one",
        ),
    ],
)
def test_an_empty_selection_and_a_large_one_are_refused(changes, why, context):
    with pytest.raises(Refused, match=why):
        Quarantine().plan(context(**changes))


def test_named_shards_are_taken_as_they_are(context):
    """In a job that tells of none a name means nothing; it is said what can be done."""
    named = Quarantine(shards=("x.tar",))

    with pytest.raises(Refused, match=r"does not report which shards.* quarantine\.json written"):
        named.plan(context())
    assert named.plan(context(shards=100))["add"] == [{"kind": "shard", "name": "x.tar"}]
    with pytest.raises(Refused, match=r"allows none; 0\.1 is the smallest that allows one"):
        named.plan(context(shards=10))
    with pytest.raises(Refused, match="of so few none is ever allowed"):
        named.plan(context(shards=1))


@pytest.mark.parametrize("seen", range(2, 50))
def test_the_fraction_that_is_named_allows_one(context, seen):
    """Also where 1 / 49 of 49 comes out below 1."""
    with pytest.raises(Refused) as refused:
        Quarantine(shards=("x.tar",)).plan(context(shards=seen))
    told = float(str(refused.value).split("none; ")[1].split()[0])
    asked = Quarantine(shards=("x.tar",), max_fraction=told)

    assert asked.check() == [] and asked.plan(context(shards=seen))["most"] == 1


def test_a_person_is_on_record_and_not_bound_by_what_was_seen_so_far(context):
    """Who knows of 41 bad shards need not wait until the job has met 82."""
    many = Quarantine(shards=tuple(f"{n}.tar" for n in range(41)), max_fraction=0.5)
    asked = many.plan(context(shards=16, operator="anna"))

    assert (len(asked["add"]), asked["most"], asked["by"]) == (41, None, "anna")
    assert Unquarantine(shards=("a.tar",)).plan(context(operator="anna"))["by"] == "anna"
    assert Quarantine().plan(context(suspects=("a.tar",), shards=149))["by"] == "policy"
    with pytest.raises(Refused, match=r"41 shards are more than .* 0\.5 of the 16 .* allows 8"):
        many.plan(context(shards=16))


def test_positions_are_the_batches_up_to_the_breach(context):
    action = Quarantine(shards="none", positions="breach")

    assert action.plan(context(batches=(17, 18)))["add"] == [
        {"kind": "batch", "name": "17"},
        {"kind": "batch", "name": "18"},
    ]
    with pytest.raises(Refused, match="has a fingerprint"):
        action.plan(context())
    with pytest.raises(Refused, match="2 ranks"):
        action.plan(context(batches=(17,), world_size=2))


def test_a_job_that_holds_an_older_generation_is_a_failure(context, job):
    with pytest.raises(ActionError, match="holds generation 2 of the quarantine, not 3"):
        Quarantine().perform(job({**HELD, "held": 2}), {}, key="k")


def test_undo_releases_what_the_incident_brought_in(context, job):
    undo = Quarantine().undo()
    made = job(HELD)
    undo.perform(made, undo.plan(context()), key="k")

    assert made.calls[0][0]["release"] == {"incident": "inc-1"}
    assert Unquarantine(shards=("a.tar",)).plan(context())["release"] == ["a.tar"]
