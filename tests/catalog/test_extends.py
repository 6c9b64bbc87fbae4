"""`extends`: a policy that is its difference from another one."""

import pytest

from supervise.catalog import PolicyErrors, load_policy
from tests.support.recorded_run import shipped_policy

from .conftest import BASE, PACK, TEAM, VERSION


def test_a_few_lines_are_the_base_and_the_difference(load, tmp_path):
    """Mappings are merged, some lists add up, the rest replaces; the copy needs no other file."""
    policy = load(
        VERSION
        + """\
extends: team/base.yaml
mode: shadow
use: [nonfinite, hang]
override: {own.loud: {clear: 2.0}, high: {gt: 20.0}}
rules: [{id: not_high, when: not high, sev: SEV2}]
budgets: {all: {max: 3}}
escalate: {ladder: [hold]}
job: {relaunch: {args: ["--resume={checkpoint}"]}}
savepoints: {keep: 2}
""",
        {"team/base.yaml": BASE.replace(", hang]", "]")} | {"packs/own.yaml": PACK},
    )
    loud, high = policy.detectors["own.loud"], policy.detectors["high"]

    assert (policy.name, policy.mode, policy.notify) == (
        "p",
        "shadow",
        {"console": {"min_sev": "SEV1"}},
    )
    assert {"too_high", "not_high", "own.minor", "nonfinite.applied"} <= {
        rule.id for rule in policy.rules
    }
    assert (loud.gt, loud.clear, high.gt) == (9.0, 2.0, 20.0)
    assert (policy.budgets["all"].max, policy.budgets["all"].per_steps) == (3, 20000)
    assert (policy.ladder.levels, policy.ladder.reset_after_steps) == (("hold",), 100)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "p.yaml").write_text(policy.resolved)
    assert load_policy(tmp_path / "copy" / "p.yaml").digest == policy.digest


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ("hang, too_high, own.minor", {"own.major"}),
        ("hang, own", {"too_high"}),
        ("hang, own, too_high, high", set()),
    ],
)
def test_rules_and_packs_are_removed_with_what_names_them(load, names, left):
    """An override or an inhibition of the base about them is nobody's mistake."""
    policy = load(VERSION + f"extends: base.yaml\nremove: [{names}]\n", TEAM)

    assert {rule.id for rule in policy.rules} == left
    assert not policy.inhibit


def test_a_base_may_extend_another_one(load):
    """A team changes nano, and a job the team's; nano itself is the shipped one by its name."""
    files = {"team.yaml": VERSION + "extends: nano\nremove: [amp]\nprobation: 50\n"}
    policy = load(VERSION + "extends: team.yaml\nprobation: 70\nuse: [ranks]\n", files)
    nano = shipped_policy("nano")

    assert policy.probation_steps == 70
    own = {rule.id for rule in policy.rules}
    theirs = {rule.id for rule in nano.rules if not rule.id.startswith("amp.")}
    assert own > theirs and all(name.startswith("ranks.") for name in own - theirs)


def test_channels_of_the_command_line_are_added_to_the_policy():
    """They are part of its text and of its digest, so that a replay has them."""
    more = {"slack": {"url_env": "SLACK_URL"}}
    policy = load_policy("nano", notify=more)

    assert policy.notify.keys() == {"console", "slack"}
    assert policy.notify["slack"]["url_env"] == "SLACK_URL" and "SLACK_URL" in policy.resolved
    with pytest.raises(PolicyErrors, match="no key 'ur_env'"):
        load_policy("nano", notify={"slack": {"ur_env": "X"}})
