"""The fold of the guard's notices: what may be gone back to, and what is suspect."""

from __future__ import annotations

from supervise.core.model.checkpoint_registry import Checkpoints


def test_suspects_are_told_apart():
    """For the guard, which lets go of them first; they stay suspect when they are told of again."""
    known = Checkpoints()
    for number, step in enumerate((10, 20, 30)):
        known.notice({"id": f"ckpt-{number}", "step": step, "path": "a.pt", "ok": True})
    known.mark_suspect(0, 20, "saved after inc-1 began")
    known.notice({"id": "ckpt-2", "step": 30, "path": "a.pt", "ok": True})

    assert known.suspects() == {"ckpt-1", "ckpt-2"}
    assert [found.id for found in known.good()] == ["ckpt-0"]


def test_what_is_on_trial_ends_with_its_incident():
    """Of the attempt that recovered it is good, of any other suspect; nothing else is touched."""
    for recovered, good in ((2, ["ckpt-2"]), (None, [])):
        known = Checkpoints()
        for attempt in (1, 2):
            data = {"id": f"ckpt-{attempt}", "step": 9, "attempt": attempt, "path": "a", "ok": True}
            known.notice(data, trial="inc-1")
        known.judge("inc-7", 2)
        assert known.on_trial() == {"ckpt-1", "ckpt-2"}
        assert not known.good()
        known.judge("inc-1", recovered)

        assert not known.on_trial()
        assert [found.id for found in known.good()] == good
        assert known.suspects() == {"ckpt-1", "ckpt-2"} - set(good)
