"""The manifest: generations that survive, one for each change, and never one for nothing."""

from __future__ import annotations

import json

import msgspec
import pytest

from supervise.errors import StoreError
from supervise.store import Quarantine
from supervise_probe.collectors import Manifest

FACTS = {"step": 150, "attempt": 3, "incident": "inc-1", "why": "twice"}


def shards(*names, **more):
    return {"add": [{"kind": "shard", "name": name} for name in names], **FACTS, **more}


@pytest.fixture
def manifest(run):
    return Quarantine(run.quarantine_path)


def named(document):
    return [entry.name for entry in document.entries]


def test_a_change_is_the_next_generation_on_disk(manifest):
    manifest.change(shards("a.tar"), key="k1", live=True)
    made = manifest.change(shards("b.tar", by="ada"), key="k2", live=True)

    assert made.generation == 2 and named(made) == ["a.tar", "b.tar"]
    assert Quarantine(manifest.path).read() == made
    assert msgspec.to_builtins(made) == json.loads(manifest.path.read_text())
    place = {"kind": "shard", "name": "a.tar", "from_attempt": 0, "until_attempt": None}
    assert msgspec.to_builtins(made.entries[0]) == {**FACTS, **place, "by": "policy"}
    assert [change.added for change in made.changes] == [["a.tar"], ["b.tar"]]
    assert list(manifest.path.parent.glob(".quarantine*")) == []
    # a supervisor that does not know whether it was done asks again
    assert manifest.change(shards("b.tar", by="ada"), key="k2", live=True) == made


def test_nothing_to_add_and_nothing_to_release_are_errors(manifest):
    with pytest.raises(StoreError, match="nothing to add"):
        manifest.change(shards(), key="k0", live=True)
    manifest.change(shards("a.tar"), key="k1", live=True)
    with pytest.raises(StoreError, match=r"a\.tar is in it already"):
        manifest.change(shards("a.tar"), key="k2", live=True)
    with pytest.raises(StoreError, match=r"b\.tar is not in the quarantine"):
        manifest.change({"release": ["b.tar"]}, key="k3", live=True)
    assert manifest.read().generation == 1


def test_more_shards_than_allowed_are_refused_whole(manifest):
    manifest.change(shards("a.tar", "b.tar", most=2), key="k1", live=True)
    batch = {"add": [{"kind": "batch", "name": "17"}], **FACTS, "most": None}
    manifest.change(batch, key="k2", live=True)

    with pytest.raises(StoreError, match="3 shards would be in quarantine, and the limit is 2"):
        manifest.change(shards("c.tar", most=2), key="k3", live=True)
    assert named(manifest.read()) == ["a.tar", "b.tar", "17"]


def test_what_an_incident_brought_in_is_released(manifest):
    manifest.change(shards("a.tar"), key="k1", live=True)
    manifest.change(shards("b.tar", incident="inc-2"), key="k2", live=True)
    made = manifest.change({"release": {"incident": "inc-2"}, **FACTS}, key="k3", live=True)

    assert named(made) == ["a.tar"] and made.changes[-1].released == ["b.tar"]
    assert manifest.change({"release": {"incident": "inc-2"}}, key="k4", live=True) == made
    assert named(manifest.change({"release": ["a.tar"]}, key="k5", live=True)) == []


def test_with_several_ranks_a_change_waits_for_the_next_launch(manifest):
    made = manifest.change(shards("a.tar"), key="k1", live=False)
    assert made.entries[0].from_attempt == 4
    made = manifest.change({"release": ["a.tar"], "attempt": 6}, key="k2", live=False)
    assert made.entries[0].until_attempt == 7
    made = manifest.change(shards("a.tar", attempt=6), key="k3", live=False)
    assert [(e.from_attempt, e.until_attempt) for e in made.entries] == [(4, None)]
    manifest.change(shards("b.tar", attempt=6), key="k4", live=False)
    made = manifest.change({"release": ["b.tar"], "attempt": 6}, key="k5", live=False)
    assert named(made) == ["a.tar"]

    manifest.change(shards("c.tar", attempt=6), key="k6", live=False)
    manifest.change({"release": ["a.tar"], "attempt": 6}, key="k7", live=False)
    now, again = manifest.hasten("k7"), manifest.hasten("k7")
    assert [(e.name, e.from_attempt) for e in now.entries] == [("c.tar", 0)]
    assert now == again and now.generation == 8


def test_a_person_may_write_it(manifest):
    manifest.path.write_text('{"entries": [{"kind": "shard", "name": "a.tar"}]}')

    (entry,) = manifest.read().entries
    assert (entry.from_attempt, entry.until_attempt) == (0, None)
    made = manifest.change(shards("b.tar"), key="k1", live=True)
    assert (made.generation, named(made)) == (1, ["a.tar", "b.tar"])
    assert named(manifest.change({"release": ["a.tar"]}, key="k2", live=True)) == ["b.tar"]


def by_hand(**more):
    return json.dumps({"entries": [{"kind": "shard", "name": "a.tar", **more}]})


@pytest.mark.parametrize(
    ("text", "shards", "batches"),
    [
        ('{"entries": []}', set(), set()),
        (by_hand(), {"a.tar"}, set()),
        (by_hand().replace("{", '{"generation": 3, ', 1), {"a.tar"}, set()),
        (by_hand(name=5), {"shard 5"}, set()),
        (by_hand(kind="batch", name="17"), set(), {17}),
        (by_hand(from_attempt=3), set(), set()),
        (by_hand(until_attempt=3), {"a.tar"}, set()),
        (by_hand(until_attempt=2), set(), set()),
        ("{", None, None),
        ('{"entries": [{"kind": "shard"}]}', None, None),
        (by_hand(kind="sort"), None, None),
        (by_hand(name=""), None, None),
        (by_hand(kind="batch"), None, None),
        (by_hand(until_attempt=float("inf")), None, None),
        (by_hand().replace("{", '{"generation": null, ', 1), None, None),
    ],
)
def test_supervisor_and_probe_read_the_same(manifest, text, shards, batches):
    """A manifest written by hand means the same to both, or is none to either; in attempt 2."""
    manifest.path.write_text(text)
    probe = Manifest(str(manifest.path), 2)

    if shards is None:
        assert probe.error.startswith("the quarantine cannot be read: ")
        with pytest.raises(StoreError):
            manifest.read()
        return
    assert (probe.error, probe.shards, probe.batches) == ("", shards, batches)
    found = manifest.read()
    # as the next change would write it
    manifest.path.write_text(json.dumps(msgspec.to_builtins(found)))
    again = Manifest(str(manifest.path), 2)
    assert (again.shards, again.batches, again.generation) == (shards, batches, found.generation)


def test_changes_are_kept_within_bounds(manifest):
    for number in range(64 + 5):
        manifest.change(shards(f"{number}.tar"), key=f"k{number}", live=True)
    kept = manifest.read().changes
    assert len(kept) == 64 and kept[-1].generation == 69

    manifest.path.write_text("{")
    with pytest.raises(StoreError, match="cannot read"):
        manifest.read()
