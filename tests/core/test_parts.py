"""The small parts: state machine, budgets, ladder, headlines, inputs of rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervise.catalog import load_policy
from supervise.core import can_fire, first_breach, incident_headline
from supervise.core.model import (
    DEFAULT_TRANSITIONS,
    Budget,
    Ladder,
    Ledger,
    entry_level,
    next_level,
    state_diagram,
    state_flaws,
)


def test_the_default_table_has_no_flaw():
    assert state_flaws(DEFAULT_TRANSITIONS) == []


def test_a_bad_table_is_explained():
    bad = {"launching": {"first_frame": "warming"}, "warming": {"redy": "nominl"}}
    trap = {"launching": {"first_frame": "warming"}}

    assert {(s, e) for s, e, _ in state_flaws(bad)} == {("warming", "redy")}
    assert any("can never be reached" in text for _, _, text in state_flaws(trap))
    assert any("can never reach 'halted'" in text for _, _, text in state_flaws(trap))


def test_a_budget_counts_at_its_edges():
    """n is allowed, n+1 is not; the window slides by frame_count."""
    budgets = {"rollback": Budget(2, per=100), "all": Budget(3, per=60.0)}
    ledger = Ledger()
    for frame_count in (0, 50):
        assert ledger.exhausted(budgets, "rollback", frame_count, 0) is None
        ledger.spend("rollback", frame_count, 0)

    assert ledger.exhausted(budgets, "rollback", 99, 0)[0] == "rollback"
    assert ledger.exhausted(budgets, "rollback", 100, 0) is None
    ledger.spend("rollback", 100, 0)
    assert ledger.exhausted(budgets, "lr_scale", 101, 0)[0] == "all"
    assert ledger.exhausted(budgets, "lr_scale", 101, int(60e9)) is None
    assert ledger.usage(budgets, 149, int(60e9)) == {"rollback": "2/2", "all": "0/3"}


def test_the_ladder_never_goes_lower():
    levels = Ladder(("soften", "rollback", "hold"))

    assert entry_level(levels, "soften", -1) == ("soften", 0)
    assert entry_level(levels, "soften", 1) == ("rollback", 1)
    assert entry_level(levels, "rollback", 0) == ("rollback", 1)
    assert next_level(levels, 0) == ("rollback", 1)
    assert next_level(levels, 2) == ("hold", 3)
    assert entry_level(levels, "stop-and-page", -1) == ("stop-and-page", -1)
    assert entry_level(levels, "stop-and-page", 1) == ("stop-and-page", -1)
    assert next_level(levels, -1)[0] == "hold"


def test_the_first_breach_is_the_earliest_of_its_stages():
    """A coupling begins with its first stage, m of n with its oldest sample; OK does not count."""
    numbers = {
        "chain": {"code": "BREACH", "match": {"first_step": 148, "last_step": 151}},
        "loss": {"code": "BREACH", "of": 3},
        "lr": {"code": "OK", "match": {"first_step": 3}},
    }

    assert first_breach(numbers, 151) == 148
    assert first_breach({"loss": {"code": "BREACH", "of": 5}}, 151) == 147


def test_a_headline_names_what_breached():
    """Metric, value, how far out and the limit; what is OK and what only couples is left out."""
    numbers = {
        "chain": {"code": "BREACH", "value": 151, "threshold": 5},
        "u": {"code": "BREACH", "metric": "update_norm", "value": 6.46, "z": 19.2, "threshold": 6},
        "l": {"code": "OK", "metric": "train_loss_raw", "value": 3.3, "z": 1.0, "threshold": 6.0},
        "n": {"code": "BREACH", "nonfinite": ["grad_global_norm"]},
    }

    assert incident_headline(numbers, "chain") == (
        "update_norm 6.46, z 19.2 (limit 6); grad_global_norm is NaN or Inf"
    )
    assert incident_headline({}, "chain") == "chain"
    silent = {"code": "BREACH", "signal": "step", "value": 130.2, "threshold": 120.0}
    assert incident_headline({"stalled": silent}, "x") == "no step for 130 s (limit 120 s)"


def test_the_drawing_in_the_readme_is_the_table():
    """The diagram in supervisor/README.md is the one that the table draws."""
    readme = Path(__file__).parents[2] / "supervisor" / "README.md"
    drawn = readme.read_text().partition("<!-- machine -->\n")[2].partition("<!-- /machine -->")[0]

    assert drawn == f"```mermaid\n{state_diagram()}```\n"


POLICY = """\
version: supervise/v1
mode: observe
detectors:
  a: {kind: threshold, metric: a, gt: 1.0}
  b: {kind: threshold, metric: b, gt: 1.0}
  either: {kind: join, any: [a, b], within: 2}
  both: {kind: join, all: [a, b], within: 2}
  chain: {kind: sequence, steps: [a, b], within: 2}
  bad: {kind: nonfinite, metrics: [a, b]}
  same: {kind: equal, metric: a, with: b}
  hang: {kind: absence, signal: step, after: {min: 60s}}
rules:
  - {id: or, when: a or b, sev: SEV2}
  - {id: and, when: a and b, sev: SEV2}
  - {id: but, when: a and not b, sev: SEV2}
  - {id: either, when: either, sev: SEV2}
  - {id: both, when: both, sev: SEV2}
  - {id: chain, when: chain, sev: SEV2}
  - {id: bad, when: bad, sev: SEV2}
  - {id: same, when: same, sev: SEV2}
  - {id: hang, when: hang, sev: SEV2}
"""
CAN = {
    (): {"hang"},
    ("a",): {"or", "either", "bad", "hang"},
    ("b",): {"or", "either", "bad", "hang"},
    ("a", "b"): {"or", "and", "but", "either", "both", "chain", "bad", "same", "hang"},
}


@pytest.mark.parametrize("there", CAN, ids=str)
def test_a_rule_can_fire_if_some_readings_of_what_is_there_make_it_true(there, tmp_path):
    (tmp_path / "p.yaml").write_text(POLICY)
    policy = load_policy(tmp_path / "p.yaml")

    found = {r.id for r in policy.rules if can_fire(policy, r, there.__contains__)}

    assert found == CAN[there]
