"""How arms are made: commands, order, and looks over seeds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from supervise.trials import (
    ArmBuilder,
    Plan,
    arm_order,
    filled_gate,
    is_decided,
    judge_gate,
    missing_metrics,
    plan_of,
)

STEPS, SEEDS = 250, 3
PLAN = Plan(steps=STEPS)


def test_placeholders_are_needed_and_filled():
    argv = ["train.py", "--out={out}/a", "--seed", "{seed}", "--n={steps}", "{other}"]

    assert missing_metrics(argv, 3) == missing_metrics(["{out}"], 1) == []
    assert missing_metrics(["{out}"], 2) == ["{seed}"]
    assert missing_metrics(["train.py"], 3) == ["{out}", "{seed}"]
    words = ["train.py", "--out=/s/{seed}/a", "--seed", "2", "--n=400", "{other}"]
    assert filled_gate(argv, "/s/{seed}", 2, 400) == words, "what was filled in is not filled again"


def test_arms_take_turns_and_looks_share_alpha():
    assert [arm_order(n)[0] for n in range(4)] == ["baseline", "candidate"] * 2
    levels = [plan_of(PLAN, n, SEEDS).level for n in (1, 2, 3)]
    assert levels == sorted(levels) and levels[0] < 0.001
    assert sum(levels) == pytest.approx(PLAN.alpha)
    assert plan_of(PLAN, 1, 1).level == PLAN.alpha


def make_arm(seed, rng, *, shift=0.0, drift=0.0, exit_code=0, stopped=False, cpu_s=None):
    """Return an arm whose mean is `drift` away from that of the program, by chance."""
    batches, builder, own = random.Random(seed), ArmBuilder(), rng.gauss(0.0, drift)
    for step in range(STEPS):
        loss = 3.0 + batches.gauss(0.0, 0.05) + rng.gauss(0.0, 0.01) + shift + own
        values = {"train_loss_raw": loss, "batch_fingerprint": float(1000 * seed + step)}
        builder.take(step, 0, 0, values)
    return replace(builder.arm(f"{seed}"), exit_code=exit_code, stopped=stopped, cpu_s=cpu_s)


def make_trial(rng, **about):
    """Return the verdict of a trial, and the number of pairs that it took."""
    pairs = []
    for number in range(1, SEEDS + 1):
        drift = about.get("drift", 0.0)
        pairs.append((make_arm(number, rng, drift=drift), make_arm(number, rng, **about)))
        found = judge_gate(pairs, plan_of(PLAN, number, SEEDS))
        if number == SEEDS or is_decided(found, number - 1):
            return found.verdict, number
    raise AssertionError


def test_a_trial_ends_where_the_outcome_is_sure():
    rng = random.Random(0)

    assert make_trial(rng) == ("PASS", 3)
    assert make_trial(rng, shift=1.0) == ("FAIL", 1), "beyond what any drift explains"
    assert make_trial(rng, shift=0.05) == ("FAIL", 3), "one pair does not show the drift"
    assert make_trial(rng, exit_code=1) == ("FAIL", 1)


@pytest.mark.parametrize("drift", [0.01, 0.02])
def test_drift_of_single_runs_seldom_fails_the_same_program(drift):
    """Two runs of one program drift apart by chance, which blocks of one pair do not show."""
    rng = random.Random(1)
    found = [make_trial(rng, drift=drift)[0] for _ in range(20)]

    assert found.count("FAIL") <= 2


def test_a_candidate_may_be_stopped_after_its_steps_only():
    rng = random.Random(2)
    pair = [(make_arm(1, rng), make_arm(1, rng, exit_code=143, stopped=True))]

    assert judge_gate(pair, PLAN).verdict == "PASS"
    assert judge_gate(pair, replace(PLAN, steps=STEPS + 50)).verdict == "INCONCLUSIVE"
    killed = [(pair[0][0], make_arm(1, rng, exit_code=137))]
    assert judge_gate(killed, PLAN).verdict == "FAIL"


def test_cpu_time_beside_the_runs_is_a_guard():
    rng = random.Random(3)

    def verdict(before, after):
        arms = make_arm(1, rng, cpu_s=before), make_arm(1, rng, cpu_s=after)
        found = judge_gate([arms], PLAN)
        return found.verdict, next(c.status for c in found.checks if c.name == "throughput")

    assert verdict(0.1, 0.105) == ("PASS", "pass")
    assert verdict(0.1, 0.12) == ("FAIL", "fail")
    assert verdict(None, 0.12) == ("PASS", "not measured")
