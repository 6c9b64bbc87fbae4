"""A checkpoint guard over real files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from supervise.checkpoints import verification

from .guard_driver import GuardDriver


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """See `GuardDriver`; unreported files are verified by its fake interpreter too."""
    driver = GuardDriver(tmp_path)
    monkeypatch.setattr(verification, "sys", SimpleNamespace(executable=str(driver.python)))
    yield driver
    driver.guard.close()
