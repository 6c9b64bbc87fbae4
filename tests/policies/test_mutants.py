"""What a pack's scenarios prove: a number, comparator or inhibition that is changed is noticed.

The same as `supervise policy test policies/packs/<name>.yaml --mutate`, whose exit status says so
for one pack.
"""

from __future__ import annotations

import pytest

from supervise.catalog.inventory import shipped
from supervise.mutation import mutation_runner
from supervise.policytest import suite

pytestmark = pytest.mark.slow

PACKS = shipped.names("policies/packs")

# Changes that no scenario of the pack can notice, since nothing that it plays depends on them.
UNSEEN = {
    # By state, and the pack runs nothing, so that its runs never come to `acting` or `probation`.
    "schedule": {
        "inhibit of schedule.rate, schedule.restarted, schedule.phase, schedule.counters removed"
    },
    # What else `torn` asks for has more samples by then.
    "update_scale": {"update_scale.loss_z.min: 32 -> 16"},
}


@pytest.mark.parametrize("pack", PACKS)
def test_a_change_of_a_pack_is_noticed(pack: str) -> None:
    """By one of its own scenarios, whatever is changed, unless nothing at all can notice it."""
    path = shipped.folder("policies/packs") / f"{pack}.yaml"
    played = suite.run(suite.load(path))
    assert [one.form.name for one in played if one.failures] == []  # it would notice anything

    found = mutation_runner.run(path, jobs=1)

    assert found.total > 0
    assert {what for _, what in found.survivors} == UNSEEN.get(pack, set())
