"""One small segment and its reader, and frames as the supervisor completes them."""

from collections.abc import Mapping

import pytest

from supervise.core.model import Announced, Frame
from supervise.runtime import FrameEnricher, Segment
from supervise_probe.ipc.segment import Writer


@pytest.fixture
def writer(tmp_path):
    """A writer with a ring of four slots of three values."""
    writer = Writer.create(str(tmp_path), "run-7", 2, 4, slots=4, capacity=3)
    yield writer
    writer.close()


@pytest.fixture
def segment(writer):
    """Its reader."""
    segment = Segment.open(writer.path, lambda: 77)
    yield segment
    segment.close()


class Company:
    """The ranks of a job, each of which publishes metrics of the same names."""

    def __init__(self, names, world=1, now=None):
        self.names, self.world, self.number = tuple(names), world, 0
        self.enricher = FrameEnricher(lambda pid, leads: {}, now)
        self._columns: dict[int, tuple[str, ...]] = {}
        for rank in range(world):
            self.announce(rank)

    def announce(self, rank, *, at_ns=1, again=False):
        """Let another program be the rank."""
        self.number += 1
        news = Announced(at_ns, rank, self.world, 100 + rank, self.names, self.number, again)
        self._columns[rank] = self.enricher.complete(news)[0].names

    def frame(self, rank, values: Mapping[str, float | None], *, at_ns=6):
        """Publish the newest step of a rank; return what is known beside its own metrics."""
        frame = Frame(at_ns, rank, 0, self.number, tuple(map(values.get, self.names)))
        *news, frame = self.enricher.complete(frame)
        if news:
            self._columns[rank] = news[0].names
        columns = zip(self._columns[rank], frame.values, strict=True)
        return {n: v for n, v in columns if n not in self.names and v is not None}

    def step(self, *ranks: Mapping[str, float | None]):
        """Make a step, that of the leader last; return what is known in its frame."""
        self.number += 1
        return [self.frame(rank, ranks[rank]) for rank in reversed(range(self.world))][-1]


def join_ranks(*ranks: Mapping[str, float | None]):
    """Return what several ranks tell together in a step with these metrics."""
    return Company(sorted({name for rank in ranks for name in rank}), len(ranks)).step(*ranks)
