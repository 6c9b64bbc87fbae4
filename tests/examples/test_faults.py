"""What the example's policy does about faults, step for step, asked of `supervise backtest`.

`faults.csv` holds steps 64 to 155 of the first attempt of runs that `benchmarks/recovery.py` makes
with seed 0; a fault begins at step 150. What is promised there takes an hour to measure: a policy
that only tells of what it has to mend must not get so far.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.supervised_run import REPOSITORY, Supervise

FAULT = 150
SOON = 2  # steps after the fault by which it is acted on
SEVERAL = 3  # with two ranks: the mean of their losses shows half of what one of them has
POLICY = REPOSITORY / "examples" / "nano" / "policy.yaml"
RUNBOOKS = {
    "batch_cut": "hold-for-config",
    "bit_of_a_weight": "rollback-and-rewarm",
    "garbage_on_rank_1": "rollback-and-rewarm",
    "random_tokens": "rollback-and-rewarm",
    "rate_x30": "hold-rate",
    "repeated_tokens": "rollback-and-rewarm",
    "second_moments": "undo-update",
    "shuffled_labels": "rollback-and-rewarm",
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what the policy makes of each run."""
    runs = Path(__file__).with_name("faults.csv")
    command = Supervise(tmp_path_factory.mktemp("faults"))
    result = command("backtest", "--policy", POLICY, "--json", runs)
    assert result.returncode == 0, result.stderr
    runs_by_fault = {run["run"]: run for run in map(json.loads, result.stdout.splitlines())}
    assert runs_by_fault.keys() == RUNBOOKS.keys()
    return runs_by_fault


@pytest.mark.parametrize("fault", RUNBOOKS)
def test_a_fault_is_acted_on_within_few_steps(fault, judged):
    """And nothing before it."""
    first = judged[fault]["actions"][0]

    assert first["runbook"] == RUNBOOKS[fault]
    assert FAULT <= first["step"] <= FAULT + (SEVERAL if "rank" in fault else SOON)
