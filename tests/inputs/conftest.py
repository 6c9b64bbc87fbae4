"""One small segment and its reader, and frames as the supervisor completes them."""

from collections.abc import Mapping
from pathlib import Path

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
    segment = Segment.open(writer.path, lambda: 77)
    yield segment
    segment.close()


@pytest.fixture
def shm(tmp_path):
    """The directory that the supervisor makes for the segments of a run."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def rank(shm):
    """A function that makes the writer of a rank, with a frame for each value given."""
    writers = []

    def make(number=0, *values):
        writers.append(Writer.create(str(shm), "run", number, 2, slots=8, capacity=4))
        writers[-1].announce(["loss"])
        for step, value in enumerate(values):
            writers[-1].publish(step, 0, [value], 10**6 * (step + 1))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close()


def publish(writer, *steps):
    """Publish frames of three metrics, each of which is the step."""
    for step in steps:
        writer.publish(step, 0, [float(step)] * 3, step + 1)


def poke(path, *changes):
    """Overwrite parts of a file: where each begins, and its bytes or a word."""
    with Path(path).open("r+b", buffering=0) as file:
        for place, raw in changes:
            file.seek(place)
            file.write(raw if isinstance(raw, bytes) else raw.to_bytes(8, "little"))


class Company:
    """The ranks of a job, each of which publishes metrics of the same names."""

    def __init__(self, names, world=1, now=None):
        self.names, self.world, self.number = tuple(names), world, 0
        self.enricher = FrameEnricher(lambda pid, leads: {}, now)
        self._columns: dict[int, tuple[str, ...]] = {}
        for rank in range(world):
            self.announce(rank)

    def announce(self, rank, *, at_ns=1, again=False):
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
