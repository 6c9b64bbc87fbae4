"""What the rules of checkpoints say of evaluations."""

from __future__ import annotations

import pytest

from supervise.catalog import load_policy
from supervise.core import RankMonitor
from supervise.core.model import BREACH, LateFrame


@pytest.fixture
def breaches(tmp_path):
    """Judge the values of evaluations, one after the other, by a pack; return rules in breach."""

    def judge(pack, *evaluations):
        path = tmp_path / f"{pack}.yaml"
        path.write_text(f"version: supervise/v1\npolicy: one\nuse: [{pack}]\n")
        policy = load_policy(path)
        monitor = RankMonitor(policy)
        for step, values in enumerate(evaluations):
            monitor.feed_late(LateFrame(0, "checkpoint", 0, step, values), 0)
        rules = {rule.id for rule in policy.rules if rule.when(monitor.codes) == BREACH}
        return {rule.removeprefix(f"{pack}.") for rule in rules}

    return judge
