"""One round of checking is enough: no mistake hides another, and what only follows is not told."""

from __future__ import annotations

import re

import pytest

from supervise.catalog import PolicyErrors, Problem, shipped_folder

from .conftest import HEAD, ONE

ALL_WRONG = """\
version: supervise/v1
mode: enforce
use: [loss_spik, hang]
detectors:
  broken: {kind: threshold, metric: train_loss_raw, gt: x}
  twice: {kind: threshold, metric: train_loss_raw, gt: 3}
  twice: {kind: threshold, metric: train_loss_raw, gt: 4}
rules:
  - {id: r, whn: twice, sev: SEV1, run: rolback}
  - {id: s, when: broken or (twice, sevv: SEV1, see: nann}
  - {id: t, when: loss_spike.loss_z and loss_spik.loss_z and loss_spike.los_z and quux, sev: SEV2}
inhibit:
  - {by_rule: r, mute: [s, u, loss_spike.jump, loss_spik.jump]}
override:
  loss_spike.loss_z: {gtt: 3}
  loss_spik.loss_z: {gt: 3}
  hang.quux: {gt: 3}
budgets: {all: {max: 1}, rollback: {max: 1}}
savepoints: {evry: 25}
"""


def test_every_sort_of_mistake_is_told_in_one_round(mistakes):
    """No mistake hides another, and none is told that is gone when the others are mended."""
    found = [line.partition(" (known")[0] for line in mistakes(ALL_WRONG)]

    assert found == [
        "3:7: no pack 'loss_spik' (did you mean 'loss_spike'?)",
        "5:57: broken.gt should be a number, not the text 'x'",
        "7:3: duplicate key 'twice'; first in line 6",
        "9:13: rule r has no key 'whn' (did you mean 'when'?)",
        "9:41: rule r: no runbook 'rolback' (did you mean 'rollback-and-rewarm'?)",
        "10:29: rule s: this parenthesis is never closed",
        "10:37: rule s has no key 'sevv' (did you mean 'sev'?)",
        "10:54: rule s: no runbook 'nann' (did you mean 'nan'?)",
        "11:62: unknown detector 'loss_spike.los_z' (did you mean 'loss_spike.loss_z'?)",
        "11:83: unknown detector 'quux'",
        "13:28: inhibit: unknown rule 'u'",
        "15:23: loss_spike.loss_z has no key 'gtt' (did you mean 'gt'?)",
        "17:14: override of 'hang.quux': no pack in use has it (did you mean 'hang.stuck'?)",
        "19:14: savepoints has no key 'evry' (did you mean 'every'?)",
    ]


RIGHT = (
    HEAD
    + """\
use: [loss_spike]
budgets: {all: {max: 1}, lr_scale: {max: 1}, rollback: {max: 1}}
detectors: {a: {kind: nonfinite}}
savepoints: {every: 25}
rules: [{id: r, when: a and loss_spike.loss_z, sev: SEV1}]
inhibit: [{by_rule: r, mute: [loss_spike.jump]}]
override: {loss_spike.loss_z: {gt: 9}}
"""
)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("use: [loss_spike]", "use: [loss_spik]", "no pack 'loss_spik'"),
        ("use: [loss_spike]", "use: [zzz]", "no pack 'zzz'"),
        ("use: [loss_spike]", "use: loss_spike", "use should be a list"),
        ("detectors: {a: {kind: nonfinite}}", "detectors: 3", "detectors should be a mapping"),
        ("savepoints: {every: 25}", "savepoints: {evry: 1}", "savepoints has no key 'evry'"),
        ("savepoints: {", "savepoints: {every: 9}\nsavepoints: {", "duplicate key 'savepo"),
    ],
)
def test_what_only_follows_from_a_mistake_is_not_told(mistakes, right, wrong, said):
    """Names that may stand in what could not be read are no mistakes of their own."""
    [message] = mistakes(RIGHT.replace(right, wrong))

    assert said in message


NANO = shipped_folder("policies") / "nano.yaml"
SECTIONS = re.findall(r"^( *)([a-z_]+):", NANO.read_text("utf-8"), re.MULTILINE)
KEYS = [f"\n{indent}{key}:" for indent, key in SECTIONS if key != "version" and len(indent) < 3]


def test_misspelt_keys_are_one_mistake_each(mistakes):
    """A section goes on being read as what was meant, so that nothing seems to be missing."""
    text = NANO.read_text("utf-8")
    for key in KEYS:
        assert key in text
        text = text.replace(key, f"{key[:-1]}x:", 1)

    for key, mistake in zip(KEYS, mistakes(text), strict=True):
        assert f"{key.strip()[:-1]}x'" in mistake


def test_warnings_are_told_beside_mistakes(load):
    warnings: list[Problem] = []
    text = HEAD + (
        "detectors:\n  a: {kind: threshold, metric: train_los_raw, gt: 3}\n"
        "  b: {kind: threshold, metric: train_loss_raw, gt: 3}\n"
        "  c: {kind: threshold, metric: train_loss_raw, gt: 3}\n"
        "  d: {kind: nonfinite}\n"
        "  e: {kind: join, any: [d], within: 3}\n"
        "rules:\n  - {id: r, when: a, sev: SEV9}\n  - {id: s, when: b or (e, sev: SEV2}\n"
    )

    with pytest.raises(PolicyErrors) as raised:
        load(text, warnings=warnings)

    assert len(raised.value.problems) == 2
    assert [f"{w.line}: {w.message} ({w.hint})" for w in warnings] == [
        "4: a: no collector measures 'train_los_raw' (did you mean 'train_loss_raw'?)",
        "6: no rule reads the detector 'c' (None)",
    ]


def test_what_needs_a_budget_says_what_leads_there(mistakes):
    """The rule, and each step of the chain, at the line that wants the runbook."""
    found = mistakes(HEAD + ONE + "rules: [{id: r, when: a, sev: SEV1, run: tighten-clip}]\n")

    assert found[0].startswith(
        "4:42: no budget 'all', which clip in tighten-clip needs; rule r runs"
    )
    assert found[2] == (
        "4:42: no budget 'lr_scale', which lr_scale in soften needs; rule r runs tighten-clip, "
        "if_it_fails: clip-updates, if_it_fails: soften (add lr_scale: {max: 2, per: 5000} to "
        "budgets)"
    )
    assert len(found) == 3
