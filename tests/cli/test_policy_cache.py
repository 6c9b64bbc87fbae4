"""What a launch needs of a policy, from the cache: quick, and never another policy than loading."""

from __future__ import annotations

import json

import pytest

POLICY = """\
version: supervise/v1
policy: cached
extends: 'base.yaml'  # ours
use: [own]
probe: {share: 3%}
mechanisms: {every: 70}
sampling: {attention: 30}
job: {relaunch: {args: [--resume, "{checkpoint}"]}, checkpoints: {glob: ["out/*.pt"]}}
"""
PACK = """\
version: supervise/v1
pack: own
summary: One bound.
status: experimental
source: [none]
false_alarms: [none]
detectors: {loud: {kind: threshold, metric: train_loss_raw, gt: 9}}
rules: [{id: high, when: loud, sev: SEV2}]
"""
BASE = "version: supervise/v1\npolicy: base\nprobation: 60\n"


@pytest.fixture
def launch(supervise, tmp_path, monkeypatch):
    """A function that watches a command under the policy; it returns what
    the run has of the policy, and what was printed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, text in (("cached", POLICY), ("packs/own", PACK), ("base", BASE)):
        (tmp_path / f"{name}.yaml").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    numbers = iter(range(99))

    def run(*options):
        home = tmp_path / f"run-{next(numbers)}"
        given = ("--policy", "cached.yaml", "--run-dir", home, *options, "--", "true")
        code, _, err = supervise("run", *given)
        assert code == 0 and "cannot be made" not in err, err
        started = json.loads((home / "run.json").read_text())
        told = json.loads((home / "probe.json").read_text())
        told = {
            k: v for k, v in told.items() if str(home) not in str(v) and k not in ("run", "shm")
        }
        assert (told["sampling"]["share"], told["mechanisms"]["every"]) == (0.03, 70)
        policy = (
            started["policy_digest"],
            started["mode"],
            (home / "policy.yaml").read_text(),
            told,
        )
        return policy, err.replace(home.name, "RUN")

    return run


def cached(home):
    """Return the files of the cache; a policy that is loaded is written anew."""
    return {path.stat().st_ino for path in (home / "cache").glob("supervise/policies/*")}


def test_a_policy_is_loaded_once_and_whatever_it_depends_on_makes_another_one(launch, tmp_path):
    """A stale cache would watch the job by a policy that nobody wrote."""
    first = launch()
    (kept,) = cached(tmp_path)
    assert launch() == first
    assert cached(tmp_path) == {kept}
    for file, old, new in (
        ("packs/own.yaml", "gt: 9", "gt: 8"),
        ("base.yaml", "probation: 60", "probation: 70"),
        ("cached.yaml", "out/", "new/"),
    ):
        (tmp_path / file).write_text((tmp_path / file).read_text().replace(old, new))
        assert new in launch()[0][2]
    (tmp_path / "runbooks").mkdir()
    (tmp_path / "runbooks" / "pause-and-page.yaml").write_text("runbook: x\n")
    before = cached(tmp_path)
    launch()
    assert len(cached(tmp_path) - before) == 1
    assert launch("--mode", "observe")[0][1] == "observe" != launch()[0][1]


def test_a_cache_that_cannot_be_used_is_loaded_past(launch, tmp_path):
    """Cut, empty, of other bytes, a directory, or in no directory: the job starts all the same."""
    whole = launch()
    (file,) = (tmp_path / "cache").glob("supervise/policies/*")
    raw = file.read_bytes()
    for damaged in (raw[: len(raw) // 2], b"", raw.replace(b"out/", b"oat/")):
        file.write_bytes(damaged)
        assert launch() == whole
        assert file.read_bytes() == raw
    file.unlink()
    file.mkdir()
    assert launch() == whole
    file.rmdir()
    file.parent.rmdir()
    file.parent.write_text("")
    assert launch() == whole


def test_a_policy_with_warnings_is_loaded_each_time(launch, tmp_path):
    """They name files as seen from the working directory, and are shown at each start."""
    (tmp_path / "packs" / "own.yaml").write_text(PACK.replace("train_loss_raw", "my_score"))

    assert all("my_score" in launch()[1] for _ in range(2))
    assert cached(tmp_path) == set()
