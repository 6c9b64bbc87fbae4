"""Fixtures of the tests of savepoints."""

import pytest

from tests.support.savepoint_jobs import SavepointJobs


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Runs scripts under the savepoint driver: see `SavepointJobs`."""
    jobs = SavepointJobs(tmp_path_factory.mktemp("jobs"))
    yield jobs
    jobs.close()
