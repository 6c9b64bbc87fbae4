"""A checkpoint guard over real files."""

from __future__ import annotations

import pytest

from .guard_driver import GuardDriver


@pytest.fixture
def driver(tmp_path):
    """See `GuardDriver`."""
    driver = GuardDriver(tmp_path)
    yield driver
    driver.guard.close()
