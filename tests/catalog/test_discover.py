"""The faces offer all parts, and every part keeps the promises of its docstring."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent, indent

import jsonschema
import pytest

from supervise import actions, detectors
from supervise.catalog import action_classes, detector_classes, shipped_folder
from supervise.core.model import Action, Detector

from .conftest import plain

ONE = """
version: supervise/v1
policy: one
mode: observe
detectors: {nan: {kind: nonfinite, metrics: [train_loss_raw]}}
rules: [{id: nan, when: nan, sev: SEV1}]
"""
PARTS = [*detector_classes().items(), *action_classes().items()]
SCHEMA = json.loads((shipped_folder("policies") / "policy.schema.json").read_text("utf-8"))
VALID = jsonschema.Draft7Validator(SCHEMA)


@pytest.mark.parametrize(
    ("package", "found"),
    [(detectors, detector_classes()), (actions, action_classes())],
    ids=["detectors", "actions"],
)
def test_every_file_has_parts_named_after_their_class(package, found):
    """The face of the package offers every class; helpers begin with an underscore."""
    files = {path.stem for path in Path(package.__path__[0]).glob("*.py")}
    parts = [name for name in files if not name.startswith("_")]
    modules = [import_module(f"{package.__name__}.{name}") for name in parts]

    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Detector | Action)
    }
    assert {form for form in classes if form.__module__.rpartition(".")[2] in parts} == set(
        found.values()
    )
    for name, form in found.items():
        assert form.__name__.lower() == name.replace("_", "")


@pytest.mark.slow
def test_a_policy_imports_only_what_it_names_and_nothing_heavy(tmp_path):
    """The start of a job waits for these imports; httpx costs more than all of them."""
    policy = tmp_path / "one.yaml"
    policy.write_text(ONE)
    code = """
import sys
from supervise.catalog import load_policy
load_policy(sys.argv[1])
packages = ("supervise.detectors.", "supervise.actions.")
parts = [name for name in sys.modules if name.startswith(packages) and "._" not in name]
print(*(name.rpartition(".")[2] for name in parts))
load_policy("nano")
print(*(name for name in ("httpx", "torch", "numpy", "rich") if name in sys.modules))
"""
    loaded = subprocess.check_output([sys.executable, "-c", code, policy], text=True)

    assert loaded.splitlines() == ["nonfinite", ""]


@pytest.mark.parametrize(("name", "form"), PARTS, ids=[name for name, _ in PARTS])
def test_a_docstring_has_what_its_page_needs(name, form):
    """A sentence, a source, what a detector cannot see, how an action is taken back; an example.

    What people copy is valid, and is of that very kind.
    """
    text = form.__doc__ or ""
    needed = ["Source:", "Blind to:" if issubclass(form, Detector) else "Undo:"]
    assert [word for word in needed if word not in text] == []
    assert len(text.partition("\n\n")[0]) < 160

    block = text.partition("Example:\n")[2].partition("\n\n")[0]
    example = plain(f"x:\n{indent(dedent(block), '  ')}\n")["x"]
    if issubclass(form, Detector):
        assert example["kind"] == name
        parts = {"detectors": {"own": example}}
    else:
        [step] = example
        assert name in step
        parts = {"runbooks": {"own": example}}
    VALID.validate({"version": "supervise/v1", **parts})
