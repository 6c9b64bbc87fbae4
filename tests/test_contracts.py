"""The import contracts of pyproject.toml, which `make lint` checks, refuse what they are to."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.test_architecture import ROOT

LINT = Path(sys.executable).with_name("lint-imports")


def test_imports_for_types_alone_break_the_contracts(tmp_path):
    """A collector that takes the whole probe; a circle of two modules."""
    probes = tmp_path / "probes"
    shutil.copytree(ROOT / "probes", probes, ignore=shutil.ignore_patterns("__pycache__"))
    for file, planted in (
        ("collectors/loss.py", "from ..probe import Probe"),
        ("torch_state/records.py", "from .learning_rate import LearningRate"),
    ):
        with (probes / "supervise_probe" / file).open("a") as text:
            text.write(f"\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {planted}\n")

    linted = subprocess.run(
        [LINT, "--config", ROOT / "pyproject.toml", "--no-cache"],
        env={**os.environ, "PYTHONPATH": f"{probes}:{ROOT / 'supervisor'}"},
        cwd=probes,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert linted.returncode == 1
    shown = re.sub(r"\s+", " ", linted.stdout)
    assert "collectors.loss -> supervise_probe.probe" in shown, shown
    assert "records -> .learning_rate" in shown, shown
