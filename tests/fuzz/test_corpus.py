"""Whatever a hostile or broken writer leaves: an answer, or an error that names the damage."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .drive import CORPUS, tried
from .targets import TARGETS

KEPT = [
    pytest.param(path.parent.name, path, id=f"{path.parent.name}-{path.name}")
    for path in sorted(CORPUS.glob("*/*"))
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize(("name", "path"), KEPT)
def test_corpus_is_handled(home, name, path):
    """Every input that once crashed or hung a reader."""
    TARGETS[name].seeds(home)

    assert tried(TARGETS[name], home, path.read_bytes()) is None


@pytest.mark.parametrize("name", TARGETS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=3, suppress_health_check=list(HealthCheck), database=None)
def test_a_changed_input_is_an_answer_or_an_error(home, name, seed):
    """Fresh changes of sound inputs; `make fuzz` tries them for hours."""
    target, chance = TARGETS[name], random.Random(seed)
    data = target.change(chance.choice(target.seeds(home)), chance)

    assert tried(target, home, data) is None
