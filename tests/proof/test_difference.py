"""The differences of two policies, and their effects for the person who approves one."""

from __future__ import annotations

from typing import Any

import pytest

from supervise.catalog import compose_policy, policy_document
from supervise.lab import Change, compare_policies


@pytest.fixture
def diff(tmp_path, small):
    """Return a function that compares the small policy with one in which texts are replaced."""

    def diff(*changes, base=small):
        documents: list[dict[str, Any]] = []
        for text in (base, replaced(base, *changes)):
            (tmp_path / "p.yaml").write_text(text, "utf-8")
            documents.append(policy_document(compose_policy(tmp_path / "p.yaml")))
        return compare_policies(*documents)

    return diff


def replaced(text, *changes):
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


LOOSER = ("gt: 5.0, clear: 4.0", "gt: 8.0, clear: 4.0")
ACTS = ("for: 2", "for: 2, run: calm")
SHADOW = ("run: calm}", "run: calm, mode: shadow}")
ANY = ("high and wild", "high or wild")


@pytest.mark.parametrize(
    ("change", "part", "key", "old", "new", "effect"),
    [
        (LOOSER, "detector high", "gt", 5.0, 8.0, "threshold loosened"),
        (("gt: 9.0", "gt: 9.0, for: 3"), "detector wild", "for", 1, 3, "fires later"),
        ((", run: calm", ""), "rule spike", "run", "calm", None, "no longer acts"),
        (ACTS, "rule grad", "run", None, "calm", "acts where it did not"),
        (("for: 2", "for: 9"), "rule grad", "for", 2, 9, "fires later"),
        (("sev: SEV1", "sev: SEV0"), "rule spike", "sev", "SEV1", "SEV0", "more severe"),
        (SHADOW, "rule spike", "mode", None, "shadow", "no longer acts"),
        (("mode: enforce", "mode: shadow"), "mode", "", "enforce", "shadow", "no longer acts"),
        (("all: {max: 4}", "all: {max: 5}"), "budget all", "max", 4, 5, "may act more often"),
        (("per: 1000", "per: 9000"), "budget lr_scale", "per", 1000, 9000, "may act less often"),
        (("mute: [grad]", "mute: [both]"), "rule both", "muted by", None, "spike", "muted more"),
        (("every: 5", "every: 6"), "savepoints", "every", 5, 6, "changed"),
        (ANY, "rule both", "when", *ANY, "changed"),
    ],
)
def test_a_change_has_its_old_and_new_value_and_its_effect(
    change, part, key, old, new, effect, diff
):
    assert Change(part, key, old, new, effect) in diff(change)


def test_a_rule_that_acts_and_one_that_only_reports_differ_where_they_come_or_go(diff):
    rule = "  - {id: spike, when: high, sev: SEV1, run: calm}\n"

    def effects(*changes):
        return {(change.part, change.effect) for change in diff(*changes)}

    def added(other):
        return ", for: 2}\n", f", for: 2}}\n{other.replace('spike', 'x')}"

    removed = effects((rule, ""), ("by_rule: spike", "by_rule: both"))
    assert ("rule spike", "no longer acts") in removed
    assert effects(added(rule)) == {("rule x", "acts where it did not")}
    assert effects(added(rule.replace(", run: calm", ""))) == {("rule x", "watches more")}


def test_names_grouped_mutes_and_defaults_that_are_spelt_out_are_no_difference(diff, small):
    assert diff(("policy: p", "policy: q\nsummary: other")) == []
    assert diff(("gt: 9.0", "gt: 9.0, for: 1")) == []
    mute = "  - {by_rule: spike, mute: [grad]}\n"
    two, joined = mute + mute.replace("grad", "both"), mute.replace("[grad]", "[grad, both]")
    assert diff((two, joined), base=replaced(small, (mute, two))) == []


def test_the_gravest_difference_comes_first(diff):
    changes = diff(LOOSER, ACTS)

    assert (changes[0].part, changes[0].effect) == ("rule grad", "acts where it did not")
    assert changes[-1].effect == "threshold loosened"
