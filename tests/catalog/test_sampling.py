"""The policy's `sampling` reaches probe.json, and nothing is written where nothing is said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from supervise.app.launcher import probe_config
from supervise.catalog.assembly.policy_loader import load_policy
from supervise_probe.sampling.sample_sets import DEFAULTS

POLICY = """
version: supervise/v1
summary: sampled
mode: {mode}
{sampling}
detectors: {{a: {{kind: nonfinite, metrics: [train_loss_raw]}}}}
rules: [{{id: r, when: a, sev: SEV1}}]
"""


def load(folder: Path, text: str = "", mode: str = "observe"):
    path = folder / "p.yaml"
    path.write_text(POLICY.format(sampling=text, mode=mode))
    return load_policy(path)


def test_intervals_are_given_to_the_probe_in_every_mode(tmp_path):
    policy = load(tmp_path, "sampling: {attention: 100, routing: 0}")
    assert policy.sampling == {"attention": 100, "routing": 0}
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(policy.resolved)
    assert load_policy(resolved).digest == policy.digest
    run = SimpleNamespace(id="r", marks_path=tmp_path, quarantine_path=tmp_path / "q")
    assert probe_config(run, tmp_path, policy, ())["sampling"] == policy.sampling


def test_where_nothing_is_said_the_probe_has_its_own(tmp_path):
    policy = load(tmp_path)
    assert policy.sampling == {}
    assert "sampling" not in policy.resolved
    assert policy.digest != load(tmp_path, "sampling: {weights: 7}").digest


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_set_of_the_probe_can_be_named(tmp_path, name):
    assert load(tmp_path, f"sampling: {{{name}: 3}}").sampling == {name: 3}
