"""The rooms of the house stand on each other, and the contracts that say so can be broken."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_architecture import ROOT

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


@pytest.mark.parametrize(
    ("file", "planted", "message"),
    [
        (
            "collectors/loss.py",
            "from ..probe import Probe",
            "collectors.loss -> supervise_probe.probe",
        ),
        (
            "torch_state/records.py",
            "from .learning_rate import LearningRate",
            "records -> .learning_rate",
        ),
    ],
)
def test_a_contract_is_broken_by_an_import_for_types_alone(tmp_path, file, planted, message):
    """A collector that takes the whole probe; a circle of two modules."""
    shutil.copytree(
        ROOT / "probes", tmp_path / "probes", ignore=shutil.ignore_patterns("__pycache__")
    )
    path = tmp_path / "probes/supervise_probe" / file
    guarded = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {planted}\n"
    path.write_text(f"{path.read_text()}\n{guarded}")

    found = lint(tmp_path / "probes")

    assert found.returncode == 1
    assert message in re.sub(r"\s+", " ", found.stdout), found.stdout
