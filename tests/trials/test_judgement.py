"""Verdicts on synthetic arms: what passes, what fails, and what must never pass."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from supervise.trials import (
    IGNORABLE_GUARDS,
    ArmBuilder,
    Plan,
    arm_order,
    fill_placeholders,
    find_missing_placeholders,
    is_decided,
    judge_gate,
    plan_look,
)

STEPS = 400
INPUTS = {"data/manifest.json": "sha256:a", "eval/tasks.json": "sha256:b"}


def make_arm(seed=0, *, shift=0.0, batches=1, steps=STEPS, change=None, **about):
    """Return an arm: a falling loss with the noise of its batches and some of its own.

    `change` is called with the step and its values, which it may change.
    """
    shared, own = random.Random(batches), random.Random(f"{batches} {seed}")
    builder = ArmBuilder(metrics=("cpu_s",))
    for step in range(steps):
        loss = 2.0 + 6.0 * (step + 1) ** -0.5 + shared.gauss(0.0, 0.05) + own.gauss(0.0, 0.02)
        values = {
            "train_loss_raw": loss + shift,
            "grad_global_norm": math.exp(own.gauss(0.0, 0.2)),
            "update_norm": math.exp(own.gauss(-3.0, 0.1)),
            "tokens_per_update": 512.0,
            "update_skipped": 0.0,
            "batch_fingerprint": float(batches * 10_000 + step),
            "gpu_mem_allocated": 40.0,
            "cpu_s": 1.0,
        }
        if step % 50 == 0:
            values["fixed_probe_loss"] = 2.0 + own.gauss(0.0, 0.005)
        if change is not None:
            change(step, values)
        builder.add_frame(step, 0, 0, values)
    given = {"exit_code": 0, "inputs": INPUTS, **about}
    return replace(builder.arm(f"seed {seed}"), **given)


def on(first, **values):
    """Return a change of the values from a step on; None removes one."""

    def change(step, found):
        if step >= first:
            for name, value in values.items():
                found[name] = value
                if value is None:
                    del found[name]

    return change


def check_of(judgement, name):
    return next(one for one in judgement.checks if one.name == name)


BASELINE = make_arm(0)
PLAN = Plan()


def test_the_same_program_passes_with_an_interval():
    found = judge_gate([(BASELINE, make_arm(1))], PLAN)

    assert found.verdict == "PASS"
    assert found.pairs[0].paired
    assert found.effect.low < 0.002 and -0.002 < found.effect.high < PLAN.margin
    assert {c.status for c in found.checks} == {"pass", "not measured"}


def test_a_regression_fails_at_the_first_planned_look():
    found = judge_gate([(BASELINE, make_arm(1, shift=0.05))], PLAN)

    assert found.verdict == "FAIL"
    assert [look.fails for look in found.looks] == [True, True]
    assert found.effect is found.looks[0].effect
    assert found.reasons[0].startswith("loss: +0.05")


def test_a_large_regression_that_shrinks_is_established_by_the_loss_alone():
    def change(step, values):
        values["train_loss_raw"] += 0.3 + 0.5 * math.exp(-step / 60.0)

    found = judge_gate([(BASELINE, make_arm(1, change=change))], PLAN)

    assert found.loss[0] == "fail"
    assert found.effect.basis == "steps", "the curve leaves too few blocks"
    assert found.verdict == "FAIL"


def test_a_regression_at_the_margin_is_not_passed():
    verdicts = [
        judge_gate([(BASELINE, make_arm(seed, shift=PLAN.margin))], PLAN).verdict
        for seed in range(40)
    ]

    assert verdicts.count("PASS") <= 4, "alpha is 5 %"


def test_other_batches_are_unpaired_and_wider():
    found = judge_gate([(BASELINE, make_arm(1, batches=2))], PLAN)
    alike = judge_gate([(BASELINE, make_arm(1))], PLAN)

    assert not found.pairs[0].paired
    assert found.effect.high - found.effect.low > 1.5 * (alike.effect.high - alike.effect.low)


def test_noise_that_cancels_without_a_reason_does_not_narrow_the_interval():
    nameless = on(0, batch_fingerprint=None)
    found = judge_gate([(make_arm(0, change=nameless), make_arm(1, change=nameless))], PLAN)

    assert not found.pairs[0].paired
    assert found.pairs[0].excess > 2.0


@pytest.mark.parametrize(
    ("change", "about", "verdict", "check"),
    [
        (None, {"exit_code": 1, "inputs": {}}, "FAIL", "crash"),
        (None, {"exit_code": None}, "INCONCLUSIVE", "crash"),
        (on(390, train_loss_raw=math.nan), {}, "FAIL", "non_finite"),
        (on(399, grad_global_norm=math.inf), {}, "FAIL", "non_finite"),
        (on(398, grad_global_norm=math.inf, overflow=1.0), {}, "PASS", "non_finite"),
        (on(0, train_loss_raw=None), {}, "INCONCLUSIVE", "non_finite"),
        (on(0, grad_global_norm=3.0), {}, "FAIL", "grad_global_norm"),
        (on(0, grad_global_norm=None), {}, "INCONCLUSIVE", "grad_global_norm"),
        (on(0, update_norm=0.005), {}, "FAIL", "update_norm"),
        (on(0, gpu_mem_allocated=46.0), {}, "FAIL", "gpu_mem_allocated"),
        (on(380, update_skipped=1.0), {}, "FAIL", "skipped_updates"),
        (on(0, fixed_probe_loss=2.3), {}, "FAIL", "fixed_probe_loss"),
        (on(395, train_loss_raw=4.0), {}, "FAIL", "loss_spikes"),
        (on(300, lr_scale=0.5), {}, "FAIL", "interventions"),
        (on(0, tokens_per_update=256.0), {}, "VOID", "tokens_per_update"),
        (on(0, tokens_per_update=None), {}, "INCONCLUSIVE", "tokens_per_update"),
        (None, {"inputs": {**INPUTS, "data/manifest.json": "sha256:x"}}, "VOID", "data_manifest"),
        (None, {"inputs": {"data/manifest.json": "sha256:a"}}, "VOID", "eval_artifact"),
        (None, {"inputs": None}, "INCONCLUSIVE", "data_manifest"),
        (on(0, cpu_s=1.2), {}, "FAIL", "throughput"),
    ],
)
def test_guards_and_invariants(change, about, verdict, check):
    candidate = make_arm(1, change=change, **about)
    found = judge_gate([(BASELINE, candidate)], replace(PLAN, cpu_time="cpu_s"))

    assert found.verdict == verdict, found.reasons
    assert check_of(found, check).status == verdict.lower()
    assert verdict == "PASS" or any(reason.startswith(check) for reason in found.reasons)


@pytest.mark.parametrize(
    ("candidate", "planned", "is_short"),
    [
        (make_arm(1, steps=300), None, True),
        (make_arm(1, steps=0), None, True),
        (make_arm(1), 150, False),
        (make_arm(1, change=on(393, train_loss_raw=None)), None, False),
    ],
    ids=["stops early", "makes no step", "too few steps for blocks", "has steps without a loss"],
)
def test_a_candidate_without_enough_steps_is_inconclusive(candidate, planned, is_short):
    judgement = judge_gate([(BASELINE, candidate)], replace(PLAN, steps=planned))

    assert judgement.verdict == "INCONCLUSIVE"
    assert ("loss: the planned steps are not complete" in judgement.reasons) == is_short
    assert planned is None or judgement.effect.high < PLAN.margin


@pytest.mark.parametrize("about", [{"exit_code": 1}, {"live": True}, {"exit_code": None}])
def test_a_baseline_without_its_end_needs_a_planned_length(about):
    pair = [(make_arm(0, **about), make_arm(1))]

    assert judge_gate(pair, PLAN).verdict == "INCONCLUSIVE"
    assert judge_gate(pair, replace(PLAN, steps=STEPS)).verdict == "PASS"


def test_an_ignored_guard_does_not_count_but_a_crash_does():
    candidate = make_arm(1, change=on(0, grad_global_norm=3.0))
    ignoring = replace(PLAN, ignored=frozenset(IGNORABLE_GUARDS))

    assert judge_gate([(BASELINE, candidate)], ignoring).verdict == "PASS"
    assert judge_gate([(BASELINE, replace(candidate, exit_code=2))], ignoring).verdict == "FAIL"
    assert not {"crash", "non_finite"} & set(IGNORABLE_GUARDS)


def test_seeds_are_combined_and_calibration_widens():
    pairs = [(make_arm(0, batches=n), make_arm(1, batches=n)) for n in range(3)]
    found = judge_gate(pairs, PLAN)
    drifting = [
        (make_arm(0, batches=9), make_arm(n, batches=9, shift=shift))
        for n, shift in ((2, 0.05), (3, -0.06))
    ]

    assert found.verdict == "PASS"
    assert len(found.pairs) == 3
    assert judge_gate(pairs[:1], PLAN, drifting).verdict == "INCONCLUSIVE"
    assert judge_gate(pairs[:1], PLAN, drifting).effect.basis == "seeds"


def test_a_step_made_again_counts_once_and_is_an_intervention():
    builder = ArmBuilder()
    for attempt, loss in ((0, 9.0), (1, 2.0)):
        builder.add_frame(5, 0, attempt, {"train_loss_raw": loss, "tokens_per_update": 4.0})
        builder.add_frame(5, 1, attempt, {"train_loss_raw": loss + 1.0, "tokens_per_update": 4.0})
    arm = builder.arm("two ranks")

    assert arm.steps == {5: {"train_loss_raw": 2.5, "tokens_per_update": 8.0}}
    assert (arm.ranks, arm.attempts) == (2, 1)
    assert check_of(judge_gate([(BASELINE, arm)], PLAN), "interventions").status == "fail"


# ── how arms are made: commands, order, and looks over seeds ──────────────────────────────────────


SHORT_STEPS, SEEDS = 250, 3
SHORT = Plan(steps=SHORT_STEPS)


def test_placeholders_are_needed_and_filled_once():
    argv = ["train.py", "--out={out}/a", "--seed", "{seed}", "--n={steps}", "{other}"]

    assert find_missing_placeholders(argv, 3) == find_missing_placeholders(["{out}"], 1) == []
    assert find_missing_placeholders(["train.py"], 3) == ["{out}", "{seed}"]
    words = ["train.py", "--out=/s/{seed}/a", "--seed", "2", "--n=400", "{other}"]
    assert fill_placeholders(argv, "/s/{seed}", 2, 400) == words


def test_arms_take_turns_and_looks_share_alpha():
    assert [arm_order(n)[0] for n in range(4)] == ["baseline", "candidate"] * 2
    levels = [plan_look(SHORT, n, SEEDS).level for n in (1, 2, 3)]
    assert levels == sorted(levels) and levels[0] < 0.001
    assert sum(levels) == pytest.approx(SHORT.alpha)
    assert plan_look(SHORT, 1, 1).level == SHORT.alpha


def make_short(seed, rng, *, shift=0.0, drift=0.0, exit_code=0, stopped=False, cpu_s=None):
    """Return an arm whose mean is `drift` away from that of the program, by chance."""
    batches, builder, shift = random.Random(seed), ArmBuilder(), shift + rng.gauss(0.0, drift)
    for step in range(SHORT_STEPS):
        loss = 3.0 + batches.gauss(0.0, 0.05) + rng.gauss(0.0, 0.01) + shift
        values = {"train_loss_raw": loss, "batch_fingerprint": float(1000 * seed + step)}
        builder.add_frame(step, 0, 0, values)
    return replace(builder.arm(f"{seed}"), exit_code=exit_code, stopped=stopped, cpu_s=cpu_s)


def make_trial(rng, *, drift=0.0, **about):
    """Return the verdict of a trial, and the number of pairs that it took."""
    pairs, judgement = [], None
    while not pairs or (len(pairs) < SEEDS and not is_decided(judgement, len(pairs) - 1)):
        seed = len(pairs) + 1
        baseline = make_short(seed, rng, drift=drift)
        pairs.append((baseline, make_short(seed, rng, drift=drift, **about)))
        judgement = judge_gate(pairs, plan_look(SHORT, seed, SEEDS))
    return judgement.verdict, len(pairs)


def test_a_trial_ends_where_the_outcome_is_sure():
    rng = random.Random(0)

    assert make_trial(rng) == ("PASS", 3)
    assert make_trial(rng, shift=1.0) == ("FAIL", 1), "beyond what any drift explains"
    assert make_trial(rng, shift=0.05) == ("FAIL", 3), "one pair does not show the drift"
    assert make_trial(rng, exit_code=1) == ("FAIL", 1)


def test_drift_of_single_runs_seldom_fails_the_same_program():
    """Two runs of one program drift apart by chance, which blocks of one pair do not show."""
    rng = random.Random(1)

    assert [make_trial(rng, drift=0.02)[0] for _ in range(20)].count("FAIL") <= 2


def test_a_candidate_may_be_stopped_after_its_steps_only():
    rng = random.Random(2)
    pair = [(make_short(1, rng), make_short(1, rng, exit_code=143, stopped=True))]

    assert judge_gate(pair, SHORT).verdict == "PASS"
    assert judge_gate(pair, replace(SHORT, steps=SHORT_STEPS + 50)).verdict == "INCONCLUSIVE"
    killed = [(pair[0][0], make_short(1, rng, exit_code=137))]
    assert judge_gate(killed, SHORT).verdict == "FAIL"


def test_cpu_time_beside_the_runs_is_a_guard():
    rng = random.Random(3)

    def verdict(before, after):
        arms = make_short(1, rng, cpu_s=before), make_short(1, rng, cpu_s=after)
        found = judge_gate([arms], SHORT)
        return found.verdict, check_of(found, "throughput").status

    assert verdict(0.1, 0.105) == ("PASS", "pass")
    assert verdict(0.1, 0.12) == ("FAIL", "fail")
    assert verdict(None, 0.12) == ("PASS", "not measured")
