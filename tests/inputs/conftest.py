"""One small segment and its reader, for the tests of the inputs."""

from __future__ import annotations

import pytest

from supervise.runtime import Segment
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
