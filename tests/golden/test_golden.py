"""A change of structure changes nothing that users or auditors see."""

from __future__ import annotations

import pytest

from . import frozen

SAME_AS_LARGE = "decisions/tests-moe.txt"  # its decisions, too: once in the unit lane is enough


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (frozen.name_of(path) == SAME_AS_LARGE))
        for path in frozen.FILES
    ],
    ids=frozen.name_of,
)
def test_scenarios_pass_and_come_to_the_same_decisions(path):
    """What a file promises about a series is what the engine does, frame by frame."""
    text, failures = frozen.decisions(path)

    assert failures == []
    assert text.splitlines() == (frozen.HERE / frozen.name_of(path)).read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run", frozen.run),
        ("messages", frozen.messages),
        ("notices", frozen.notices),
        ("mistakes", frozen.mistakes),
        ("channels", frozen.channels),
        ("help", frozen.helps),
        ("exit-codes", frozen.exit_codes),
    ],
)
def test_what_users_read_is_the_same(name, text):
    """Records and what is read of them, messages, help texts, exit codes."""
    assert text().splitlines() == (frozen.HERE / f"{name}.txt").read_text().splitlines()
