"""Every expectation: what it takes for it to come true, and what is said when it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from supervise.lab import Outcome

# spike and both at 30, grad at 31 while spike mutes it; a runbook at 30; quiet from 33 on.
STORY = 'series: {train_loss_raw: "2x30 6x3 2x60", grad_global_norm: "1x30 10x3 1x60"}\nexpect:\n'

EXPECTED = [
    ("at: 30, rule: spike", None),
    ("at: 31, rule: spike, is: firing", "spike fired at 30; expected at 31"),
    ("by: 29, rule: spike", "spike fired at 30; expected by 29"),
    ("between: [31, 40], rule: spike", "spike fired at 30; expected between 31 and 40"),
    ("by: 32, rule: spike, is: cleared", "spike cleared at 33; expected by 32"),
    ("between: [30, 32], rule: spike, is: on", None),
    ("between: [30, 33], rule: spike, is: on", "spike does not fire at 33"),
    ("at: 29, rule: spike, is: quiet", None),
    ("by: 40, rule: spike, is: quiet", "spike fires at 30"),
    ("between: [33, 92], rule: spike, is: quiet", None),
    ("by: 40, rule: grad, is: muted", None),
    ("by: 40, rule: both, is: muted", "no muting of both by 40: it never occurred"),
    ("rule: spike, count: 1", None),
    ("rule: spike, count: 2", "spike fired 1 times, not 2: it occurred at 30"),
    ("at: 20, state: nominal", None),
    ("at: 20, state: acting", "the state is nominal, not acting"),
    ("between: [20, 32], state: holding", "the state is nominal then acting, not holding"),
    ("end: true, state: probation", "the state is nominal, not probation"),
    ("by: 30, actions: [snapshot, lr_scale], count: 1", None),
    ("by: 30, actions: [lr_scale, snapshot]", "expected lr_scale, snapshot, in this order"),
    ("by: 29, actions: [lr_scale]", "actions were none; expected lr_scale"),
    ("by: 90, actions: [lr_scale], count: 2", "lr_scale 1 times, not 2"),
    ("by: 30, actions: []", "actions were snapshot, lr_scale"),
    ("at: 30, severity: SEV1", None),
    ("by: 90, severity: SEV0", "no incident of SEV0 by 90: it never occurred"),
    ("at: 30, budget: {all: 1, lr_scale: 1}", None),
    ("end: true, budget: {all: 2, rollback: 1}", "budget all: 1 used, budget rollback: 0 used"),
    ("by: 30, message: at step 30 (spike)", None),
    ("by: 20, message: at step 30 (spike)", "'at step 30 (spike)' by 20: it occurred at 30"),
    ("by: 40, suppressed: 'inhibit:spike'", None),
    ("never: [dead, rollback, SEV0, holding]", None),
    ("never: [spike]", "spike must not occur: it occurred at 30"),
    ("never: [probation]", "probation must not occur: it occurred at"),
    ("never: [spike], by: 29", None),
    ("never: [spike], between: [29, 31]", "spike must not occur: it occurred at 30"),
    ("at: 93, rule: spike", "the scenario ends at frame 92"),
]


@pytest.mark.parametrize(("keys", "said"), EXPECTED)
def test_an_expectation(keys: str, said: str | None, outcome: Callable[..., Outcome]) -> None:
    """The sentence stands at the line of the expectation."""
    found = outcome(f"{STORY}  - {{{keys}}}\n")

    assert [message for _, message in found.failures if said is None] == []
    if said is not None:
        ((where, message),) = found.failures
        assert said in message
        assert where.endswith("p.test.yaml:7:9")


def test_every_failure_is_told_at_its_own_line(outcome: Callable[..., Outcome]) -> None:
    found = outcome(f"{STORY}  - {{never: [spike]}}\n  - {{by: 9, rule: dead}}\n")

    assert [where.rpartition("p.test.yaml:")[2] for where, _ in found.failures] == ["7:9", "8:9"]
