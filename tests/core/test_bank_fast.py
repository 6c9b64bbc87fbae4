"""The quick way of a frame against the plain one: same codes, same numbers, wherever one looks.

The plain way feeds every watch in every frame. `STRETCH` is made short here, so that windows are
short too and every edge comes often.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervise.core.detection import feeder
from supervise.core.detection.feeder import QuietWatch
from supervise.core.detection.rank_monitor import RankMonitor
from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.core.model.events import Frame
from supervise.core.model.interfaces import NOTE, Detector
from supervise.core.model.policy import Policy
from supervise.detectors.join import Join
from supervise.detectors.level_shift import LevelShift
from supervise.detectors.nonfinite import Nonfinite
from supervise.detectors.rate import Rate
from supervise.detectors.ratio import Ratio
from supervise.detectors.robust_z import RobustZ
from supervise.detectors.sequence import Sequence
from supervise.detectors.threshold import Threshold
from supervise.detectors.trend import Trend

pytestmark = pytest.mark.slow

Z = {"window": 16, "min_": 4, "freeze": 6}
DETECTORS: dict[str, Detector] = {
    "above": Threshold("a", gt=3.0, clear=2.0, for_=2),
    "at_most": Threshold("b", lte=0.4),
    "seldom": Threshold("c", gte=2.5, m_of_n=(2, 4)),
    "high": RobustZ("a", gt=5.0, clear=2.0, m_of_n=(1, 3), **Z),
    "low": RobustZ("b", gt=4.0, side="low", **Z),
    "both": RobustZ("c", gt=6.0, side="both", for_=2, **Z),
    "log": RobustZ("d", gt=4.0, side="both", transform="log", **Z),
    "odd": RobustZ("d", gt=3.0, window=17, min_=4, freeze=17),
    "up": Ratio("a", fast=2, slow=12, gt=1.5, clear=1.2, freeze=5),
    "down": Ratio("b", fast=2, slow=12, lt=0.6, freeze=5),
    "past": Ratio("c", fast=2, ref=9, gt=1.4, freeze=4),
    "climb": Trend("a", window=32, slope_per_1k_gt=20.0),
    "fall": Trend("d", window=80, slope_per_1k_lt=-5.0),
    "often": Rate("e", window=10, count_gte=3),
    "bad": Nonfinite(("a", "b", "c")),
    "worse": Nonfinite(("d", "absent")),
    "chain": Sequence(("high", "both", "low"), within=4, until="bad"),
    "near": Join(all=("above", "log", "odd"), within=3),
    "any": Join(any=("chain", "bad"), within=2),
    "scar": LevelShift("a", after="high", settle=4, window=20, margin=0.5),
}
NAMES = ("a", "b", "c", "d", "e")


class Plain:
    """Every watch, fed in every frame."""

    def __init__(self) -> None:
        self.watches = {name: detector.start() for name, detector in DETECTORS.items()}
        self.codes = dict.fromkeys(DETECTORS, UNKNOWN)
        self.notes: list = []

    def feed(self, step, values):
        row = dict(zip(NAMES, values, strict=True))
        singles = [name for name, d in DETECTORS.items() if d.reads == "metric"]
        for name in [*singles, *(n for n in DETECTORS if n not in singles)]:
            detector, watch = DETECTORS[name], self.watches[name]
            metrics = [row.get(metric) for metric in detector.metrics]
            raws = [self.watches[n].raw for n in detector.detectors]
            sample = {
                "metric": lambda m=metrics: m[0],
                "metrics": lambda m=metrics: m,
                "detectors": lambda r=raws: r,
                "metric+detector": lambda m=metrics, r=raws: (m[0], r[0]),
            }[detector.reads]()
            code = watch.feed(sample, step)
            if code & NOTE:
                self.notes.append((name, watch.note()))
            self.codes[name] = code & ~NOTE

    def rewind(self, step):
        for watch in self.watches.values():
            watch.rewind(step)


def _bank() -> RankMonitor:
    bank = RankMonitor(Policy("fast", "sha256:0", "observe", DETECTORS, ()))
    bank.announce(NAMES, (1, 1))
    return bank


def _value(chance: random.Random, trouble: float) -> float | None:
    usual = chance.gauss(1.0, 0.1)
    if chance.random() >= trouble:
        return usual
    strange = [None, math.nan, math.inf, -math.inf, 0.0, -0.0, -2.0, usual + 4, usual * 1e3, 1e308]
    return chance.choice(strange)


@pytest.mark.parametrize("stretch", [1, 2, 4])
@given(seed=st.integers(0, 2**32), trouble=st.sampled_from([0.0, 0.003, 0.02, 0.2]))
@settings(max_examples=15, deadline=None)
def test_the_quick_way_is_the_plain_way(stretch, seed, trouble):
    """NaN, gaps, spikes, new levels, repeated steps, rollbacks, copies; looked at now and then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feeder, "STRETCH", stretch)
        chance = random.Random(seed)
        bank, plain, step, attempt, level = _bank(), Plain(), 0, 0, 0.0
        for _ in range(300):
            step += chance.choices([1, 3, 0, -2], [60, 2, 1, 1])[0]
            if chance.random() < 0.01:
                level = chance.choice([0.0, 0.5, 3.0])
            if chance.random() < 0.01:
                step, attempt = max(0, step - chance.randrange(1, 12)), attempt + 1
                plain.rewind(step - 1)
            values = [_value(chance, trouble) for _ in NAMES]
            values[0] = values[0] and values[0] + level
            values[4] = float(chance.random() < 0.05)
            bank.feed(Frame(0, 0, attempt, step, tuple(values)), 0)
            plain.feed(step, values)

            assert bank.codes == list(plain.codes.values())
            assert repr(bank.notes) == repr(plain.notes)
            if chance.random() < 0.03:
                bank = chance.choice([bank.copy, lambda b=bank: (b.copy(), b)[1]])()
            if chance.random() < 0.03:
                for watch, fed in zip(bank.watches, plain.watches.values(), strict=True):
                    assert watch.raw == fed.raw
                    assert repr(watch.numbers()) == repr(fed.numbers())


