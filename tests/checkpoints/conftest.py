"""A checkpoint guard over real files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from .guard_driver import GuardDriver


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """See `GuardDriver`; unreported files are verified by its fake interpreter too."""
    driver = GuardDriver(tmp_path)
    # That of the verifier alone: what starts it is a Python, too.
    interpreter = SimpleNamespace(executable=str(driver.python))
    monkeypatch.setattr("supervise.checkpoints.verification.sys", interpreter)
    yield driver
    driver.guard.close()
