"""The same events lead to the same bytes: whatever the hash seed, the order of imports, the Python.

Another Python that is at hand borrows our site-packages, of which the story needs pure Python only.
"""

from __future__ import annotations

import os
import shutil
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


def other_pythons() -> list[str]:
    """Return interpreters of other versions that can load a policy."""
    found = []
    for minor in range(11, 16):
        beside = Path(sys.base_prefix).parent.glob(f"*/bin/python3.{minor}")
        python = next(map(str, beside), None) or shutil.which(f"python3.{minor}")
        if python is None or minor == sys.version_info.minor:
            continue
        paths = os.pathsep.join([*SOURCES, *site.getsitepackages()])
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        load = "from supervise.catalog import load_policy; load_policy('nano')"
        asked = [python, "-c", load]
        if subprocess.run(asked, env=environment, capture_output=True, check=False).returncode == 0:
            found.append(python)
    return found


def test_the_story_is_worth_telling():
    """It opens incidents and runs actions."""
    assert int(digest(sys.executable, 0).split()[0]) > 50


@pytest.mark.parametrize("seed", [1, 2])
def test_hash_seed_and_order_of_imports_change_nothing(seed):
    """Every set and dictionary of ours is read in an order of its own, never in one of chance."""
    assert digest(sys.executable, seed) == digest(sys.executable, 0)


def test_another_python_decides_the_same():
    """Byte by byte, under every other version that is at hand."""
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no other Python here can import the supervisor")
    for python in pythons:
        assert digest(python, 3) == digest(sys.executable, 0), python
