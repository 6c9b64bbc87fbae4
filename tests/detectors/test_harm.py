"""Harm: the excess of a loss over its prediction, summed."""

import math
import random
from copy import deepcopy
from operator import itemgetter

import pytest

from supervise.core import initial_state
from supervise.core import step as step_engine
from supervise.core.model import BREACH, HAS_NOTE, Announced, Frame, Launched, Policy, Rule
from supervise.detectors import Averaged, Comparable, Descent, Harm

LEVEL, SPREAD = 2.4, 0.02


def _noise(rows, seed=1):
    drawn = random.Random(seed)
    return [drawn.gauss(LEVEL, SPREAD) for _ in range(rows)]


@pytest.fixture
def calm(read):
    """Return a function that makes a watch of 400 rows of noise."""

    def _calm(**fields):
        watch = Harm("loss", **fields).start()
        assert read(watch, _noise(400)) == "?" * 48 + "o" * 352
        return watch

    return _calm


def test_no_row_counts_for_more_than_a_third(read, calm):
    """A fifth up is far beyond the noise; it takes three rows, and sixteen at most to end."""
    watch = calm()

    assert read(watch, [2.88] * 3, 400) == "ooB"
    assert watch.numbers()["lost"] == pytest.approx(3 * 0.48, abs=0.05)
    assert watch.numbers()["since"] == 400
    assert 8 <= len(read(watch, _noise(40, seed=2), 403).rstrip("o")) <= 16
    assert watch.numbers()["since"] is None
    assert read(calm(), [3.6, 2.4, 3.6, 3.6], 400) == "oooB", "two rows half as much again"


def test_what_no_single_row_shows_adds_up(read, calm):
    """Some spreads, in rows that are each within the noise of a hundred; suspected sooner."""
    rows = read(calm(), [LEVEL + 3.2 * SPREAD] * 80, 400)

    assert 20 < rows.index("B") < 60
    assert set(rows[rows.index("B") :]) == {"B"}
    up = [LEVEL + 4 * SPREAD] * 60
    suspected = read(calm(level="suspected"), up, 400).index("B")
    assert suspected < read(calm(), up, 400).index("B")


def test_what_is_below_the_margin_is_followed_unsaid(read, calm):
    watch, up = calm(margin=0.05), [LEVEL * 1.04] * 200

    assert "B" not in read(watch, up, 400)
    assert watch.numbers()["median"] == LEVEL * 1.04
    assert "B" in read(calm(), up, 400)


@pytest.mark.parametrize(("loss", "rows"), [(3.0, 300), (1.0, 60)])
def test_no_excursion_enters_its_own_reference(read, calm, loss, rows):
    """300 rows far up, or a batch that was seen before: the prediction is what it was."""
    watch = calm()
    before = watch.numbers()["median"]

    assert set(read(watch, [loss] * rows, 400)[2:]) == {"B" if loss > LEVEL else "o"}
    assert watch.numbers()["median"] == before


def test_what_lasts_is_the_new_level_and_says_what_it_cost(read, calm):
    watch = calm()
    read(watch, [3.0] * 512, 400)  # the second of these establishes it

    assert watch.feed(3.0, 912) == HAS_NOTE
    note = watch.note()
    assert note.kind == "rebaseline"
    assert note.details["lost"] == pytest.approx(513 * 0.6, rel=0.02)
    assert watch.numbers()["median"] == 3.0


@pytest.mark.parametrize("every", [6, 8])
def test_few_rows_that_are_very_high_are_no_loss_that_stays_high(read, calm, every):
    """As the generator's losses among those of a critic; all of them half a unit up are harm."""
    watch = calm()
    turns = [x + 0.3 * (i % every == 0) for i, x in enumerate(_noise(1060, seed=5))]

    assert "B" not in read(watch, turns[:1000], 400)
    assert "B" in read(watch, [x + 0.5 for x in turns[1000:]], 1400)


@pytest.mark.parametrize("spreads", [15, 40])
@pytest.mark.parametrize("seed", range(6))
def test_a_good_share_of_very_high_rows_is_harm(read, calm, seed, spreads):
    """As where one of three shards is broken; what waits for it is no reference of its own."""
    watch, drawn = calm(), random.Random(seed)
    mixed = [x + spreads * SPREAD * (drawn.random() < 0.3) for x in _noise(400, seed + 40)]

    assert "B" in read(watch, mixed, 400)
    assert watch.numbers()["median"] < LEVEL + 2 * SPREAD


def test_what_was_over_by_itself_is_a_precedent(read, calm):
    """Ten rows eight spreads up are established; with nine of them known, ten are not."""
    watch, twin = calm(), calm()
    up, quiet = [LEVEL + 6 * SPREAD] * 20, _noise(40, seed=3)

    first = read(watch, up, 400).index("B")
    read(twin, [*up[: first - 1], *quiet], 400)

    assert "B" not in read(twin, up[: first + 1], 460)


