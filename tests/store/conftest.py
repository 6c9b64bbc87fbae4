"""Small runs and logs for the tests of the store."""

from __future__ import annotations

import resource
from contextlib import contextmanager

import pytest

from supervise.core.model import Policy
from supervise.store import Audit, RunDir

WALL = "2026-01-05T10:11:12.345Z"


@contextmanager
def file_limit(size):
    """No file of this process may grow beyond `size` bytes: what does not fit is refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def policy():
    return Policy("quiet", "sha256:0", "observe", {}, (), resolved="policy: quiet\n")


@pytest.fixture
def run(tmp_path, policy):
    return RunDir.create(tmp_path / "run", argv=["python", "train.py"], policy=policy, wall=WALL)


@pytest.fixture
def put():
    def append(audit: Audit, reason: object = "", *, kind: str = "note", sync: bool = False) -> int:
        body = {"reason": reason, "data": {}}
        return audit.append(kind, actor="app", at_ns=5, wall=WALL, step=3, body=body, sync=sync)

    return append


@pytest.fixture
def opened():
    logs = []

    def open_(path, run_id="run-1"):
        logs.append(Audit.open(path, run_id, at_ns=1, wall=WALL))
        return logs[-1]

    yield open_
    for log in logs:
        log.close()
