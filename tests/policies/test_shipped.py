"""What comes with the program hangs together: policies, packs and runbooks."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from supervise.catalog import Problem, load_policy, measured_metrics, shipped_folder, shipped_names
from supervise.core.model import HOLD, Policy, Safeguards
from tests.support.recorded_run import shipped_policy

POLICIES = shipped_names("policies")
PACKS = shipped_names("policies/packs")
RUNBOOKS = shipped_names("runbooks")

# Every per-step and sampled metric.
TRAINING = """tokens_seen steps_seen train_loss_raw train_loss_ema train_ppl learning_rate lr_phase
    tokens_per_update grad_global_norm grad_clip_rate update_to_weight opt_state_finite loss_scale
    overflow_rate skipped_updates grad_noise_scale scaling_law_residual"""
BEHAVIOUR = """max_attn_logit attn_entropy residual_rms activation_outlier_rate logit_entropy_probe
    topk_mass_probe output_kl_to_prev moe_drop_rate moe_util_entropy moe_load_balance_loss"""
COMPUTE = """tokens_per_sec step_time mfu gpu_util gpu_mem_used dataloader_stall_frac comm_time_frac
    compute_time_frac straggler_ratio"""
# And observability.
RUNNING = """nan_inf_events checkpoint_ok checkpoint_time checkpoint_size restart_rate
    error_event_rate metrics_ingest_lag heartbeat_missing"""
WANTED = f"{TRAINING} {BEHAVIOUR} {COMPUTE} {RUNNING}".split()
NO_TOUCH = {"snapshot", "notify"}
# For ladders, rules and crashes of one's own.
OFFERED = {"tighten-clip", "clip-updates", "closer-look"}
OFFERED |= {"restart", "restart-if-stuck", "hold-for-config"}


def data(kind: str, name: str) -> dict[str, Any]:
    text = (shipped_folder(kind) / f"{name}.yaml").read_text()
    loaded: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return loaded


# ── policies ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_loads_without_a_word(name):
    """No mistake, and no warning: a warning that always comes teaches people to skip warnings."""
    warnings: list[Problem] = []

    load_policy(name, warnings=warnings)

    assert [str(warning) for warning in warnings] == []


def test_every_pack_is_used():
    """A pack that no policy uses is watched by nobody; one is of the data, not of a run, and one of
    evaluations, which a run has only where it asks for them."""
    used = {"data_build", "quality"} | {
        pack for name in POLICIES for pack in data("policies", name).get("use", ())
    }

    assert set(PACKS) - used == set()


def verbs(policy: Policy) -> set[str]:
    """Return the verbs that its rules and its ladder can lead to."""
    names, seen = {*policy.ladder.levels, *(r.runbook for r in policy.rules if r.runbook)}, {HOLD}
    while names := names - seen:
        seen |= names
        names = {policy.runbooks[name].if_it_fails for name in names}
    return {verb for name in seen - {HOLD} for verb in policy.runbooks[name].verbs}


def test_observe_acts_never_and_canary_touches_a_job_only_to_end_it():
    """A gate does not repair what it judges."""
    assert shipped_policy("observe").mode == "observe"
    assert verbs(shipped_policy("canary")) == {*NO_TOUCH, "stop"}
    for name in ("observe", "canary"):
        assert shipped_policy(name).savepoints is None
        assert shipped_policy(name).safeguards == Safeguards()


@pytest.mark.parametrize("name", ["nano", "medium", "large", "moe"])
def test_whoever_acts_has_a_ladder_that_ends_in_a_person(name):
    one = shipped_policy(name)

    assert one.ladder.levels[-1] == HOLD
    assert {"all", "rollback", "lr_scale"} <= set(one.budgets)


# ── packs ─────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_sampled_is_counted_in_steps():
    """A window of 64 samples, one each 50 steps, is blind for 3200 steps."""
    in_rows = set()
    for name in POLICIES:
        for key, detector in shipped_policy(name).detectors.items():
            specs = [measured_metrics().get(metric) for metric in detector.metrics]
            counts = [getattr(detector, k, 1) or 1 for k in ("window", "ref", "for_")]
            if max(counts) > 1 and any(spec and spec.every > 1 for spec in specs):
                in_rows |= {key} if detector.unit == "rows" else set()

    assert in_rows == {"gradients.noise"}  # 64 estimates, each an average of the ones before


@pytest.mark.parametrize("pack", PACKS)
def test_every_rule_of_a_pack_is_shown_firing_and_quiet(pack):
    whole = data("policies/packs", pack)
    expected = [e for scenario in whole["scenarios"] for e in scenario["expect"]]
    fires = {e["rule"] for e in expected if e.get("is") == "firing"}
    quiet = {rule for e in expected for rule in e.get("never", ())}

    assert {rule["id"] for rule in whole["rules"]} - (fires & quiet) == set()


# ── runbooks ──────────────────────────────────────────────────────────────────────────────────────


def test_a_rule_leads_to_something_to_read():
    """To a runbook of its own trouble, not merely to that of its severity."""
    for pack in PACKS:
        for rule in data("policies/packs", pack)["rules"]:
            books = {rule[key] for key in ("see", "run") if key in rule}
            assert books and books <= set(RUNBOOKS), f"{pack}.{rule['id']}: say `see: <runbook>`"


@pytest.mark.parametrize("name", RUNBOOKS)
def test_a_runbook_says_everything(name):
    book = data("runbooks", name)

    assert min(len(book["meaning"]), len(book["impact"])) > 20
    for key in ("evidence", "containment", "probe_replay", "over_when", "diagnose", "handles"):
        assert book[key], key
    assert list(book["localize"]) == ["optimization", "model", "data", "hardware"]
    assert book.get("if_it_fails", HOLD) in (HOLD, *RUNBOOKS)
    assert len(book["diagnose"]) >= 3 or name == "page-with-evidence"


def test_every_runbook_is_reached():
    """By a rule of a shipped policy, its ladder, a fall-back, or as the one of a severity."""
    reached = {"sev0", "sev1", "sev2"}
    for name in POLICIES:
        one = shipped_policy(name)
        reached |= {rule.see for rule in one.rules} | set(one.runbooks)
        reached |= {book.if_it_fails for book in one.runbooks.values()}

    assert set(RUNBOOKS) - reached == OFFERED


def test_a_metric_leads_to_a_runbook():
    """Whoever looks up an id of the tables finds what to do about it."""
    handled = {metric for name in RUNBOOKS for metric in data("runbooks", name)["handles"]}

    assert [metric for metric in WANTED if metric not in handled] == []


def test_only_a_runbook_that_is_run_may_touch_the_job():
    """What people are sent to read must be safe to run as it is: evidence and a message."""
    run = {rule.runbook for name in POLICIES for rule in shipped_policy(name).rules}
    run |= {rung for name in POLICIES for rung in shipped_policy(name).ladder.levels}
    run |= {book.if_refused for name in POLICIES for book in shipped_policy(name).runbooks.values()}

    for name in set(RUNBOOKS) - run - OFFERED:
        assert data("runbooks", name)["steps"] == ["snapshot", "notify"], name
