"""What the detector tests share: feeding a series, and codes that read well."""

from __future__ import annotations

import pytest

from supervise.core.model import HAS_NOTE

LETTERS = "o?B"  # OK, UNKNOWN, BREACH


@pytest.fixture
def read():
    """Feed samples to a watch, one per step from `first` on; return the readings as letters."""

    def _read(watch, samples, first=0):
        return "".join(
            LETTERS[watch.feed(sample, step) & ~HAS_NOTE]
            for step, sample in enumerate(samples, first)
        )

    return _read
