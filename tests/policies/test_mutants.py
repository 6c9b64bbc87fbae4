"""What a pack's scenarios prove: a number, comparator or inhibition that is changed is noticed.

The same as `supervise policy test policies/packs/<name>.yaml --mutate`, whose exit status says so
for one pack.
"""

from __future__ import annotations

import pytest

from supervise.catalog.inventory import shipped
from supervise.mutation import mutation_runner

pytestmark = pytest.mark.slow

# Changes that no scenario of the pack can notice, since nothing that it plays depends on them.
UNSEEN = {
    # By state, and the pack runs nothing, so that its runs never come to `acting` or `probation`.
    "schedule": {"inhibit of schedule.rate, schedule.restarted, schedule.counters removed"},
    # What else `torn` asks for has more samples by then.
    "update_scale": {"update_scale.loss_z.min: 32 -> 16"},
}


LONG = (
    "attention",
    "evaluation",
    "loss_spike",
    "routing",
    "throughput",
    "update_scale",
)

PACKS = [
    pytest.param(name, marks=pytest.mark.chaos if name in LONG else ())
    for name in shipped.names("policies/packs")
]


@pytest.mark.parametrize("pack", PACKS)
def test_a_change_of_a_pack_is_noticed(pack: str) -> None:
    """By one of its own scenarios, whatever is changed, unless nothing at all can notice it."""
    found = mutation_runner.run(shipped.folder("policies/packs") / f"{pack}.yaml", jobs=1)

    assert found.total > 0
    assert {what for _, what in found.survivors} == UNSEEN.get(pack, set())
