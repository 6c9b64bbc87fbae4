"""Policies: located, read, resolved to one text that stands alone."""

import hashlib
import os
import subprocess
import sys

import pytest
from msgspec import to_builtins

from supervise.catalog import (
    PolicyErrors,
    load_isolated_policy,
    load_policy,
    measured_metrics,
)
from supervise.core.model import (
    BREACH,
    DEFAULT_TRANSITIONS,
    OK,
    UNKNOWN,
    Safeguards,
    Savepoints,
    SkipNonfinite,
)
from supervise.errors import InputError
from tests.support.recorded_run import shipped_policy

from .conftest import HEAD, WHOLE


@pytest.mark.parametrize("name", ["moe", "canary"])  # most packs; a gate
def test_the_resolved_text_loads_to_the_same_policy(name, tmp_path):
    """The run directory's policy.yaml needs no other file, and its sha256 is the digest."""
    policy = shipped_policy(name)
    path = tmp_path / "policy.yaml"
    path.write_text(policy.resolved, "utf-8")

    again = load_policy(path)

    assert again.digest == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    assert again.digest == policy.digest
    assert list(again.detectors) == list(policy.detectors)
    for name in ("resolved", "detectors", "runbooks", "budgets", "ladder", "inhibit"):
        assert getattr(again, name) == getattr(policy, name)
    for one, other in zip(again.rules, policy.rules, strict=True):
        assert (one.id, one.text, one.uses) == (other.id, other.text, other.uses)


@pytest.mark.parametrize("name", ["nano.yaml", "policies/nano.yaml"])
def test_nano_is_found_by_its_file_name_where_there_is_no_such_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert load_policy(name).digest == shipped_policy("nano").digest


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nanno", "did you mean 'nano'?"),
        ("elsewhere/x.yaml", "there is no such file"),
        ("x", "known: 'canary', 'large', 'medium', 'moe', 'nano', 'observe'"),
    ],
)
def test_an_unknown_policy_says_what_there_is(name, hint):
    with pytest.raises(InputError, match="no policy") as raised:
        load_policy(name)

    assert raised.value.hint == hint
    assert raised.value.exit_code == 65


def test_only_enforce_arms_reflexes_and_keeps_savepoints(load):
    """Weaker modes change nothing in the job, and cost it nothing; shadow is the default."""
    assert load("version: supervise/v1\n").mode == "shadow"
    acting, looking = shipped_policy("nano"), load_policy("nano", mode="shadow")

    assert (acting.mode, looking.mode) == ("enforce", "shadow")
    assert acting.savepoints == Savepoints(every=25)
    assert acting.safeguards == Safeguards(SkipNonfinite(3, 128))
    assert (looking.savepoints, looking.safeguards) == (None, Safeguards())
    assert acting.digest != looking.digest


def test_the_probe_gets_every_number_of_a_safeguard(load):
    """What is left out is the default; what is not named at all is not armed."""
    armed = load(
        "version: supervise/v1\nmode: enforce\n"
        "safeguards: {zero_nonfinite: {max: 1}, update_clip: {sigma: 3}}\n"
    )

    assert to_builtins(armed.safeguards) == {
        "zero_nonfinite": {"max": 1, "per": 128},
        "update_clip": {"window": 128, "sigma": 3.0, "max_gb": 4.0},
    }


def test_observing_needs_no_budget_but_enforcing_the_same_file_does():
    """A budget is needed by what can be run, and the command line can ask for more."""
    assert shipped_policy("observe").budgets == {}
    with pytest.raises(PolicyErrors) as refused:
        load_policy("observe", mode="enforce")
    assert any("no budget 'all'" in problem.message for problem in refused.value.problems)


def test_inputs_come_before_the_detectors_that_read_them(load):
    """The engine feeds them in this order, whatever order they were written in."""
    text = HEAD + (
        "detectors:\n"
        "  last: {kind: join, any: [mid, first], within: 3}\n"
        "  mid: {kind: sequence, steps: [first, other]}\n"
        "  first: {kind: threshold, metric: train_loss_raw, gt: 1}\n"
        "  other: {kind: threshold, metric: update_norm, gt: 1}\n"
        "rules: [{id: r, when: last and not first, sev: SEV2}]\n"
    )
    policy = load(text)
    order = list(policy.detectors)

    assert order.index("first") < order.index("mid") < order.index("last")
    codes = [OK] * 4
    codes[order.index("last")] = BREACH
    assert policy.rules[0].when(codes) == BREACH
    codes[order.index("first")] = UNKNOWN
    assert policy.rules[0].when(codes) == UNKNOWN


