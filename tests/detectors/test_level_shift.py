"""Level shift: worse than the forecast, not worse than before."""

import math
import random

import pytest

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.core.model.interfaces import NOTE
from supervise.detectors.level_shift import LevelShift

SPIKE = 500
DONE = SPIKE + 40 + 100  # the first step after the first window


def _loss(step):
    return 2.0 + 6.0 * (step + 1.0) ** -0.3


def _follow(shift=0.0, noise=0.02, steps=1400, spike=SPIKE, **fields):
    """A falling loss with a spike that leaves `shift`; return the codes from the spike on."""
    watch = LevelShift("loss", after="chain", **fields).start()
    rng = random.Random(1)
    codes = {}
    for step in range(steps):
        value = _loss(step) + noise * rng.gauss(0, 1)
        if step >= spike:
            lasting = shift(step) if callable(shift) else shift
            value += lasting + 3.0 * math.exp((spike - step) / 5.0)
        codes[step] = watch.feed((value, BREACH if step == spike else OK), step)
    return watch, codes


def test_a_spike_that_heals_is_cleared():
    """UNKNOWN while it waits, OK when the blocks are back on the line."""
    _, codes = _follow()

    assert {codes[step] for step in range(SPIKE, DONE)} == {UNKNOWN}
    assert {codes[step] for step in range(DONE, 1400)} == {OK}


def test_a_scar_is_found_though_the_loss_is_lower_than_before():
    """A quarter nat of damage, with the loss falling: below its old level, above its forecast."""
    watch, codes = _follow(shift=0.25)

    assert codes[DONE - 1] == UNKNOWN
    assert codes[DONE] == BREACH
    assert watch.raw == BREACH
    assert watch.numbers()["value"] == pytest.approx(0.25, abs=0.03)


def test_a_breach_is_tried_again_until_the_level_is_back():
    """The damage is gone after 300 steps; the next look but one ends it."""
    _, codes = _follow(shift=lambda step: 0.3 if step < SPIKE + 300 else 0.0)

    assert codes[SPIKE + 240] == BREACH
    assert codes[SPIKE + 339] == BREACH
    assert codes[SPIKE + 440] == OK


def test_what_cannot_be_told_is_given_more_time_once_and_then_noted():
    """Noise far above the margin: no verdict, but a near miss on record."""
    watch, codes = _follow(shift=0.1, noise=1.0)

    assert {codes[step] for step in range(SPIKE, DONE + 100)} == {UNKNOWN}
    assert codes[DONE + 100] == UNKNOWN | NOTE
    note = watch.note()
    assert (note["kind"], note["trigger"]) == ("near_miss", SPIKE)
    assert note["lower"] < 0.1 < note["upper"]
    assert codes[DONE + 101] == OK


def test_triggers_without_end_do_not_postpone_it_without_end():
    """Settling is started again for one window at most."""
    watch = LevelShift("loss", after="chain").start()
    codes = {}
    for step in range(800):
        codes[step] = watch.feed((_loss(step), BREACH if step >= SPIKE else OK), step)

    assert OK in [codes[step] for step in range(SPIKE, SPIKE + 100 + 40 + 101)]
