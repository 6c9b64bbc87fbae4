"""The wish for denser samples: a word per rank, renewed each second, that expires by itself."""

from types import SimpleNamespace

from supervise.runtime import Segments


def test_the_word_reaches_the_probe_and_no_other_word_changes(segment, writer):
    segment.stamp(5)
    segment.lease(6)
    assert writer.tight_until_ns() == 0
    segment.tighten(123456789)
    assert writer.tight_until_ns() == 123456789
    assert writer.lease_until_ns() == 6
    assert writer.commands_head() == 0
    segment.send("key", "pause", {})
    assert (writer.commands_head(), writer.tight_until_ns()) == (1, 123456789)


def test_it_is_said_when_it_begins_and_ends_and_renewed_meanwhile(tmp_path):
    segments = Segments(tmp_path, tmp_path, lambda: 0)
    wishes: list[int] = []
    segments.ranks = {n: SimpleNamespace(tighten=wishes.append) for n in (0, 1)}
    assert segments.tighten(False, 10) is None
    assert wishes == []
    assert segments.tighten(True, 20) == "samples are taken more densely while there is an incident"
    assert segments.tighten(True, 30) is None
    half_a_minute = 30_000_000_000
    assert wishes == [20 + half_a_minute] * 2 + [30 + half_a_minute] * 2
    ended = "samples are taken as usual again, 30 seconds from now"
    assert segments.tighten(False, 40) == ended
    assert segments.tighten(False, 50) is None
    assert len(wishes) == 4
