"""The rooms of the house stand on each other, and the contracts that say so can be broken."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_graph import PACKAGES, edges, rings
from tests.test_architecture import ROOT, Module, read_modules, within

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


@pytest.mark.parametrize(
    ("file", "planted", "said"),
    [
        ("collectors/loss.py", FOR_TYPES, "collectors.loss -> supervise_probe.probe"),
        ("stepping/between_steps.py", "from ..listeners import step", "stepping.between_steps -> "),
    ],
)
def test_a_contract_is_broken_by_an_import_that_runs_up(tmp_path, file, planted, said):
    """A collector that takes the whole probe, if only for its type; a room that knows its users."""
    shutil.copytree(
        ROOT / "probes", tmp_path / "probes", ignore=shutil.ignore_patterns("__pycache__")
    )
    path = tmp_path / "probes/supervise_probe" / file
    path.write_text(f"{path.read_text()}\n{planted}\n")

    found = lint(tmp_path / "probes")

    assert found.returncode == 1
    assert said in re.sub(r"\s+", " ", found.stdout)


def test_the_whole_probe_is_named_where_it_is_made():
    """Parts are given what they need: only the package itself makes a `Probe`."""
    naming = {
        module.name
        for module in read_modules()
        for _, target, _ in module.imports()
        if target == "supervise_probe.probe"
    }
    assert naming == {"supervise_probe"}


def looked_up(module: Module) -> list[str]:
    """Return where a collector is looked up by a literal name."""
    found = []
    for node in ast.walk(module.tree):
        owner: ast.AST | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner, key = node.value, node.slice.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            first = node.args[0] if node.args else None
            if node.func.attr == "get" and isinstance(first, ast.Constant):
                owner, key = node.func.value, first.value
        if owner is not None and isinstance(key, str):
            name = ast.unparse(owner).rpartition(".")[2]
            if name in ("collectors", "by_name"):
                found.append(f"{module.path}:{node.lineno} looks up {key!r}")
    return found


def test_no_collector_is_looked_up_by_name():
    """Who speaks to one is given it, with its type."""
    probe = [module for module in read_modules() if within(module.name, ("supervise_probe",))]
    assert [said for module in probe for said in looked_up(module)] == []
    sinner = Module(
        "supervise_probe.x", "x.py", "a = self.collectors['loss']\nb = p.by_name.get('x')"
    )
    assert len(looked_up(sinner)) == 2


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_has_a_circle(package):
    """Neither its modules nor its rooms import each other in one."""
    assert rings(package, read_modules()) == []


def test_the_core_has_few_rooms():
    assert len(edges("supervise.core", read_modules())) <= 10
