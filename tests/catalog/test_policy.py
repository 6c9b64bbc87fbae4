"""Policies: found, read, resolved to one text that stands alone."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import to_builtins

from supervise.catalog import PolicyErrors, load_policy, measured_metrics, shipped_names
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

from .conftest import HEAD, Loader


@pytest.mark.parametrize("name", shipped_names("policies"))
def test_the_resolved_text_loads_to_the_same_policy(name: str, tmp_path: Path) -> None:
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


def test_nano_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    """`nano`, `nano.yaml`, and `policies/nano.yaml` where there is no such folder."""
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        digests = {load_policy(n).digest for n in ("nano", "nano.yaml", "policies/nano.yaml")}
    finally:
        os.chdir(here)

    assert digests == {shipped_policy("nano").digest}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nanno", "did you mean 'nano'?"),
        ("elsewhere/x.yaml", "there is no such file"),
        ("x", "known: 'canary', 'large', 'medium', 'moe', 'nano', 'observe'"),
    ],
)
def test_an_unknown_policy_says_what_there_is(name: str, hint: str) -> None:
    with pytest.raises(InputError, match="no policy") as raised:
        load_policy(name)

    assert raised.value.hint == hint
    assert raised.value.exit_code == 65


def test_only_enforce_arms_reflexes_and_keeps_savepoints(load: Loader) -> None:
    """Weaker modes change nothing in the job, and cost it nothing; shadow is the default."""
    assert load("version: supervise/v1\n").mode == "shadow"
    acting, looking = shipped_policy("nano"), load_policy("nano", mode="shadow")

    assert (acting.mode, looking.mode) == ("enforce", "shadow")
    assert acting.savepoints == Savepoints(every=25)
    assert acting.safeguards == Safeguards(SkipNonfinite(3, 128))
    assert (looking.savepoints, looking.safeguards) == (None, Safeguards())
    assert acting.digest != looking.digest


def test_the_probe_gets_every_number_of_a_safeguard(load: Loader) -> None:
    """What is left out is the default; what is not named at all is not armed."""
    armed = load(
        "version: supervise/v1\nmode: enforce\n"
        "safeguards: {zero_nonfinite: {max: 1}, update_clip: {sigma: 3}}\n"
    )

    assert to_builtins(armed.safeguards) == {
        "zero_nonfinite": {"max": 1, "per": 128},
        "update_clip": {"window": 128, "sigma": 3.0, "max_gb": 4.0},
    }


def test_observing_needs_no_budget_but_enforcing_the_same_file_does() -> None:
    """A budget is needed by what can be run, and the command line can ask for more."""
    assert shipped_policy("observe").budgets == {}
    with pytest.raises(PolicyErrors) as refused:
        load_policy("observe", mode="enforce")
    assert any("no budget 'all'" in problem.message for problem in refused.value.problems)


def test_inputs_come_before_the_detectors_that_read_them(load: Loader) -> None:
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


def test_everything_a_policy_can_say_arrives(load: Loader) -> None:
    """Steps are counts, times are seconds, names are names."""
    text = """\
version: supervise/v1
policy: whole
mode: enforce
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 12, for: 2}}
rules:
  - id: r
    when: high
    sev: SEV1
    run: calm
    for: 3
    keep: 4
    cooldown: 5
    unknown: breach
    mode: shadow
inhibit: [{by_state: [acting, probation], mute: [r]}]
budgets:
  all: {max: 6}
  lr_scale: {max: 2, per: 1800s}
escalate: {ladder: [calm, hold], reset_after: 10}
runbooks:
  calm:
    meaning: what it means
    impact: what it costs
    steps: [snapshot, {lr_scale: {set: 0.5, rewarm: 20}}]
    verify: {within: 50, clear_for: 10}
    if_it_fails: hold
    diagnose: [why]
savepoints: {every: 10, keep: 2, max_bytes: 1000}
notify: {console: {min_sev: SEV1}, webhook: {url_env: HOOK, secret_env: SECRET}}
warmup: 7
probation: 8
blind_after: {steps: 9, time: 500ms}
hold_reminder: 2h
"""
    policy = load(text)
    rule = policy.rules[0]
    calm = policy.runbooks["calm"]

    assert policy.name == "whole"
    assert (rule.for_steps, rule.keep_steps, rule.cooldown_steps) == (3, 4, 5)
    assert (rule.unknown, rule.mode, rule.runbook) == ("breach", "shadow", "calm")
    assert rule.location.endswith("p.yaml:6:5")
    assert policy.inhibit[0].by_state == ("acting", "probation")
    assert (policy.budgets["all"].per_steps, policy.budgets["all"].per_s) == (None, None)
    assert policy.budgets["lr_scale"].per_s == 1800.0
    assert (policy.ladder.levels, policy.ladder.reset_after_steps) == (("calm", "hold"), 10)
    assert calm.verbs == ("snapshot", "lr_scale", "verify")
    assert (calm.steps[1].rewarm, calm.steps[2].within, calm.steps[2].clear_for) == (20, 50, 10)
    assert (calm.meaning, calm.impact, calm.diagnose) == (
        "what it means",
        "what it costs",
        ("why",),
    )
    assert policy.savepoints == Savepoints(every=10, keep=2, max_bytes=1000)
    assert policy.notify["webhook"]["secret_env"] == "SECRET"
    assert policy.notify["console"] == {"min_sev": "SEV1"}
    assert (policy.warmup_steps, policy.probation_steps) == (7, 8)
    assert (policy.blind_after_steps, policy.blind_after_s, policy.hold_reminder_s) == (
        9,
        0.5,
        7200.0,
    )
    assert policy.machine is None


def test_a_policy_may_bring_its_own_table_of_moves(load: Loader) -> None:
    """It replaces the default, and is part of the digest."""
    rows = "".join(f"  {state}: {dict(row)}\n" for state, row in DEFAULT_TRANSITIONS.items())
    text = HEAD + "machine:\n" + rows.replace("'", "")

    policy = load(text)

    assert policy.machine == DEFAULT_TRANSITIONS
    assert load(policy.resolved).machine == DEFAULT_TRANSITIONS
    assert policy.digest != load(HEAD).digest


def test_the_text_of_a_policy_says_what_was_written_differently_the_same_way(load: Loader) -> None:
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
def test_the_same_text_comes_out_under_any_hash_seed() -> None:
    """Nothing depends on the order of a set: replay on another machine needs the same digest."""
    code = "from supervise.catalog import load_policy; print(load_policy('nano').digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }

    assert len(digests) == 1


def test_a_policy_knows_how_rarely_its_costly_metrics_may_come():
    """As the collectors declare it: a rule that reads one is not blind in between."""
    known = measured_metrics()
    costly = {name: spec.sparsest for name, spec in known.items() if spec.sparsest}

    assert "update_norm" in costly
    assert shipped_policy("nano").sparsest.items() <= costly.items()
    assert shipped_policy("nano").sparsest["update_norm"] == costly["update_norm"]
