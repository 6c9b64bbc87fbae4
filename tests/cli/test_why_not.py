"""supervise why-not: the missing condition, the distance, or what held a rule back."""

from __future__ import annotations

import json
import math
import re

import pytest

from supervise.core.model import Announced, Frame, Gap, LateFrame
from tests.support.recorded_run import SECOND, SMALL, shipped_policy

CALM = [2.0 + 0.01 * (i % 5) for i in range(40)]


@pytest.fixture
def ask(supervise):
    """A function that asks and returns the answer as data."""

    def call(run, rule, step, *more):
        code, out, err = supervise(
            "why-not", "--json", run.path, "--rule", rule, "--step", step, *more
        )
        assert code == 0, err
        return json.loads(out)

    return call


def test_a_z_says_its_baseline_and_its_quota(ask, keep_run, make_frames):
    run = keep_run(make_frames(0, *CALM, 2.06, 3.0, *CALM))
    near, far = ask(run, "odd", 40), ask(run, "odd", 41)

    [condition] = near["missing"]
    assert 2.0 < condition["measured"] < 6.0
    assert condition["short_by"] == pytest.approx(6.0 - condition["measured"])
    assert "baseline 2.02 +- 0.01483 over steps 8..39" in condition["text"]
    [condition] = far["missing"]
    assert (condition["raw"], condition["code"]) == ("BREACH", "OK")
    assert "is > 6; 1 of the 2 breaches it needs in the newest 3 samples" in condition["text"]


def test_unknown_says_why(ask, keep_run, make_frames):
    run = keep_run(make_frames(0, *CALM, None, math.nan, 2.0))

    for step, why in (
        (40, "train_loss_raw is absent in this frame"),
        (41, "train_loss_raw is NaN"),
    ):
        answer = ask(run, "spike", step)
        assert answer["code"] == "UNKNOWN"
        assert answer["verdict"] == f"its condition is unknown: high: UNKNOWN: {why}"
    answer = ask(run, "blind", 3)
    assert answer["inactive"] == "the job never announced my_score"
    assert "not evaluated in this run" in answer["verdict"]


def test_a_metric_that_came_late_is_asked_about_at_the_step_it_was_measured_at(
    ask, keep_run, make_frames
):
    events = make_frames(0, *[2.0] * 50)
    late = [LateFrame(51 * SECOND, "checkpoint", 0, step, {"my_score": 0.5}) for step in (20, 30)]
    late.append(LateFrame(52 * SECOND, "checkpoint", 0, 40, {"my_score": 3.0}))
    run = keep_run([*events, *late])

    calm, high = ask(run, "blind", 30), ask(run, "blind", 40)

    assert [c["measured"] for c in calm["missing"]] == [0.5]
    assert (calm["code"], high["code"], high["fired"]) == ("OK", "BREACH", True)


def test_for_says_how_many_of_how_many(ask, keep_run, make_frames):
    run = keep_run([*make_frames(0, *[2.0] * 20), *make_frames(20, 2.0, 2.0, grad=10.0)])

    assert "held for 1 of the 2 steps" in ask(run, "grad", 20)["verdict"]
    assert ask(run, "grad", 20)["missing"] == []
    assert ask(run, "grad", 21)["fired"]


def test_one_that_did_fire_names_its_record(ask, supervise, keep_run, make_frames):
    run = keep_run(make_frames(0, *CALM, 8.0, 8.0, *[2.0] * 40))
    found, later = ask(run, "spike", 40), ask(run, "spike", 41)
    shown = supervise("audit", "show", "--json", run.path)[1].splitlines()
    record = json.loads(shown[found["record"]])

    assert (record["kind"], record["rule"], record["step"]) == ("rule", "spike", 40)
    assert found["verdict"] == f"it fired at this step: record {record['seq']}"
    assert [one["kind"] for one in found["then"]] == ["incident", "state", "intent"]
    assert all(one["record"] is not None for one in found["then"])
    assert later["record"] == record["seq"]
    assert "firing already since step 40" in later["verdict"]
    assert not later["fired"]


