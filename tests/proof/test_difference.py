"""What another policy does differently, and what that means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervise.catalog import compose_policy, policy_document
from supervise.lab import Change, compare_policies

Diff = Callable[..., list[Change]]


@pytest.fixture
def diff(tmp_path: Path, small: str) -> Diff:
    """Return a function that compares the small policy with one in which texts are replaced."""

    def diff(*changes: tuple[str, str], base: str = small) -> list[Change]:
        documents: list[dict[str, Any]] = []
        for text in (base, replaced(base, *changes)):
            (tmp_path / "p.yaml").write_text(text, "utf-8")
            documents.append(policy_document(compose_policy(tmp_path / "p.yaml")))
        return compare_policies(*documents)

    return diff


def replaced(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


HIGH, WILD = "gt: 5.0, clear: 4.0", "gt: 9.0"

ONE = [
    ((HIGH, "gt: 8.0, clear: 4.0"), "detector high", "gt", 5.0, 8.0, "threshold loosened"),
    ((WILD, "gt: 9.0, for: 3"), "detector wild", "for", 1, 3, "fires later"),
    ((", run: calm", ""), "rule spike", "run", "calm", None, "no longer acts"),
    (("for: 2", "for: 2, run: calm"), "rule grad", "run", None, "calm", "acts where it did not"),
    (("for: 2", "for: 9"), "rule grad", "for", 2, 9, "fires later"),
    (("sev: SEV1", "sev: SEV0"), "rule spike", "sev", "SEV1", "SEV0", "more severe"),
    (
        ("run: calm}", "run: calm, mode: shadow}"),
        "rule spike",
        "mode",
        None,
        "shadow",
        "no longer acts",
    ),
    (("mode: enforce", "mode: shadow"), "mode", "", "enforce", "shadow", "no longer acts"),
    (("all: {max: 4}", "all: {max: 5}"), "budget all", "max", 4, 5, "may act more often"),
    (("per: 1000", "per: 2000"), "budget lr_scale", "per", 1000, 2000, "may act less often"),
    (("mute: [grad]", "mute: [both]"), "rule both", "muted by", None, "spike", "muted more"),
    (("every: 5", "every: 6"), "savepoints", "every", 5, 6, "changed"),
    (
        ("high and wild", "high or wild"),
        "rule both",
        "when",
        "high and wild",
        "high or wild",
        "changed",
    ),
]


@pytest.mark.parametrize(("change", "part", "key", "old", "new", "effect"), ONE)
def test_a_change_is_told_with_what_it_means(
    change: tuple[str, str], part: str, key: str, old: Any, new: Any, effect: str, diff: Diff
) -> None:
    """Old and new value, and a word for the person who approves it."""
    assert Change(part, key, old, new, effect) in diff(change)


def test_parts_come_and_go(diff: Diff) -> None:
    """A rule that acts is not the same news as one that tells."""
    line = "  - {id: spike, when: high, sev: SEV1, run: calm}\n"
    told = {(c.part, c.effect) for c in diff((line, ""), ("by_rule: spike", "by_rule: both"))}
    assert ("rule spike", "no longer acts") in told
    other = line.replace("spike", "x")
    told = {(c.part, c.effect) for c in diff((", for: 2}\n", ", for: 2}\n" + other))}
    assert told == {("rule x", "acts where it did not")}
    quiet = line.replace("spike", "x").replace(", run: calm", "")
    told = {(c.part, c.effect) for c in diff((", for: 2}\n", ", for: 2}\n" + quiet))}
    assert told == {("rule x", "watches more")}


def test_what_does_nothing_is_no_difference(diff: Diff, small: str) -> None:
    """Names, summaries, how mutes are grouped, defaults that are spelt out."""
    assert diff(("policy: p", "policy: q\nsummary: other")) == []
    assert diff(("gt: 9.0", "gt: 9.0, for: 1")) == []
    first = "  - {by_rule: spike, mute: [grad]}\n"
    two, one = first + first.replace("grad", "both"), first.replace("[grad]", "[grad, both]")
    assert diff((two, one), base=replaced(small, (first, two))) == []


def test_the_gravest_comes_first(diff: Diff) -> None:
    found = diff((HIGH, "gt: 8.0, clear: 4.0"), ("for: 2", "for: 2, run: calm"))

    assert (found[0].part, found[0].effect) == ("rule grad", "acts where it did not")
    assert found[-1].effect == "threshold loosened"
