"""What a launch needs of a policy, from the cache: quick, and never another policy than loading."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from supervise.catalog import load_policy
from supervise.cli import run as policy_cache

POLICY = """\
version: supervise/v1
policy: cached
use: [own]
job: {relaunch: {args: [--resume, "{checkpoint}"]}, checkpoints: {glob: ["out/*.pt"]}}
"""
PACK = """\
version: supervise/v1
pack: own
summary: One bound.
status: experimental
source: [none]
false_alarms: [none]
detectors: {loud: {kind: threshold, metric: train_loss_raw, gt: GT}}
rules: [{id: high, when: loud, sev: SEV2}]
"""


@pytest.fixture
def policy(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "own.yaml").write_text(PACK.replace("GT", "9"))
    path = tmp_path / "cached.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def launch():
    """Return the policy for a launch, and how often it was loaded for that."""

    def ask(path, mode=None, odd=()):
        loads = []

        def load(warnings):
            loads.append(path)
            warnings += odd
            return load_policy(path, mode=mode)

        warnings = []
        found = policy_cache.launch_policy(path, mode, load, warnings)
        assert warnings == [*odd]
        return found, len(loads)

    return ask


def kept() -> list[Path]:
    return sorted(Path(os.environ["XDG_CACHE_HOME"]).glob("supervise/policies/*"))


def test_a_policy_is_loaded_once_and_a_launch_reads_the_same_of_it_afterwards(policy, launch):
    """All that a launch reads is the same; warnings are shown each time."""
    first, loads = launch(policy)
    assert loads == 1
    again, loads = launch(policy)

    assert loads == 0
    for name in ("name", "digest", "mode", "resolved", "savepoints", "sampling", "notify"):
        assert getattr(again, name) == getattr(first, name)
    assert again.job == first.job


@pytest.mark.parametrize("change", ["pack", "policy", "base", "new runbook", "mode"])
def test_whatever_a_policy_depends_on_makes_another_one(policy, launch, change):
    """A stale cache would watch the job by a policy that nobody wrote."""
    base = policy.with_name("base.yaml")
    base.write_text("version: supervise/v1\npolicy: base\n")
    policy.write_text(POLICY + "extends: 'base.yaml'  # ours\n")
    launch(policy)
    assert launch(policy)[1] == 0
    if change == "pack":
        (policy.parent / "packs" / "own.yaml").write_text(PACK.replace("GT", "8"))
    elif change == "base":
        base.write_text("version: supervise/v1\npolicy: base\nprobation: 70\n")
    elif change == "policy":
        policy.write_text(POLICY.replace("out/", "new/"))
    elif change == "new runbook":
        (policy.parent / "runbooks").mkdir()
        (policy.parent / "runbooks" / "pause-and-page.yaml").write_text("runbook: x\n")

    assert launch(policy, "shadow" if change == "mode" else None)[1] == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "a directory", "unwritable"])
def test_a_cache_that_cannot_be_used_is_loaded_past(policy, launch, damage):
    """It is a cache: nothing in it may keep a job from starting."""
    digest = launch(policy)[0].digest
    (file,) = kept()
    raw = file.read_bytes()
    if damage == "cut":
        file.write_bytes(raw[: len(raw) // 2])
    elif damage == "flipped":
        file.write_bytes(raw.replace(b"train_loss_raw", b"train_loss_rav"))
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        if damage == "a directory":
            file.mkdir()
        else:
            file.parent.rmdir()
            file.parent.write_text("")

    found, loads = launch(policy)
    assert (found.digest, loads) == (digest, 1)


def test_a_policy_with_warnings_is_loaded_each_time(policy, launch):
    """They name files as seen from the working directory, and are shown at each start."""
    odd = ["odd but allowed"]

    assert launch(policy, odd=odd)[1] == launch(policy, odd=odd)[1] == 1
