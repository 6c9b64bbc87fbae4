"""A checkpoint guard over real files."""

from __future__ import annotations

import sys

import pytest

from .guard_driver import GuardDriver


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """See `GuardDriver`; unreported files are verified by its fake interpreter too."""
    driver = GuardDriver(tmp_path)
    monkeypatch.setattr(sys, "executable", str(driver.python))
    yield driver
    driver.guard.close()
