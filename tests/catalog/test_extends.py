"""`extends`: a policy that is its difference from another one."""

from __future__ import annotations

import pytest

from supervise.catalog import PolicyErrors, load_policy
from tests.support.recorded_run import shipped_policy

HEAD = "version: supervise/v1\n"
BASE = (
    HEAD
    + """\
policy: base
mode: enforce
use: [own, hang]
override: {own.loud: {gt: 9.0, clear: 3.0}}
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 12.0}}
rules: [{id: too_high, when: high, sev: SEV1}]
inhibit: [{by_rule: too_high, mute: [own.minor]}]
budgets: {all: {max: 6, per: 20000}, rollback: {max: 2}, restart: {max: 1}, lr_scale: {max: 4}}
savepoints: {every: 25, keep: 4}
escalate: {ladder: [soften, rollback-and-rewarm, hold], reset_after: 100}
notify: {console: {min_sev: SEV1}}
"""
)
PACK = (
    HEAD
    + """\
pack: own
summary: One bound.
status: experimental
source: [none]
false_alarms: [none]
detectors: {loud: {kind: threshold, metric: train_loss_raw, gt: 1.0}}
rules: [{id: minor, when: loud, sev: SEV2}, {id: major, when: loud, sev: SEV1, for: 9}]
"""
)
FILES = {"base.yaml": BASE, "packs/own.yaml": PACK}


def test_a_few_lines_are_the_base_and_the_difference(load, tmp_path):
    """Mappings are merged, some lists add up, the rest replaces; the copy needs no other file."""
    policy = load(
        HEAD
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
    policy = load(HEAD + f"extends: base.yaml\nremove: [{names}]\n", FILES)

    assert {rule.id for rule in policy.rules} == left
    assert not policy.inhibit


def test_a_base_may_extend_another_one(load):
    """A team changes nano, and a job the team's; nano itself is the shipped one by its name."""
    files = {"team.yaml": HEAD + "extends: nano\nremove: [amp]\nprobation: 50\n"}
    policy = load(HEAD + "extends: team.yaml\nprobation: 70\nuse: [ranks]\n", files)
    nano = shipped_policy("nano")

    assert policy.probation_steps == 70
    own = {rule.id for rule in policy.rules}
    theirs = {rule.id for rule in nano.rules if not rule.id.startswith("amp.")}
    assert own > theirs and all(name.startswith("ranks.") for name in own - theirs)


@pytest.mark.parametrize(
    ("line", "files", "said"),
    [
        ("extends: nanno", {}, "p.yaml:2:10: no shipped policy 'nanno' (did you mean 'nano'?)"),
        (
            "extends: team",
            {"team.yaml": BASE},
            "p.yaml:2:10: no shipped policy 'team' (write team.yaml)",
        ),
        (
            "extends: ../team.yaml",
            {},
            "p.yaml:2:10: no policy '../team.yaml': no such file (a path begins at this file)",
        ),
        (
            "extends: a.yaml",
            {"a.yaml": HEAD + "extends: p.yaml\n"},
            "a.yaml:2:10: policies extend each other: p.yaml -> a.yaml -> p.yaml",
        ),
        (
            "extends: base.yaml\noverride: {own.lod: {gt: 2.0}}",
            FILES,
            "p.yaml:3:21: override of 'own.lod': no pack in use has it (did you mean 'own.loud'?)",
        ),
        (
            "extends: base.yaml\noverrid: {high: {gt: 2.0}}",
            FILES,
            "p.yaml:3:1: the file has no key 'overrid' (did you mean 'override'?)",
        ),
        (
            "extends: base.yaml\nremove: [own.mino]",
            FILES,
            "p.yaml:3:10: remove: no rule and no pack of a base has the name 'own.mino' "
            "(did you mean 'own.minor'?)",
        ),
        (
            "extends: base.yaml\ndetectors: {high: {kind: nonfinite, metrics: [train_loss_raw]}}",
            FILES,
            "p.yaml:3:13: the base has a detector 'high' already (override: {high: ...} changes "
            "it)",
        ),
        (
            "extends: base.yaml\nuse: amp",
            FILES,
            "p.yaml:3:6: use should be a list, not the text 'amp'",
        ),
        (
            "extends: base.yaml",
            {**FILES, "base.yaml": BASE.replace("gt: 12.0", "gtt: 12.0")},
            "base.yaml:6:61: high has no key 'gtt' (did you mean 'gt'?)",
        ),
        (
            "extends: base.yaml\njob: {relaunch: {}}\nuse: [nonfinite]",
            {**FILES, "base.yaml": BASE.replace("restart: {max: 1}, ", "")},
            "p.yaml:4:7: no budget 'restart', which relaunch in relaunch-and-rewarm needs; "
            "rule nonfinite.poisoned runs rollback-and-rewarm, if_refused: relaunch-and-rewarm "
            "(add restart: {max: 2, per: 5000} to budgets)",
        ),
        (
            "extends: packs/base.yaml",
            {"packs/base.yaml": HEAD + "pack: base\n"},
            "base.yaml:2:7: this is a pack, not a policy (use: [base] in a policy)",
        ),
    ],
)
def test_a_mistake_is_reported_once_in_the_file_that_makes_it(load, line, files, said):
    with pytest.raises(PolicyErrors) as raised:
        load(HEAD + line + "\n", files)

    assert [str(problem).rpartition("/")[2] for problem in raised.value.problems][:1] == [
        said.rpartition("/")[2]
    ]
    assert len(raised.value.problems) == 1


def test_channels_of_the_command_line_are_added_to_the_policy():
    """They are part of its text and of its digest, so that a replay has them."""
    more = {"slack": {"url_env": "SLACK_URL"}}
    policy = load_policy("nano", notify=more)

    assert policy.notify.keys() == {"console", "slack"}
    assert policy.notify["slack"]["url_env"] == "SLACK_URL" and "SLACK_URL" in policy.resolved
    with pytest.raises(PolicyErrors, match="no key 'ur_env'"):
        load_policy("nano", notify={"slack": {"ur_env": "X"}})