def test_most_watches_are_left_alone():
    """Else the test above would prove nothing, and the quick way be none."""
    chance, bank, alone = random.Random(1), _bank(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feeder, "STRETCH", 4)
        for step in range(600):
            bank.feed(Frame(0, 0, 0, step, tuple(_value(chance, 0.0) for _ in NAMES)), 0)
            if step >= 100:
                alone += len(bank._feeder._calm) + len(bank._feeder._idle)

    assert alone / 500 > 8


def _slowly(spec: RobustZ, values: list[float]) -> list[tuple[int, str]]:
    """Return the code and (median, scale, z) of each sample, from the formula on the page."""
    window: list[float] = []
    found = []
    for value in values:
        ordered = sorted(window[-spec.window :])
        if len(ordered) < spec.min_:
            window.append(value)
            found.append((UNKNOWN, ""))
            continue
        half = len(ordered) // 2
        middle = 0.5 * ordered[half - 1] + 0.5 * ordered[half]
        if len(ordered) % 2:
            middle = ordered[half]
        off = sorted(abs(y - middle) for y in ordered)
        mad = off[half] if len(off) % 2 else 0.5 * off[half - 1] + 0.5 * off[half]
        scale = max(1.4826 * mad, spec.rel_floor * abs(middle), spec.abs_floor)
        code = BREACH if value - middle > spec.gt * scale else OK
        if code == OK:
            window.append(value)
        found.append((code, repr((middle, scale, (value - middle) / scale))))
    return found


