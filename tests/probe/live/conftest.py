"""Fixtures that run training scripts with the probe, or without it."""

import pytest

from tests.support import probed_job


@pytest.fixture(scope="session")
def probed(make_folder):
    """Runs scripts with the probe in the process."""
    server = probed_job.JobServer(make_folder)
    yield server
    server.close()


@pytest.fixture(scope="session")
def bare(make_folder):
    """Runs scripts without the probe."""
    server = probed_job.JobServer(make_folder, injected=False)
    yield server
    server.close()