def test_a_fall_is_no_harm_and_hides_none(read):
    """A power law, steep at first; half a nat more from row 300 on."""
    noise = _noise(340)
    falling = [x + 4.0 / (i + 10) ** 0.5 for i, x in enumerate(noise)]
    watch = Harm("loss").start()

    assert "B" not in read(watch, falling[:300])
    assert "B" in read(watch, [x + 0.5 for x in falling[300:306]], 300)


def test_going_back_forgets_an_excursion_and_keeps_the_past(read, calm):
    watch = calm()
    read(watch, [3.0] * 20, 400)
    watch.rewind(390)

    assert watch.numbers()["since"] is None
    assert read(watch, [3.0] * 3, 391) == "oBB"
    watch.rewind(2)
    assert watch.lacks(1)


def _bursts(rows, seed=1):
    """Return noise of one level whose rollouts, 16 rows each, are at times half as high again."""
    drawn = random.Random(seed)
    high = [drawn.random() < 0.2 for _ in range(rows // 16 + 1)]
    return [drawn.gauss(LEVEL, 0.3) * (1.5 if high[i // 16] else 1.0) for i in range(rows)]


@pytest.mark.parametrize(
    ("rows", "is_objective"),
    [
        ([x - i / 400 for i, x in enumerate(_noise(200))], True),
        ([x + 9 * 0.97**i for i, x in enumerate(_noise(200))], True),
        ([3.0 - i / 200 for i in range(200)], True),  # without noise, steeper than its past
        ([*_noise(200), *[x + 0.5 for x in _noise(40)]], False),
        ([x + i / 400 for i, x in enumerate(_noise(200))], False),
        ([*[x + 0.5 for x in _noise(30)], *_noise(60), *[x + 0.4 for x in _noise(200)]], False),
        (_bursts(600), False),
        (_bursts(600, seed=2), False),
    ],
)
def test_an_objective_is_what_has_fallen_beyond_its_own_noise(read, rows, is_objective):
    codes = read(Descent("loss").start(), rows)

    assert codes[:63] == "?" * 63
    assert codes[-1] in ("B" if is_objective else "?o")  # what climbs is no quiet row
    presumed = read(Descent("loss", presumed=True).start(), rows)
    assert set(presumed[:63]) == {"B"}
    assert presumed[-1] == codes[-1]


def test_what_was_harmed_stays_an_objective(read):
    """Half as high for good, and far back before it: the fall of before is known."""
    falling = [x + 9 * 0.97**i for i, x in enumerate(_noise(300))]
    watch = Descent("loss").start()
    read(watch, [*falling, *[x + 1.0 for x in _noise(600)]])
    assert watch.raw == BREACH
    watch.rewind(2)

    assert read(watch, _noise(60), 3)[-1] == "B"


ONE_LOSS = {
    "harmed": Harm("loss", step=True),
    "suspected": Harm("loss", level="suspected"),
    "stricter": Harm("loss", margin=0.05),
    "descended": Descent("loss"),
}


def _firings(names, copied_at):
    """Return which rules of these detectors fired or cleared at which frame, by detector.

    The state is copied behind that frame, and what goes on with the original is another story. The
    loss rises for good, the run goes back to before, and it rises again.
    """
    rules = tuple(Rule(n, itemgetter(i), n, (n,), "SEV2") for i, n in enumerate(names))
    policy = Policy("one", "sha256:0", "observe", {n: ONE_LOSS[n] for n in names}, rules)
    state = initial_state(policy)
    falling = [x + 2 * 0.97**i for i, x in enumerate(_noise(700))]
    rows = [(0, s, x + 0.5 * (s >= 400)) for s, x in enumerate(falling[:450])]
    rows += [(1, s, x + 0.5 * (s >= 500)) for s, x in enumerate(falling[380:], 380)]
    events = [Launched(0, 1, 0), Announced(0, 0, 1, 1, ("loss",))]
    events += [Frame(i, 0, attempt, step, (x,)) for i, (attempt, step, x) in enumerate(rows)]
    fired: dict[str, list[tuple[int, str]]] = {name: [] for name in names}
    for number, event in enumerate(events):
        if number == copied_at:
            original, state = state, deepcopy(state)
            for step in range(600, 640):
                step_engine(policy, original, Frame(number, 0, 0, step, (9.0,)))
        state, decisions = step_engine(policy, state, event)
        for decision in decisions:
            if decision.kind == "rule":
                fired[decision.rule].append((number, decision.reason))
    return fired


def test_detectors_that_learn_the_same_of_a_loss_answer_as_if_they_were_alone():
    together = _firings(tuple(ONE_LOSS), copied_at=420)

    assert together == {n: rows for one in ONE_LOSS for n, rows in _firings((one,), 420).items()}
    assert all(together.values())


_chance = random.Random(1)


@pytest.mark.parametrize(
    ("amounts", "code"),
    [
        ([1], "B"),
        ([None], "B"),  # not known, as in a recording
        ([4, 4, 2], "B"),  # the last update of an epoch
        ([4] * 9 + [1], "B"),
        ([_chance.choice([2, 3]) for _ in range(300)], "B"),  # two tasks
        ([1 + i // 16 for i in range(300)], "B"),  # a ramp of micro-batches
        ([1] * 39 + [21] + [1] * 20 + [6] * 2, "B"),  # an evaluation with gradients
        ([_chance.randint(190, 200) for _ in range(300)], "B"),  # a little more or less
        ([_chance.randint(1, 4) for _ in range(300)], "o"),
        ([_chance.randint(8, 30) for _ in range(300)], "o"),  # episodes, or letters of a name
        ([_chance.randint(8, 30) for _ in range(60)] + [199] * 240, "o"),  # all of one length, now
        ([_chance.randint(8, 30) for _ in range(20)] + [1] * 3000, "B"),
    ],
)
def test_what_is_of_another_amount_each_time_cannot_be_compared(read, amounts, code):
    rows = [(2.0, amounts[i % len(amounts)]) for i in range(max(300, len(amounts)))]
    codes = read(Comparable("loss", "forwards").start(), rows)

    varies = len({round(math.log(amount or 1) / math.log(1.1)) for amount in amounts[:15]}) > 2
    assert codes[:2] == "BB" and ("o" in codes[:15]) is varies and codes[-1] == code


def test_a_row_of_fewer_than_half_is_no_match_for_the_others(read):
    """Also where the amounts vary, as those of padded batches do."""
    amounts = [*[_chance.randint(90, 130) for _ in range(80)], 8, 128, 40, 90]
    codes = read(Comparable("loss", "tokens", least=0.5).start(), [(2.0, n) for n in amounts])

    assert codes == "B" * 80 + "oBoB"


def amounts_and_losses(of_row, amounts):
    """Rows of a loss that falls a little, with noise of 1 %."""
    return [
        (of_row(row, amount) * (1 + (row * 7 % 11 - 5) / 500 - row / 5000), amount)
        for row, amount in enumerate(amounts)
    ]


DOUBLED = [256.0] * 100 + [512.0] * 40
RAMP = [256.0] * 80 + [256.0 * 1.005**row for row in range(120)]
VARIED = [256.0 + row * 37 % 101 for row in range(200)]


@pytest.mark.parametrize(
    ("amounts", "of_row", "first"),
    [
        pytest.param(DOUBLED, lambda row, amount: 2.5 * amount, 100, id="a sum doubles at once"),
        pytest.param(RAMP, lambda row, amount: 2.5 * amount, 100, id="a sum grows slowly"),
        pytest.param(DOUBLED, lambda row, amount: 2.5, None, id="a mean stays"),
        pytest.param(
            DOUBLED, lambda row, amount: 2.5 + 4 * (row > 99), None, id="a mean that is harmed, too"
        ),
        pytest.param(
            VARIED, lambda row, amount: 2.5 + 3 * (row > 150), None, id="harm while lengths vary"
        ),
    ],
)
def test_a_loss_that_grows_with_its_tokens_is_a_sum(read, amounts, of_row, first):
    codes = read(Averaged("loss", "tokens").start(), amounts_and_losses(of_row, amounts))
    expected = len(amounts) if first is None else first
    assert codes == "B" * expected + "o" * (len(amounts) - expected)


def test_a_loss_that_does_not_go_on_following_its_tokens_is_no_sum(read):
    amounts = [256.0] * 100 + [512.0] + [256.0] * 39
    rows = amounts_and_losses(lambda row, amount: 5.0 if row > 99 else 2.5, amounts)
    codes = read(Averaged("loss", "tokens").start(), rows)
    assert codes[99:108] == "B" + "o" * 4 + "B" * 4


def test_a_withdrawn_move_stands_again_when_the_run_goes_back_before_it():
    amounts = [256.0] * 100 + [512.0] + [256.0] * 39
    rows = amounts_and_losses(lambda row, amount: 5.0 if row > 99 else 2.5, amounts)
    watch = Averaged("loss", "tokens").start()
    codes = [watch.feed(sample, step) for step, sample in enumerate(rows)]
    watch.rewind(103)
    assert [watch.feed(rows[step], step) for step in range(104, 120)] == codes[104:120]


def test_a_sum_that_is_harmed_behind_a_move_of_its_tokens_is_compared_again(read):
    rows = amounts_and_losses(lambda row, amount: (4.0 if row > 119 else 2.5) * amount, DOUBLED)
    codes = read(Averaged("loss", "tokens").start(), rows)
    assert codes == "B" * 100 + "o" * 23 + "B" * 17
