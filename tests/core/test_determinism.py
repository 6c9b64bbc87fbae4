"""The same events lead to the same bytes: whatever the hash seed, the order of imports, the Python.

Another Python that is at hand borrows our site-packages, of which the story needs pure Python only.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import supervise
import supervise_probe

pytestmark = pytest.mark.slow

STORY = Path(__file__).with_name("story_digest.py")
SOURCES = [str(Path(package.__file__).parents[1]) for package in (supervise, supervise_probe)]


@cache
def digest(python: str, seed: int) -> str:
    """Return what the story prints: the number of decisions and their digest."""
    environment = {
        **os.environ,
        "PYTHONHASHSEED": str(seed),
        "PYTHONPATH": os.pathsep.join([*SOURCES, *site.getsitepackages()]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [python, str(STORY), str(seed)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", [1, 2])
def test_hash_seed_and_order_of_imports_change_nothing(seed):
    """Every set and dictionary of ours is read in an order of its own, never in one of chance."""
    assert digest(sys.executable, seed) == digest(sys.executable, 0)
