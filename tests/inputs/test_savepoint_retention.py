"""Which savepoint is to stay: two words per rank, renewed each second, which expire."""

from types import SimpleNamespace

from supervise.errors import SegmentError
from supervise.runtime import Segments

SECOND = 1_000_000_000
FIVE_MINUTES = 300 * SECOND


def test_the_step_reaches_the_probe_until_it_expires(segment, writer):
    segment.stamp(5)
    segment.lease(6)
    segment.tighten(7)
    assert writer.spare_before(0) == 0
    segment.retain_before(80, 1000)
    assert (writer.spare_before(999), writer.spare_before(1000)) == (80, 0)
    others = (writer.lease_until_ns(), writer.tight_until_ns())
    assert (*others, writer.commands_head()) == (6, 7, 0)
    segment.send("key", "pause", {})
    assert (writer.commands_head(), writer.spare_before(999)) == (1, 80)
    segment.retain_before(0, 2000)
    assert writer.spare_before(999) == 0


class Rank:
    """A rank that takes wishes down."""

    def __init__(self, wishes):
        self.retain_before = lambda *wish: wishes.append(wish)


def test_a_change_is_written_at_once_and_the_same_once_a_second(tmp_path):
    """Every round asks; a rank whose segment is broken does not keep the others from it."""
    segments, wishes = Segments(tmp_path, tmp_path, lambda: 0), []

    def broken(*wish):
        raise SegmentError("it is short")

    segments.ranks = {0: SimpleNamespace(retain_before=broken), 1: Rank(wishes)}
    segments.retain_before(0, 10)
    assert wishes == []
    segments.retain_before(80, 20)
    segments.retain_before(80, 19 + SECOND)
    assert wishes == [(80, 20 + FIVE_MINUTES)]
    segments.retain_before(70, 20 + SECOND)
    segments.retain_before(70, 20 + 2 * SECOND)
    assert wishes[1:] == [(70, 20 + SECOND + FIVE_MINUTES), (70, 20 + 2 * SECOND + FIVE_MINUTES)]
    segments.retain_before(0, 21 + 2 * SECOND)
    segments.retain_before(0, 21 + 9 * SECOND)
    assert wishes[3:] == [(0, 21 + 2 * SECOND + FIVE_MINUTES)]
