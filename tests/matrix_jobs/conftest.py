"""Ranks, odd processes and updates by hand: each script once with the probe, and once without."""

import math
import time

import pytest

from supervise.core.model.events import Frame
from supervise.inputs.segment import Segment, Segments
from tests.support import probed_job
from tests.support.probed_job import Job, JobServer


class Pair:
    """The same script with the probe and without."""

    def __init__(self, probed, bare):
        self.probed = probed
        self.bare = bare

    def run(self, script, **config):
        """Run both and compare; returns the one with the probe.

        Each row that the script tells is a step, and its values are to be in that step's frame;
        the last row is the digest of the weights.
        """
        untouched = self.bare.run(script)
        assert untouched.marks == {}, "SUPERVISE_DISABLE=1 is to be a no-op"
        job = self.probed.run(script, **config)
        assert job.output == untouched.output, "with the probe it computed something else"
        assert job.err == untouched.err == ""
        assert len(list((job.folder / "shm").iterdir())) == 1
        *rows, last = job.output
        assert last["sha"] and job.column("step") == list(range(len(rows)))
        for frame, row in zip(job.frames, rows, strict=True):
            for name, value in row.items():
                assert math.isclose(frame[name], value, rel_tol=1e-5), (name, frame, value)
        assert set(job.segment().status()["collectors"].values()) == {"on"}
        return job


@pytest.fixture(scope="session")
def pair(make_folder):
    """Runs scripts that need torch alone."""
    servers = [
        JobServer(make_folder, environ=disabled) for disabled in ({}, {"SUPERVISE_DISABLE": "1"})
    ]
    yield Pair(*servers)
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def preamble():
    """What stands in front of every script that a server runs."""
    return probed_job.PREAMBLE


@pytest.fixture(scope="session")
def ranks():
    """One job per segment in a job's folder, in order of rank, all frames read."""

    def read(folder):
        found = []
        for path in (folder / "shm").glob("rank-*.seg"):
            each = Job(folder)
            each._segment = Segment.open(path, time.monotonic_ns)
            each.poll()
            found.append(each)
        return sorted(found, key=lambda job: (job._segment.rank, job._segment.created_ns))

    return read


@pytest.fixture(scope="session")
def segments():
    """The steps of the frames that a supervisor would read, in the order in which it reads them."""

    def read(folder):
        found = Segments(folder / "shm", folder / "probe", time.monotonic_ns)
        events = [event for _ in range(8) for event in found.poll()]
        found.close()
        return [event.step for event in events if isinstance(event, Frame)]

    return read


@pytest.fixture(scope="session")
def surroundings():
    """Writes what a supervisor would have written into a folder, returns the environment."""
    return probed_job.job_environment
