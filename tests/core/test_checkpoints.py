"""The fold of the guard's notices: what may be gone back to, and what is suspect."""

from __future__ import annotations

from supervise.core.checkpoints import Checkpoints


def test_suspects_are_told_apart():
    """For the guard, which lets go of them first; they stay suspect when they are told of again."""
    known = Checkpoints()
    for number, step in enumerate((10, 20, 30)):
        known.notice({"id": f"ckpt-{number}", "step": step, "path": "a.pt", "ok": True})
    known.taint(0, 20, "saved after inc-1 began")
    known.notice({"id": "ckpt-2", "step": 30, "path": "a.pt", "ok": True})

    assert known.suspects() == {"ckpt-1", "ckpt-2"}
    assert [found.id for found in known.good()] == ["ckpt-0"]