def by(found):
    return {one["by"] for one in found["obstacles"]}


def test_what_would_have_held_it_back_is_told(ask, keep_run, make_frames):
    run = keep_run(make_frames(0, *CALM, 8.0, *[2.0] * 80))
    assert by(ask(run, "spike", 43)) == {"acting"}
    assert by(ask(run, "grad", 43)) == {"inhibit:acting", "runbook"}
    assert by(ask(run, "spike", 50)) == {"cooldown"}
    assert by(ask(run, "spike", 39)) == set()

    shadow = keep_run(make_frames(0, *CALM, 8.0, *[2.0] * 20), mode="shadow", name="shadow")
    assert by(ask(shadow, "spike", 45)) == {"mode:shadow"}
    fired = ask(shadow, "spike", 40)
    assert fired["then"][-1]["reason"] == "shadow: would have run calm"

    held = keep_run(
        make_frames(0, *CALM, 8.0, *[2.0] * 20), answer=lambda a: {"error": "no"}, name="held"
    )
    assert by(ask(held, "spike", 50)) == {"holding"}

    rows = [*CALM, *([8.0] + [2.0] * 70) * 2]
    spent = keep_run(make_frames(0, *rows), name="spent")
    assert "budget:lr_scale" in by(ask(spent, "spike", 179))


def test_of_two_attempts_the_newest_is_asked(supervise, ask, keep_run, make_frames):
    run = keep_run([*make_frames(0, *[2.0] * 30), *make_frames(20, *[4.0] * 20, attempt=1)])
    assert ask(run, "spike", 25)["missing"][0]["measured"] == 4.0
    assert ask(run, "spike", 25, "--attempt", "0")["missing"][0]["measured"] == 2.0
    out = supervise("why-not", run.path, "--rule", "spike", "--step", "25")[1]
    assert "other attempts of this step: 0 (--attempt)" in out


def test_what_batches_do_not_show_has_the_reason_of_the_probe(supervise, keep_run, make_frames):
    run = keep_run(make_frames(0, *[2.0] * 30))
    reasons = {"train_loss_raw": "it is not called by name", "mfu": "of another rule"}
    status = {"state": "OVER", "ranks": {"0": {"unseen": reasons}}}
    (run.path / "state.json").write_text(json.dumps(status))
    out = supervise("why-not", run.path, "--rule", "spike", "--step", "25")[1].splitlines()

    assert out[1] == "  train_loss_raw: it is not called by name"
    assert not any("mfu" in line for line in out)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (("--rule", "spyke", "--step", "3"), "no rule 'spyke' in the policy", "mean 'spike'?"),
        (("--rule", "spike", "--step", "99"), "rank 0 has no step 99", "0..9 (attempt 0), 20..24"),
        (("--rule", "spike", "--step", "3", "--attempt", "7"), "in attempt 7", "steps 0..9"),
        (("--rule", "spike", "--step", "3", "--rank", "4"), "no rank 4 in this run", "it has 0"),
    ],
)
def test_a_question_that_cannot_be_answered_says_what_there_is(
    supervise, keep_run, make_frames, options, message, hint
):
    gap = Gap(10**9, 0, 10, 10)
    run = keep_run([*make_frames(0, *[2.0] * 10), gap, *make_frames(20, *[2.0] * 5)])

    code, out, err = supervise("why-not", run.path, *options)

    assert (code, out) == (64, "")
    assert message in err and hint in err
    if "99" in options:
        assert "10 frames were lost" in err


