"""A job stands behind `--`, whatever command of ours is given one."""

from __future__ import annotations

import shlex

import pytest


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("statsu runs/x", "supervise status runs/x"),
        ("touch started", "supervise -- touch started"),
        ("touch started --policy 'a b'", "supervise -- touch started --policy 'a b'"),
        ("run touch started", "supervise -- touch started"),
        ("--policy nano touch started", "supervise --policy nano -- touch started"),
        ("run train.py", "supervise -- python train.py"),
        ("nano -- touch started", "supervise -- touch started"),
        ("doctor touch started", "supervise doctor -- touch started"),
    ],
)
def test_what_does_not_stand_behind_two_dashes_is_never_started(
    supervise, tmp_path, monkeypatch, words, meant
):
    monkeypatch.chdir(tmp_path)

    code, _, err = supervise(*shlex.split(words))

    assert code == 64
    assert err.splitlines()[-1] == f"    did you mean: {meant}"
    assert list(tmp_path.iterdir()) == []
