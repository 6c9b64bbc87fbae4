"""A policy that was valid is not validated again, and whatever changed is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from supervise.catalog import PolicyErrors
from supervise.catalog.inventory.validated_files import MAX_POLICIES, ValidatedFiles, place
from supervise.core.model.policy import Policy

Loader = Callable[..., Policy]
PACK = """\
version: supervise/v1
pack: own
summary: text
status: stable
source: [text]
false_alarms: [text]
detectors: {a: {kind: threshold, metric: train_loss_raw, gt: 12}}
rules: [{id: r, when: a, sev: SEV2}]
"""
POLICY = "version: supervise/v1\nuse: [own]\n"
OVERRIDE = POLICY + "override: {own.a: {gt: 13}}\n"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    found = place(os.environ)
    assert found == home / "supervise" / "valid"
    return found


@pytest.mark.parametrize("policy", [POLICY, OVERRIDE])
def test_a_policy_is_the_same_without_validation(load: Loader, cache: Path, policy: str) -> None:
    """Whether its files were valid before makes no difference to the digest."""
    first = load(policy, {"packs/own.yaml": PACK})
    assert len(list(cache.iterdir())) == 1

    again = load(policy, {"packs/own.yaml": PACK})

    assert again.digest == first.digest


@pytest.mark.parametrize(
    ("policy", "pack"),
    [
        (OVERRIDE, PACK.replace("gt: 12", "gtt: 12")),
        (OVERRIDE.replace("gt: 13", "gt: x"), PACK),
        (POLICY, PACK.replace("sev: SEV2", "sev: SEV9")),
    ],
)
def test_a_file_that_changed_is_validated(load: Loader, policy: str, pack: str) -> None:
    """The policy, and each file that it uses."""
    load(OVERRIDE, {"packs/own.yaml": PACK})

    with pytest.raises(PolicyErrors):
        load(policy, {"packs/own.yaml": pack})


def test_a_wrong_policy_is_not_kept(load: Loader, cache: Path) -> None:
    """It is refused each time."""
    for _ in "ab":
        with pytest.raises(PolicyErrors):
            load(POLICY, {"packs/own.yaml": PACK.replace("gt: 12", "gt: x")})

    assert not cache.exists()


def test_a_file_is_known_only_beside_its_policy(tmp_path: Path) -> None:
    """Overrides make what is valid with one policy wrong with another."""
    first = ValidatedFiles(tmp_path)
    assert [first.holds(b"policy"), first.holds(b"pack")] == [False, False]
    first.save()

    same, other = ValidatedFiles(tmp_path), ValidatedFiles(tmp_path)

    assert [same.holds(b"policy"), same.holds(b"pack"), same.holds(b"new")] == [True, True, False]
    assert [other.holds(b"other"), other.holds(b"pack")] == [False, False]


def test_a_directory_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    """No home, or a file in its place: all is validated, and nothing is reported."""
    (tmp_path / "file").write_text("")
    assert place({}) is place({"XDG_CACHE_HOME": "relative"}) is None
    for folder in (None, tmp_path / "file" / "valid"):
        files = ValidatedFiles(folder)
        assert not files.holds(b"policy")
        files.save()


def test_only_the_newest_policies_are_kept(tmp_path: Path) -> None:
    """An edited policy leaves no trail."""
    for i in range(MAX_POLICIES + 3):
        files = ValidatedFiles(tmp_path)
        files.holds(str(i).encode())
        files.save()

    assert len(list(tmp_path.iterdir())) == MAX_POLICIES
    newest = hashlib.sha256(str(MAX_POLICIES + 2).encode()).hexdigest()
    assert any(newest in path.read_text() for path in tmp_path.iterdir())
