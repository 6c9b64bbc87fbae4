"""Policies with one thing wrong, and whether scenarios notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from supervise.catalog.scenario_subject import Subject
from supervise.core.model.decisions import BREACH, OK
from supervise.mutation import mutation_runner
from supervise.mutation.mutants import Mutant, mutants

EMPTY = (
    "  - {name: nothing, series: {train_loss_raw: '2x9', grad_global_norm: '1x9'}, expect: []}\n"
)

# Every number of the small policy's rules and detectors, from both sides.
STRONG = """\
  - name: just above and just below
    series:
      train_loss_raw: "2x20 5.01 4.5x3 3.99 2x20 4.99 2x20"
      grad_global_norm: "1x20 9.01x2 1x2 8.99x2 1x40"
    expect:
      - {at: 20, rule: spike}
      - {at: 24, rule: spike, is: cleared}
      - {rule: spike, count: 1}
      - {at: 20, rule: both}
      - {at: 22, rule: both, is: cleared}
      - {at: 21, rule: grad}
      - {rule: grad, count: 1}
      - {at: 21, rule: grad, is: muted}
"""
ONLY_RULES = """\
version: supervise/v1
policy: p
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 5.0, clear: 4.0}
  wild: {kind: threshold, metric: grad_global_norm, gt: 9.0}
rules:
  - {id: spike, when: high, sev: SEV1}
  - {id: both, when: high and wild, sev: SEV2}
  - {id: grad, when: wild, sev: SEV2, for: 2}
inhibit:
  - {by_rule: spike, mute: [grad]}
"""

ALL = [
    ("4:55", "high.gt: 5.0 -> 10.0"),
    ("4:55", "high.gt: 5.0 -> 2.5"),
    ("4:67", "high.clear: 4.0 -> 2.0"),
    ("4:55", "high.gt -> lt"),
    ("5:57", "wild.gt: 9.0 -> 18.0"),
    ("5:57", "wild.gt: 9.0 -> 4.5"),
    ("5:57", "wild.gt -> lt"),
    ("8:22", "both.when: (high or wild)"),
    ("9:44", "grad.for: 2 -> 4"),
    ("9:44", "grad.for: 2 -> 1"),
    ("11:5", "inhibit of grad removed"),
]


def told(found: list[Mutant]) -> list[tuple[str, str]]:
    return [(mutant.where.partition("p.yaml:")[2], mutant.what) for mutant in found]


def test_everything_that_the_file_says_is_changed_once_each_way(
    subject: Callable[..., Subject],
) -> None:
    found = mutants(subject(EMPTY, ONLY_RULES))

    assert told(found) == ALL


def test_each_mutant_differs_in_that_thing_only(subject: Callable[..., Subject]) -> None:
    """And the policy it came from stays as it was."""
    base = subject(EMPTY, ONLY_RULES)
    before = repr(base.policy.detectors), base.policy.inhibit, len(base.policy.rules)
    built = {mutant.what: mutant.build() for mutant in mutants(base)}

    assert built["high.gt: 5.0 -> 10.0"].detectors["high"].gt == 10.0
    assert built["high.gt: 5.0 -> 2.5"].detectors["high"].clear == 2.0  # stays behind the limit
    assert built["high.gt -> lt"].detectors["high"].lt == 5.0
    assert built["high.gt -> lt"].detectors["high"].gt is None
    assert built["grad.for: 2 -> 1"].rules[2].for_steps == 1
    assert built["inhibit of grad removed"].inhibit == ()
    when = built["both.when: (high or wild)"].rules[1].when
    assert (when([BREACH, OK]), base.policy.rules[1].when([BREACH, OK])) == (BREACH, OK)
    assert (repr(base.policy.detectors), base.policy.inhibit, len(base.policy.rules)) == before


def test_budgets_ladders_savepoints_and_runbooks_are_changed_too(
    subject: Callable[..., Subject], small: str
) -> None:
    """The digest tells: each of them is another policy."""
    base = subject(EMPTY, small + "baseline: {window: 64, min: 32}\n")
    found = {mutant.what: mutant.build() for mutant in mutants(base)}

    assert found["budgets.lr_scale.max: 1 -> 2"].budgets["lr_scale"].max == 2
    assert found["budgets.lr_scale.per: 1000 -> 500"].budgets["lr_scale"].per_steps == 500
    assert found["savepoints.every: 5 -> 10"].savepoints["every"] == 10
    assert found["probation: 20 -> 40"].probation_steps == 40
    assert found["runbook calm: set: 0.5 -> 0.25"].runbooks["calm"].steps[1].set == 0.25
    assert found["runbook calm: clear_for: 5 -> 10"].runbooks["calm"].steps[2].clear_for == 10
    assert "runbook calm: set: 0.5 -> 1.0" in found
    assert "baseline.window: 64 -> 128" in found
    assert "baseline.min: 32 -> 64" in found
    remade = [policy for what, policy in found.items() if what.startswith(("budgets", "runbook"))]
    assert len({policy.digest for policy in remade} | {base.policy.digest}) == len(remade) + 1


def test_what_packs_say_is_theirs_and_what_overrides_say_is_ours(
    subject: Callable[..., Subject],
) -> None:
    policy = (
        "version: supervise/v1\nmode: observe\nuse: [update_scale]\n"
        "override: {update_scale.lr_fell: {ref: 40}}\n"
    )
    found = told(mutants(subject(EMPTY, policy)))

    assert [where for where, _ in found] == ["4:40"] * len(found)
    assert found[0][1] == "update_scale.lr_fell.ref: 40 -> 80"


def test_strong_scenarios_leave_no_survivor(write: Callable[..., Path]) -> None:
    found = mutation_runner.run(write(STRONG, ONLY_RULES), jobs=1)

    assert (found.total, found.survivors) == (len(ALL), ())
