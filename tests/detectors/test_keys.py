"""Keys that cannot work are refused by name; defaults and examples pass."""

import math

import pytest

from supervise.detectors import (
    Absence,
    Band,
    Collapse,
    Cusum,
    Equal,
    Harm,
    Join,
    Nonfinite,
    Paired,
    Rate,
    RateGuard,
    Ratio,
    Record,
    RobustZ,
    Sequence,
    Threshold,
    Trend,
)

CURVE = ((10.0, 4.0, 0.5), (20.0, 2.0, 0.1), (40.0, 2.0, 0.1))
SHARED = ((0.0, 3.0, 0.0), (0.5, 1.5, 0.01), (1.0, 1.0, 0.01))
STAGES = ("grad", "update", "loss")

# Kind, keys that work, and (keys that do not, key that is named[, words of the complaint]).
TABLE = [
    (
        Absence,
        {},
        [
            ({"after": {"max": 1.0}}, "after"),
            ({"after": {"min": 0.0}}, "after"),
            ({"grace": {"step": 10.0}}, "grace"),
            ({"grace": {"eval": -1.0}}, "grace"),
        ],
    ),
    (
        Band,
        {"metric": "a", "knots": CURVE},
        [
            ({"knots": CURVE[:1]}, "knots", "2 to 512"),
            ({"knots": (CURVE[1], CURVE[0])}, "knots", "step 10 does not come after 20"),
            ({"knots": ((-1.0, 1.0, 1.0), CURVE[0])}, "knots", "knot 1: step must be at least 0"),
            ({"knots": ((1.0, math.nan, 1.0), CURVE[0])}, "knots", "finite"),
            ({"knots": ((1.0, 1.0, -1.0), CURVE[0])}, "knots", "spread"),
            ({"knots": ((1.0, 0.0, 1.0), CURVE[0]), "transform": "log"}, "knots", "above zero"),
            ({"width": 0.0}, "width", "positive"),
            ({"clear": 6.0}, "clear", "below `width`"),
            ({"smooth": 0}, "smooth", "1 to 1024"),
        ],
    ),
    (
        Collapse,
        {"metric": "a", "knots": SHARED, "total_steps": 1000},
        [
            ({"knots": SHARED[:1]}, "knots"),
            ({"knots": ((0.0, 0.0, 0.0), *SHARED[1:])}, "knots"),
            ({"align": (0.5, 0.5)}, "align"),
            ({"knots": ((0.3, 2.0, 0.0), *SHARED[1:])}, "align"),
            ({"total_steps": 1}, "total_steps"),
            ({"smooth": 0}, "smooth"),
            ({"width": 0.0}, "width"),
            ({"margin": 0.0}, "margin"),
            ({"lasting": 1.0}, "lasting"),
            ({"clear": 1.5}, "clear"),
        ],
    ),
    (
        Cusum,
        {"metric": "a"},
        [
            ({"k": -0.1}, "k"),
            ({"h": 0.0}, "h"),
            ({"clear": 8.0}, "clear"),
        ],
    ),
    (
        Equal,
        {"metric": "a", "to": 1.0},
        [
            ({"to": None}, "to"),
            ({"with_": "b"}, "to"),
            ({"to": None, "with_": "a"}, "with"),
            ({"law": "increasing"}, "law"),
            ({"to": None, "with_": "b", "law": "nondecreasing"}, "law"),
            ({"to": "first", "law": "changing"}, "law"),
            ({"unlike_past": True}, "unlike_past"),
            ({"abs_tolerance": math.nan}, "abs_tolerance"),
        ],
    ),
    (
        Harm,
        {"metric": "a"},
        [
            ({"arl": 100.0}, "arl"),
            ({"margin": -0.1}, "margin"),
            ({"window": 31}, "window", "32 to 1024"),
        ],
    ),
    (
        Join,
        {"all": ("a",)},
        [
            ({"all": ()}, "all"),
            ({"any": ("b",)}, "all"),
            ({"within": -1}, "within"),
        ],
    ),
    (
        Nonfinite,
        {},
        [
            ({"metrics_": ()}, "metrics"),
            ({"startup": -1}, "startup"),
            ({"m_of_n": (3, 2)}, "m_of_n"),
        ],
    ),
    (
        Paired,
        {"metric": "a", "gt": 1.0},
        [
            ({"gt": None}, "gt"),
            ({"gt": 0.0}, "gt"),
            ({"lt": 0.0}, "lt"),
            ({"key": "a"}, "key"),
            ({"settle": -1}, "settle"),
            ({"stands": 0}, "stands"),
        ],
    ),
    (
        Rate,
        {"event": "a", "count_gte": 10, "clear": 4},
        [
            ({"count_gte": None}, "count_gte"),
            ({"share_gte": 0.1}, "count_gte"),
            ({"count_gte": 201}, "count_gte"),
            ({"count_gte": None, "share_gte": 1.5}, "share_gte"),
            ({"clear": 10}, "clear"),
            ({"window": 0}, "window"),
        ],
    ),
    (
        RateGuard,
        {},
        [
            ({"metrics_": ()}, "metrics"),
            ({"announced": ("learning_rate",)}, "announced"),
            ({"confirm": "learning_rate"}, "confirm"),
            ({"over": 1.0}, "over"),
            ({"warmup_jump": math.inf}, "warmup_jump"),
            ({"settle": 0}, "settle"),
            ({"min_": 1}, "min"),
            ({"freeze": 0}, "freeze"),
        ],
    ),
    (
        Ratio,
        {"metric": "a", "slow": 256, "gt": 2.0, "clear": 1.5},
        [
            ({"gt": None}, "gt"),
            ({"lt": 0.5}, "lt"),
            ({"clear": 2.5}, "clear"),
            ({"ref": 50}, "slow"),
            ({"fast": 0}, "fast"),
            ({"fast": 256}, "slow"),
        ],
    ),
    (
        Record,
        {"metric": "a"},
        [
            ({"gt": 0.0}, "gt"),
            ({"ref": 257}, "ref"),
            ({"calm": 0}, "calm"),
        ],
    ),
    (
        RobustZ,
        {"metric": "a"},
        [
            ({"gt": 0.0}, "gt"),
            ({"clear": 8.0}, "clear"),
            ({"min_": 0}, "min"),
            ({"min_": 129}, "min"),
            ({"freeze": 0}, "freeze"),
            ({"freeze": 129}, "freeze"),
            ({"rel_jitter": 0.0}, "rel_jitter"),
            ({"rel_floor": -1.0}, "rel_floor"),
            ({"abs_floor": 0.0}, "abs_floor"),
            ({"for_": 2, "m_of_n": (1, 2)}, "m_of_n"),
        ],
    ),
    (
        Sequence,
        {"steps": STAGES},
        [
            ({"steps": ("a",)}, "steps"),
            ({"within": -1}, "within"),
            ({"until": "loss"}, "until"),
        ],
    ),
    (
        Threshold,
        {"metric": "a", "gt": 12.0, "clear": 11.0},
        [
            ({"gt": None}, "gt"),
            ({"lt": 2.0}, "lt"),
            ({"clear": 12.0}, "clear"),
            ({"gt": None, "lt": 12.0}, "clear"),
            ({"for_": 0}, "for"),
            ({"for_": 2, "m_of_n": (1, 3)}, "m_of_n"),
        ],
    ),
    (
        Trend,
        {"metric": "a", "slope_per_1k_gt": 0.5},
        [
            ({"slope_per_1k_gt": None}, "slope_per_1k_gt"),
            ({"slope_per_1k_lt": 0.0}, "slope_per_1k_lt"),
            ({"window": 31}, "window"),
            ({"confidence": 0.5}, "confidence"),
        ],
    ),
]
WRONG = [
    pytest.param(kind, good | bad, key, "".join(words), id=f"{kind.__name__}-{'-'.join(bad)}")
    for kind, good, rows in TABLE
    for bad, key, *words in rows
]


@pytest.mark.parametrize(("kind", "fields", "key", "words"), WRONG)
def test_what_cannot_work_is_refused(kind, fields, key, words):
    """The complaint names the key, and says what is wrong with it."""
    complaints = dict(kind(**fields).check())

    assert key in complaints
    assert words in complaints[key]


@pytest.mark.parametrize(("kind", "fields"), [row[:2] for row in TABLE])
def test_what_can_work_passes(kind, fields):
    assert kind(**fields).check() == []
