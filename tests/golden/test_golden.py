"""A change of structure changes nothing that users or auditors see."""

from __future__ import annotations

import pytest

from . import frozen


@pytest.mark.slow
def test_every_scenario_comes_to_the_same_decisions():
    """Frame by frame, in the same words."""
    found = dict(frozen.decisions())
    kept = {str(p.relative_to(frozen.HERE)) for p in (frozen.HERE / "decisions").iterdir()}

    assert set(found) == kept
    for name, text in found.items():
        assert text.splitlines() == (frozen.HERE / name).read_text().splitlines()


@pytest.mark.slow
@pytest.mark.skipif(
    not (frozen.DATA / "logs").is_dir(), reason=f"no recordings at {frozen.DATA}: SUPERVISE_DATA"
)
def test_every_recording_comes_to_the_same_decisions():
    """As many, with the same digest."""
    assert list(frozen.recorded()) == (frozen.HERE / "recordings.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run", frozen.run),
        ("messages", frozen.messages),
        ("help", frozen.helps),
        ("exit-codes", frozen.exit_codes),
    ],
)
def test_what_users_read_is_the_same(name, text):
    """Records and what is read of them, messages, help texts, exit codes."""
    assert text().splitlines() == (frozen.HERE / f"{name}.txt").read_text().splitlines()
