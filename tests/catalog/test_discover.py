"""Parts are found by their files, and every part keeps the promises of its docstring."""

from __future__ import annotations

import types
from pathlib import Path
from textwrap import dedent, indent

import pytest

from supervise import actions, detectors
from supervise.catalog import (
    Problems,
    Source,
    Step,
    action_classes,
    describe_mistakes,
    detector_classes,
    json_schema,
    keys_of,
    name_of,
    parse_yaml,
    plain_yaml,
    read_detector,
    section_summary,
    written_value,
)
from supervise.core.model import Action, Detector

PARTS = [*detector_classes().items(), *action_classes().items()]


@pytest.mark.parametrize(
    ("package", "found"),
    [(detectors, detector_classes()), (actions, action_classes())],
    ids=["detectors", "actions"],
)
def test_every_file_has_parts_named_after_their_class(
    package: types.ModuleType, found: dict
) -> None:
    """Adding a part is adding a class; helpers begin with an underscore."""
    files = {path.stem for path in Path(package.__path__[0]).glob("*.py")}

    homes = {form.__module__.rpartition(".")[2] for form in found.values()}
    assert homes == {name for name in files if not name.startswith("_")}
    for name, form in found.items():
        assert form.__name__.lower() == name.replace("_", "")


@pytest.mark.parametrize(("name", "form"), PARTS, ids=[name for name, _ in PARTS])
def test_a_docstring_has_what_its_page_needs(name: str, form: type) -> None:
    """A sentence, an example, a source; what a detector cannot see, how an action is taken back."""
    text = form.__doc__ or ""
    needed = ["Example:", "Source:", "Blind to:" if issubclass(form, Detector) else "Undo:"]

    assert [word for word in needed if word not in text] == []
    assert len(section_summary(form)) < 160


@pytest.mark.parametrize(("name", "form"), PARTS, ids=[name for name, _ in PARTS])
def test_the_example_of_a_docstring_loads(name: str, form: type) -> None:
    """What people copy works, and is of that very kind."""
    block = (form.__doc__ or "").partition("Example:\n")[2].partition("\n\n")[0]
    problems = Problems()
    text = "x:\n" + indent(dedent(block), "  ") + "\n"
    root = parse_yaml(Source("example", text), problems)
    problems.stop()
    assert root is not None
    node = root.get("x")
    if issubclass(form, Action):
        made = Step.decode(plain_yaml(node)[0])
    else:
        made = read_detector(node, problems, name)
    problems.stop()

    assert type(made) is form
    assert name_of(made) == name


@pytest.mark.parametrize(("name", "form"), PARTS, ids=[name for name, _ in PARTS])
def test_every_field_is_a_key(name: str, form: type) -> None:
    """Its type hint is one that the catalog can validate, describe and write."""
    for key in keys_of(form).values():
        assert describe_mistakes(json_schema(form)["properties"][key.name])
        if not key.required and key.default is not None:
            written_value(key.default, key.hint)
