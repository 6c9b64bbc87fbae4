"""What scenarios prove is counted: rules both ways, moves of the machine, budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from supervise.catalog import Subject
from supervise.lab import Coverage, run_suite

QUIET = (
    "  - {name: quiet, series: {train_loss_raw: '2x40', grad_global_norm: '1x40'}, expect: []}\n"
)
SPIKES = (
    "  - {name: spikes, series: {train_loss_raw: '2x30 6x3 2x60 6x3 2x60'}, expect: []}\n"  # twice
)


def covered(subject: Subject) -> Coverage:
    found = Coverage()
    found.add(subject, [outcome.result for outcome in run_suite(subject)])
    return found


def test_rules_are_shown_firing_and_quiet(subject: Callable[..., Subject]) -> None:
    """A rule whose metrics a scenario does not have is not shown quiet by it."""
    one = covered(subject(QUIET))
    assert one.rules == {"spike": [0, 1], "both": [0, 1], "grad": [0, 1], "dead": [0, 1]}

    found = covered(subject(QUIET + SPIKES))

    assert found.rules == {"spike": [1, 1], "both": [0, 1], "grad": [0, 1], "dead": [0, 2]}
    assert found.parts()["rules fire"] == (1, 4)
    assert found.parts()["rules stay quiet"] == (4, 4)
    missing = list(found.missing())
    assert any(line.endswith("p.yaml:10:5: both never fires") for line in missing), missing
    assert not any("spike" in line for line in missing)


def test_moves_and_budgets_are_counted(subject: Callable[..., Subject]) -> None:
    """The second spike finds the budget of one lr_scale spent, and holds."""
    found = covered(subject(QUIET + SPIKES))
    missing = list(found.missing())

    assert found.moves["p"]["launching", "first_frame"] == 2
    assert found.moves["p"]["nominal", "run"] == 1
    assert found.moves["p"]["acting", "hold"] == 1
    assert "p: 'released' never occurs in holding" in missing
    assert found.budgets == {"p": {"all": 0, "lr_scale": 1, "rollback": 0}}
    assert "p: budget rollback is never used up" in missing
    assert "p: budget lr_scale is never used up" not in missing
    shown, total = map(sum, zip(*found.parts().values(), strict=True))
    assert found.percent() == 100.0 * shown / total < 60


def test_a_policy_that_no_scenario_is_about_is_not_covered(subject: Callable[..., Subject]) -> None:
    """What it has counts, and what another policy shows is not shown for it."""
    found = covered(subject(QUIET + SPIKES))
    shown = found.parts()

    found.require(replace(subject(QUIET).policy, name="other"))

    assert found.parts()["moves"] == (shown["moves"][0], 2 * shown["moves"][1])
    assert found.parts()["budgets"] == (1, 6)
    assert "other: 'first_frame' never occurs in launching" in found.missing()
    assert "other: budget lr_scale is never used up" in found.missing()
