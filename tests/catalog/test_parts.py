"""Small parts of the catalog: kinds of values, resolved text, metrics, shipped files."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervise.catalog.document import yaml_reader, yaml_writer
from supervise.catalog.document.diagnostics import PolicyErrors, Problems, Source, did_you_mean
from supervise.catalog.document.nodes import plain
from supervise.catalog.schema.dataclass_types import read_form, written
from supervise.core.model.interfaces import Seconds, Steps


@dataclass(frozen=True)
class Inner:
    for_: Steps = 1


@dataclass(frozen=True)
class Form:
    """One field of every sort of hint."""

    number: float
    count: int
    steps: Steps
    time: Seconds
    word: Literal["a", "b"]
    flag: bool = False
    pair: tuple[int, int] | None = None
    names: tuple[str, ...] = ()
    times: dict[str, Seconds] | None = None
    mixed: Annotated[dict[str, float], {"min": Seconds, "factor": float}] = field(
        default_factory=dict
    )
    inner: Inner = Inner()
    either: Steps | Seconds | None = None
    data: Any = None


TEXT = """\
number: 1e-3
count: 3
steps: 20
time: 500ms
word: b
flag: true
pair: [1, 2]
names: [x, y]
times: {a: 2h, b: 1m}
mixed: {min: 30s, factor: 8}
inner: {for: 7}
either: 5m
data: [1, {x: null}]
"""


def read(text: str, form: type = Form) -> tuple[Any, list[str]]:
    problems = Problems()
    root = yaml_reader.parse(Source("x.yaml", text), problems)
    problems.stop()
    made = read_form(form, root, problems, "")
    try:
        problems.stop()
    except PolicyErrors as error:
        return made, [problem.message for problem in error.problems]
    return made, []


def test_hints_decide_how_values_are_read() -> None:
    """Times become seconds, lists tuples, `for` fills `for_`."""
    made, said = read(TEXT)

    assert said == []
    assert made == Form(
        0.001,
        3,
        20,
        0.5,
        "b",
        True,
        (1, 2),
        ("x", "y"),
        {"a": 7200.0, "b": 60.0},
        {"min": 30.0, "factor": 8.0},
        Inner(7),
        300.0,
        [1, {"x": None}],
    )


def test_what_is_written_reads_back_as_the_same() -> None:
    """Also through the text of a resolved policy."""
    made, _ = read(TEXT)

    again, said = read(yaml_writer.dump(written(made)))

    assert (again, said) == (made, [])
    assert again.either == 300.0
    assert read(TEXT.replace("5m", "5"))[0].either == 5


LETTERS = st.one_of(
    st.characters(exclude_categories=("Cc", "Cs", "Cn")), st.sampled_from("\n\t :#'\"[]{}-&*!|>%@`")
)
WORDS = st.text(LETTERS, max_size=8)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | WORDS
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=15,
)


@given(st.dictionaries(WORDS, PLAIN, min_size=1, max_size=5))
def test_any_document_survives_being_dumped(document: dict[str, Any]) -> None:
    """Whatever the text holds, the same comes back."""
    problems = Problems()
    root = yaml_reader.parse(Source("x.yaml", yaml_writer.dump(document)), problems)
    problems.stop()

    assert root is not None
    assert plain(root) == document


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("nonfinit", "did you mean 'nonfinite'?"),
        ("loss_z", "did you mean 'pack.loss_z'?"),
        ("zzz", "known: 'nonfinite', 'pack.loss_z'"),
    ],
)
def test_a_hint_is_a_near_miss_or_the_whole_list(wrong: str, hint: str) -> None:
    """Also for what lacks its pack's name."""
    assert did_you_mean(wrong, {"nonfinite", "pack.loss_z"}) == hint
    assert did_you_mean(wrong, ()) is None


def test_loading_a_policy_imports_nothing_heavy() -> None:
    """httpx costs more than the whole of loading; torch belongs to the job."""
    code = (
        "import sys; from supervise.catalog import load_policy; load_policy('nano');"
        "print([m for m in ('httpx', 'torch', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
