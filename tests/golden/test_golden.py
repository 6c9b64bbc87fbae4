"""A change of structure changes nothing that users or auditors see."""

from __future__ import annotations

import pytest

from . import frozen
from .stories import played

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
        ("channels", frozen.channels),
        ("help", frozen.helps),
        ("exit-codes", frozen.exit_codes),
    ],
)
def test_what_users_read_is_the_same(name, text):
    """Records and what is read of them, messages, help texts, exit codes."""
    assert text().splitlines() == (frozen.HERE / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        (
            "nan",
            ["opened inc-1", "action inc-1", "closed inc-1"],
        ),
        (
            "approval: a request is denied",
            ["approval inc-1", "updated inc-1"],
        ),
        (
            "a crash during an incident: the job ends with signal 9",
            ["opened inc-1", "updated inc-1", "finished inc-1"],
        ),
        ("a crash: the job ends with code 1", ["finished None"]),
        ("crash", ["opened inc-1", "finished inc-1"]),
        (
            "actions that an operator orders, and those that are refused",
            ["updated inc-1", "closed inc-1", "finished None"],
        ),
        ("what the probe and the supervisor report", ["watcher None"] * 4),
    ],
)
def test_messages_have_a_kind_and_keep_their_incident(name, kinds):
    """Down to the closing one. An end that was ordered is about no incident."""
    told = [made for _, made in played(name).log if made.kind == "notify_intent"]

    assert [f"{made.data['message']['kind']} {made.incident}" for made in told] == kinds
    if "operator" in name:
        assert (told[-1].severity, told[-1].reason) == ("INFO", "stopped by operator at step 389")
