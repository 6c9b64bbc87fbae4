"""The rooms of the house stand on each other, and the contracts that say so can be broken."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_graph import PACKAGES, rings
from tests.test_architecture import ROOT, read_modules

LINT = Path(sys.executable).with_name("lint-imports")


def lint(probes: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of pyproject.toml, with the probe of this directory."""
    return subprocess.run(
        [LINT, "--config", ROOT / "pyproject.toml", "--no-cache"],
        env={**os.environ, "PYTHONPATH": f"{probes}:{ROOT / 'supervisor'}"},
        cwd=probes,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_contracts_are_kept():
    found = lint(ROOT / "probes")
    assert found.returncode == 0, found.stdout
    assert " 0 broken" in found.stdout


FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..probe import Probe"


def test_a_contract_is_broken_by_an_import_that_runs_up(tmp_path):
    """A collector that takes the whole probe, if only for its type."""
    shutil.copytree(
        ROOT / "probes", tmp_path / "probes", ignore=shutil.ignore_patterns("__pycache__")
    )
    path = tmp_path / "probes/supervise_probe/collectors/loss.py"
    path.write_text(f"{path.read_text()}\n{FOR_TYPES}\n")

    found = lint(tmp_path / "probes")

    assert found.returncode == 1
    assert "collectors.loss -> supervise_probe.probe" in re.sub(r"\s+", " ", found.stdout)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_has_a_circle(package):
    """Neither its modules nor its rooms import each other in one."""
    assert rings(package, read_modules()) == []