@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([(16, 16), (21, 5), (64, 8)]),
    spread=st.sampled_from([0.0, 1e-12, 0.2, 1e6]),
    rel_floor=st.sampled_from([0.0, 1e-3]),
)
@settings(max_examples=40, deadline=None)
def test_robust_z_left_alone_is_the_formula(seed, size, spread, rel_floor):
    """A sorted list at every step; samples lie often just at the edge of the band."""
    chance = random.Random(seed)
    window, least = size
    spec = RobustZ("a", gt=3.0, window=window, min_=least, rel_floor=rel_floor, freeze=window)
    values = [chance.choice([1.0, 1.0 + spread * chance.gauss(0.0, 1.0)]) for _ in range(150)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feeder, "STRETCH", window // 4)
        policy = Policy("fast", "sha256:0", "observe", {"z": spec}, ())
        bank, seen = RankMonitor(policy), []
        bank.announce(("a",), (1, 1))
        expected = _slowly(spec, values)
        for step, value in enumerate(values):
            bank.feed(Frame(0, 0, 0, step, (value,)), 0)
            numbers = ""
            if bank.codes[0] != UNKNOWN and not step % 7:
                shown = bank.watches[0].numbers()
                numbers = repr((shown["median"], shown["scale"], shown["z"]))
            seen.append((bank.codes[0], numbers))
        expected = [(code, text if not i % 7 else "") for i, (code, text) in enumerate(expected)]
        breaches = sum(code == BREACH for code, _ in expected)

    assert breaches >= window or seen == expected  # more would have moved the baseline


CALM = {name: d for name, d in DETECTORS.items() if isinstance(d.start(), QuietWatch)}


@pytest.mark.parametrize("name", CALM)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_band_keeps_what_it_promises(name, data):
    """Whatever lies in it, the very edges included, is OK; catching up is feeding."""
    seed = data.draw(st.integers(0, 2**32))
    count = data.draw(st.integers(1, 4) if "window" in vars(CALM[name]) else st.integers(1, 40))
    chance = random.Random(seed)
    watch = CALM[name].start()
    scale = chance.choice([0.0, 1e-9, 0.1, 1e5])
    for step in range(chance.randrange(20, 120)):
        code = watch.feed(abs(1.0 + scale * chance.gauss(0.0, 1.0)) or 1.0, step)
    band = watch.band(count) if code == OK == watch.raw else None
    if band is None:
        return
    low, high = max(band[0], -1e300), min(band[1], 1e300)
    if not low < high:  # nothing is usual enough
        return
    edges = st.sampled_from([math.nextafter(low, math.inf), math.nextafter(high, -math.inf)])
    middle = st.just(0.5 * low + 0.5 * high)
    inside = st.one_of(edges, edges, middle, st.floats(low, high))
    runs = data.draw(st.lists(st.tuples(inside, st.integers(1, 20)), min_size=1, max_size=4))
    samples = [x for x, times in runs for _ in range(times) if low < x < high][:count]
    if not samples:
        return
    steps = [step + 1 + 2 * i for i in range(len(samples))]
    told = watch.copy()
    told.catch_up(samples, steps)

    for sample, at in zip(samples, steps, strict=True):
        assert (watch.feed(sample, at), watch.raw) == (OK, OK)
    assert repr(told.numbers()) == repr(watch.numbers())
    chance_a, chance_b = random.Random(seed), random.Random(seed)
    for at in range(steps[-1] + 1, steps[-1] + 40):
        a = told.feed(_value(chance_a, 0.2), at)
        b = watch.feed(_value(chance_b, 0.2), at)
        assert (a, told.raw, repr(told.numbers())) == (b, watch.raw, repr(watch.numbers()))
    told.rewind(steps[-1] + 5)
    watch.rewind(steps[-1] + 5)
    assert repr(told.numbers()) == repr(watch.numbers())


def test_what_was_flagged_grows_old_in_quiet_times_as_well():
    """Those flagged long ago and those of now are not, together, the five that move the level."""
    watch, told = DETECTORS["up"].start(), DETECTORS["up"].start()
    story = [1.0] * 40 + [4.0] * 2 + [1.0] * 40
    for step, sample in enumerate(story[:50]):
        told.feed(sample, step)
    assert told.freeze.flags
    told.catch_up(story[50:], range(50, len(story)))
    for step, sample in enumerate(story):
        watch.feed(sample, step)
    for step, sample in enumerate([4.0, 4.0, *[1.0] * 10], 100):
        assert told.feed(sample, step) == watch.feed(sample, step)
        assert repr(told.numbers()) == repr(watch.numbers())


def test_each_kind_of_detector_has_been_calm():
    """No band above is None all the time."""
    for name, detector in CALM.items():
        watch, chance = detector.start(), random.Random(3)
        bands = []
        for step in range(400):
            code = watch.feed(1.0 + 0.1 * chance.random(), step)
            bands.append(watch.band(2) if code == OK == watch.raw else None)
        assert any(bands) or name == "past", name


def test_two_frames_that_end_a_stretch_do_not_hide_from_a_copy():
    """A copy taken in the middle of a stretch and its original stay apart."""
    chance, bank = random.Random(5), _bank()
    rows = [tuple(_value(chance, 0.0) for _ in NAMES) for _ in range(300)]
    for step, row in enumerate(rows[:250]):
        bank.feed(Frame(0, 0, 0, step, row), 0)
    twin = bank.copy()
    for step, row in enumerate(rows[250:], 250):
        twin.feed(Frame(0, 0, 0, step, row), 0)

    assert [watch.last for watch in bank.watches if isinstance(watch, QuietWatch)] == [249] * len(
        CALM
    )
    assert all(w.last == 299 for w in twin.watches if isinstance(w, QuietWatch))
