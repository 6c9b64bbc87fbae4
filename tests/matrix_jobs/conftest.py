"""Ranks, odd processes and updates by hand: each script once with the probe, and once without."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervise.inputs.segment import Segments

LIVE = Path(__file__).parents[1] / "probe" / "live" / "conftest.py"

_spec = importlib.util.spec_from_file_location("matrix_jobs_live", LIVE)
live = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(live)

make_folder = live.make_folder
launch = live.launch


class Untouched(live.Server):
    """Forks jobs of a process that was started with the probe on its path and SUPERVISE_DISABLE."""

    def __init__(self, make_folder):
        self.make_folder = make_folder
        environ = {**os.environ, **live.surroundings(make_folder()), "SUPERVISE_DISABLE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(LIVE.parent / "server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )


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
        assert job.told == untouched.told, "with the probe it computed something else"
        assert job.err == untouched.err == ""
        assert len(list((job.folder / "shm").iterdir())) == 1
        *rows, last = job.told
        assert last["sha"] and job.column("step") == list(range(len(rows)))
        for frame, row in zip(job.frames, rows, strict=True):
            for name, value in row.items():
                assert math.isclose(frame[name], value, rel_tol=1e-5), (name, frame, value)
        assert set(job.segment().status()["collectors"].values()) == {"on"}
        return job


@pytest.fixture(scope="session")
def pair(make_folder):
    """Runs scripts that need torch alone."""
    servers = live.Server(make_folder, injected=True), Untouched(make_folder)
    yield Pair(*servers)
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def preamble():
    """What stands in front of every script that a server runs."""
    return live.PREAMBLE


@pytest.fixture(scope="session")
def ranks():
    """One job per segment in a job's folder, in order of rank, all frames read."""

    def read(folder):
        found = []
        for path in (folder / "shm").glob("rank-*.seg"):
            each = live.Job(folder)
            each._segment = live.Segment.open(path, live.time.monotonic_ns)
            each.poll()
            found.append(each)
        return sorted(found, key=lambda job: (job._segment.rank, job._segment.created_ns))

    return read


@pytest.fixture(scope="session")
def segments():
    """The steps of the frames that a supervisor would read, in the order in which it reads them."""

    def read(folder):
        found = Segments(folder / "shm", folder / "probe", live.time.monotonic_ns)
        events = [event for _ in range(8) for event in found.poll()]
        found.close()
        return [event.step for event in events if isinstance(event, live.Frame)]

    return read


@pytest.fixture(scope="session")
def surroundings():
    """Writes what a supervisor would have written into a folder, returns the environment."""
    return live.surroundings