def test_everything_a_policy_can_say_arrives(load):
    policy = load(WHOLE)
    rule, calm, budgets = policy.rules[0], policy.runbooks["calm"], policy.budgets

    assert policy.name == "whole" and policy.machine is None
    assert (rule.for_steps, rule.keep_steps, rule.cooldown_steps) == (3, 4, 5)
    assert (rule.unknown, rule.mode, rule.runbook) == ("breach", "shadow", "calm")
    assert rule.location.endswith("p.yaml:13:5")
    assert policy.inhibit[0].by_state == ("acting", "probation")
    assert (budgets["all"].per_steps, budgets["all"].per_s) == (None, None)
    assert budgets["lr_scale"].per_s == 1800.0
    assert (policy.ladder.levels, policy.ladder.reset_after_steps) == (("calm", "hold"), 10)
    assert calm.verbs == ("snapshot", "lr_scale", "verify")
    assert (calm.steps[1].rewarm, calm.steps[2].within, calm.steps[2].clear_for) == (20, 50, 10)
    assert (calm.meaning, calm.impact) == ("what it means", "what it costs")
    assert calm.diagnose == ("why",)
    assert policy.savepoints == Savepoints(every=10, keep=2, max_bytes=1000)
    assert policy.notify["webhook"]["secret_env"] == "SECRET"
    assert policy.notify["console"] == {"min_sev": "SEV1"}
    assert (policy.warmup_steps, policy.probation_steps) == (7, 8)
    assert (policy.blind_after_steps, policy.blind_after_s) == (9, 0.5)
    assert policy.hold_reminder_s == 7200.0


def test_a_policy_may_bring_its_own_table_of_moves(load):
    rows = "".join(f"  {state}: {dict(row)}\n" for state, row in DEFAULT_TRANSITIONS.items())
    text = HEAD + "machine:\n" + rows.replace("'", "")

    policy = load(text)

    assert policy.machine == DEFAULT_TRANSITIONS
    assert load(policy.resolved).machine == DEFAULT_TRANSITIONS
    assert policy.digest != load(HEAD).digest


def test_the_text_of_a_policy_says_what_was_written_differently_the_same_way(load):
    """Spacing, comments, order of keys and spelling of numbers are not part of the digest."""
    one = load(HEAD + "detectors: {a: {kind: threshold, metric: m, gt: 1e-3}}\nhold_reminder: 1h\n")
    other = load(
        "# a comment\nhold_reminder: 60m\nversion: 'supervise/v1'\n"
        "detectors:\n  a:\n    gt: 0.001\n    metric: m\n    kind: threshold\nmode: enforce\n"
    )
    different = load(
        HEAD + "detectors: {a: {kind: threshold, metric: m, gt: 2e-3}}\nhold_reminder: 1h\n"
    )

    assert one.digest == other.digest
    assert one.digest != different.digest


@pytest.mark.slow
def test_the_same_text_comes_out_under_any_hash_seed():
    """Nothing depends on the order of a set: replay on another machine needs the same digest."""
    code = "from supervise.catalog import load_policy; print(load_policy('nano').digest)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == shipped_policy("nano").digest


def test_a_policy_knows_how_rarely_its_costly_metrics_may_come():
    """As the collectors declare it: a rule that reads one is not blind in between."""
    known = measured_metrics()
    costly = {name: spec.sparsest for name, spec in known.items() if spec.sparsest}

    assert "update_norm" in costly
    assert shipped_policy("nano").sparsest.items() <= costly.items()
    assert shipped_policy("nano").sparsest["update_norm"] == costly["update_norm"]


ISOLATED = """\
version: supervise/v1
policy: own
extends: nano
notify: {webhook: {url_env: HOOK}}
approvals: {rollback: {timeout: 60s}}
job: {relaunch: {args: ["--resume"]}, on_crash: restart}
"""


def test_the_policy_of_trials_reaches_nobody_and_starts_nothing_again(tmp_path):
    """Its rules are the real ones."""
    path, trial = tmp_path / "own.yaml", tmp_path / "trial.yaml"
    path.write_text(ISOLATED)

    isolated = load_isolated_policy(str(path))

    assert isolated.left_out == ("notify", "approvals", "job.relaunch", "job.on_crash")
    trial.write_text(isolated.text)
    policy = load_policy(trial)
    assert set(policy.notify) == {"console"} and not policy.approvals
    assert not policy.job.relaunch and not policy.job.on_crash
    digests = [[p.digest_of(rule) for rule in p.rules] for p in (isolated.policy, policy)]
    assert digests[0] == digests[1]
    assert load_isolated_policy("nano").left_out == ()
