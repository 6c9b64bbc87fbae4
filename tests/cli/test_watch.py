"""The live view: what it shows, that it asks first, and that it only reads."""

from __future__ import annotations

import asyncio
import html
import json
import re
import sys

import pytest

from supervise import system
from supervise.cli._live_view import LiveView, Reader

from .test_status import STATE

RANKS = {
    "0": {"phase": "step", "silent_s": 0.1},
    "1": {"phase": "step", "silent_s": 7.5, "paused": True},
    "2": {"phase": "checkpoint", "silent_s": 0.2, "collectors": {"loss": "off: cost"}},
}


def status(**changes):
    training = STATE["training"] | {"lag": {"0": 0, "1": 4, "2": 0}}
    state = {**STATE, "training": training, "ranks": RANKS, "updated_wall": system.wall_time()}
    return json.loads(json.dumps(state | changes))


@pytest.fixture
def live(recorded, alive):
    """A run whose supervisor lives."""
    run = recorded(end=None)
    run.write_json("state.json", status())
    alive(run)
    return run


def test_the_view_has_the_gravest_first_and_the_ranks_by_lag(live):
    """One that has not changed is not read again; damage is shown."""
    reader = Reader(live)
    view = reader.look()

    assert view.verdict == f"paused: supervise resume {live.path} (inc-2 SEV1)"
    assert view.incident[0].startswith("inc-2 SEV1 verifying: loss 9.7 is 8.2 sigma [31m above")
    assert dict(view.facts)["time left"] == "36 s (by --steps 600)"
    assert [row[:2] for row in view.ranks] == [("1", "4"), ("2", "0"), ("0", "0")]
    assert [row[4] for row in view.ranks] == ["paused", "1 collectors off", ""]
    assert (view.curve, view.span) == ([4.0, 2.5], "step 0 to 100, 2.5 to 4, 1 not finite")
    assert "SEV0 inc-1" in view.events[-2] or "SEV0 inc-1" in view.events[-1]
    assert not any("\033" in text for text in (*view.incident, *view.events))

    assert reader.look() is view
    (live.path / "state.json").write_text("{")
    damaged = reader.look()
    assert damaged.problem.endswith(
        "state.json is not JSON: Expecting property name enclosed in "
        "double quotes: line 1 column 2 (char 1)"
    )
    assert damaged.events == view.events
    live.write_json("state.json", status(step=153))
    assert dict(reader.look().facts)["step"] == "153 of 600, attempt 1"


def text_of(app) -> str:
    """Return what is on the screen, a line per row."""
    svg = app.export_screenshot()
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', svg):
        rows.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    return "\n".join("".join(t for _, t in sorted(rows[y])) for y in sorted(rows))


def test_keys_ask_before_they_change_anything(supervised):
    """`n` sends nothing; `y` sends, and the answer is shown; `q` leaves a receipt."""
    supervised.write_json("state.json", status())

    async def use() -> str:
        app = LiveView(supervised, "anna")
        async with app.run_test(size=(200, 50)) as pilot:
            for size in ((200, 50), (80, 24)):
                await pilot.resize_terminal(*size)
                await pilot.pause()
                shown = text_of(app)
                for part in ("paused: supervise resume", "12.5 steps/s", "inc-2 SEV1", "p pause"):
                    assert part in shown, shown
                assert "rollback: yes, weights and loop" in shown
            await pilot.press("p")
            await pilot.pause()
            assert "Pause the job at its next step boundary?" in text_of(app)
            await pilot.press("enter")
            await pilot.press("question_mark")
            await pilot.pause()
            assert "Quitting changes" in text_of(app)
            await pilot.press("x")
            assert not (supervised.path / "control").exists()
            await pilot.press("s", "y")
            await app.workers.wait_for_complete()
            await pilot.pause()
            assert "anna: savepoint" in text_of(app)
            supervised.write_json("state.json", status(step=154, ranks={}))
            await app.look()
            await pilot.pause()
            assert "154 of 600" in text_of(app)
            await pilot.press("q")
        return app.receipt

    assert asyncio.run(use()) == f"run {supervised.id}: recovered so far, on probation (inc-2 SEV1)"


def test_what_is_missing_is_named_with_a_way_out(supervise, live, monkeypatch):
    """A terminal; and the package, which is an extra."""
    code, out, err = supervise("watch", live.path)
    assert (code, out) == (64, "")
    assert "the live view needs a terminal" in err and f"supervise events -f {live.path}" in err
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    for name in [n for n in sys.modules if n == "supervise.cli._live_view"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual.app", None)
    code, _, err = supervise("watch", live.path)
    assert code == 64
    assert "pip install 'supervise-train[tui]'" in err
