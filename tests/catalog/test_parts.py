"""Small parts of the catalog: kinds of values, resolved text, metrics, shipped files."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervise.catalog import Problems, Source, did_you_mean, dump_yaml, parse_yaml, plain_yaml

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
    problems = Problems()
    root = parse_yaml(Source("x.yaml", dump_yaml(document)), problems)
    problems.stop()

    assert root is not None
    assert plain_yaml(root) == document


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("nonfinit", "did you mean 'nonfinite'?"),
        ("loss_z", "did you mean 'pack.loss_z'?"),
        ("zzz", "known: 'nonfinite', 'pack.loss_z'"),
    ],
)
def test_a_hint_is_a_near_miss_or_the_whole_list(wrong: str, hint: str) -> None:
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