@pytest.mark.slow  # each question loads the policy again
@pytest.mark.parametrize("name", ["observe", "canary"])
def test_every_kind_of_detector_can_be_explained(ask, keep_run, tmp_path, name):
    """A sentence for each, after some frames; between them these two policies
    have all that any has."""
    policy, asked, kinds = shipped_policy(name), [], set()
    for rule in policy.rules:
        new = {type(policy.detectors[part]).__name__ for part in rule.uses} - kinds
        kinds |= new
        asked += [rule.id] if new else []
    text = re.sub(r"\ninhibit:(\n  .*)*", "", policy.resolved)
    for rule in {rule.id for rule in policy.rules} - {*asked}:
        text = re.sub(rf"\n  - id: {re.escape(rule)}\n(    .*\n)*", "\n", text)
    (small := tmp_path / "small.yaml").write_text(text)  # each question loads it again
    metrics = tuple(dict.fromkeys(m for d in policy.detectors.values() for m in d.metrics))
    events: list = [Announced(1, 0, 1, 7, metrics)]
    for step in range(30):
        values = tuple(1.0 + 0.01 * ((step + i) % 7) for i in range(len(metrics)))
        events.append(Frame(SECOND * (step + 1), 0, 0, step, values))
    run = keep_run(events, policy=small)
    for rule in asked:
        for condition in ask(run, rule, 29)["missing"]:
            assert condition["text"] and "None" not in condition["text"], condition["text"]


COUPLED = """
version: supervise/v1
policy: coupled
detectors:
  grads: {kind: threshold, metric: grad_global_norm, gt: 5}
  size: {kind: threshold, metric: update_norm, gt: 5}
  loss: {kind: threshold, metric: train_loss_raw, gt: 5}
  chain: {kind: sequence, steps: [grads, size, loss], within: 8}
  both: {kind: join, all: [grads, loss], within: 8}
rules:
  - {id: pushed, when: chain, sev: SEV1}
  - {id: both, when: both, sev: SEV1}
"""
NAMES = ("grad_global_norm", "update_norm", "train_loss_raw")


@pytest.mark.parametrize(
    ("rule", "steps", "why"),
    [
        (
            "pushed",
            (20, 15, 21),
            "size at step 15 came before grads at step 20, and must follow it",
        ),
        (
            "pushed",
            (20, 22, 30),
            "loss at step 30 came 10 steps after grads at step 20: 2 too late",
        ),
        ("pushed", (20, 22, 99), "loss did not follow grads at step 20 within 8 steps"),
        ("pushed", (34, 35, 99), "loss may still follow grads at step 34 until step 42"),
        ("pushed", (99, 20, 21), "grads did not come before size at step 20"),
        ("pushed", (20, 21, 22), "its match ended at step 22, and is a breach of that step only"),
        ("both", (20, 99, 33), "grads at step 20 was 19 steps ago: 11 too long"),
        ("both", (99, 99, 33), "grads has not breached"),
    ],
)
def test_a_coupling_says_what_came_too_late_or_in_another_order(
    ask, tmp_path, keep_run, rule, steps, why
):
    """Steps at which gradient, update and loss were high; asked at step 39."""
    path = tmp_path / "coupled.yaml"
    path.write_text(COUPLED)
    events: list = [Announced(1, 0, 1, 7, NAMES)]
    for step in range(40):
        values = tuple(9.0 if step == at else 1.0 for at in steps)
        events.append(Frame(SECOND * (step + 1), 0, 0, step, values))
    (condition,) = ask(keep_run(events, policy=path), rule, 39)["missing"]

    assert condition["text"].endswith(f"; {why}")


def test_a_phase_that_mutes_a_rule_or_changes_it_is_named(
    supervise, tmp_path, keep_run, make_frames
):
    policy = tmp_path / "phased.yaml"
    text = SMALL.replace("cooldown: 50", "cooldown: 50, phases: {early: off}")
    policy.write_text(text.replace("for: 2", "for: 2, phases: {early: SEV1}"))
    run = keep_run(make_frames(0, *[2.0] * 5, *[8.0] * 10, grad=10.0), policy=policy)

    out = supervise("why-not", run.path, "--rule", "spike", "--step", "6")[1]
    assert "off in phase early, else SEV1, runs calm" in out
    assert "spike is muted by the phase early of the run [phase:early]" in out
    out = supervise("why-not", run.path, "--rule", "grad", "--step", "6")[1]
    assert "SEV1 in phase early, else SEV2, runs nothing" in out
    out = supervise("why-not", run.path, "--rule", "spike", "--step", "12")[1]
    assert "in phase" not in out
