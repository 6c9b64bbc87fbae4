"""Keys that cannot work are refused by name; defaults and examples pass."""

import math

import pytest

from supervise import detectors

CURVE = ((10.0, 4.0, 0.5), (20.0, 2.0, 0.1), (40.0, 2.0, 0.1))
SHARED = ((0.0, 3.0, 0.0), (0.5, 1.5, 0.01), (1.0, 1.0, 0.01))
STAGES = ("grad", "update", "loss")

GOOD = {
    "Absence": {},
    "Band": {"metric": "a", "knots": CURVE},
    "Collapse": {"metric": "a", "knots": SHARED, "total_steps": 1000},
    "Averaged": {"metric": "a", "amount": "b"},
    "Comparable": {"metric": "a", "amount": "b"},
    "Stationary": {"metric": "a", "amount": "b"},
    "Negligible": {"metric": "a", "beside": "b"},
    "Cusum": {"metric": "a"},
    "Equal": {"metric": "a", "to": 1.0},
    "Harm": {"metric": "a"},
    "Join": {"all": ("a",)},
    "Nonfinite": {},
    "Paired": {"metric": "a", "gt": 1.0},
    "Rate": {"event": "a", "count_gte": 10, "clear": 4},
    "RateGuard": {},
    "Ratio": {"metric": "a", "slow": 256, "gt": 2.0, "clear": 1.5},
    "Record": {"metric": "a"},
    "RobustZ": {"metric": "a"},
    "Sequence": {"steps": STAGES},
    "Threshold": {"metric": "a", "gt": 12.0, "clear": 11.0},
    "Trend": {"metric": "a", "slope_per_1k_gt": 0.5},
}
# Kind, keys that do not work, the key that is named, words of the complaint.
WRONG = [
    ("Absence", {"after": {"max": 1.0}}, "after", ""),
    ("Absence", {"after": {"min": 0.0}}, "after", ""),
    ("Absence", {"grace": {"step": 10.0}}, "grace", ""),
    ("Absence", {"grace": {"eval": -1.0}}, "grace", ""),
    ("Band", {"knots": CURVE[:1]}, "knots", "2 to 512"),
    ("Band", {"knots": (CURVE[1], CURVE[0])}, "knots", "step 10 does not come after 20"),
    ("Band", {"knots": ((-1.0, 1.0, 1.0), CURVE[0])}, "knots", "knot 1: step must be at least 0"),
    ("Band", {"knots": ((1.0, math.nan, 1.0), CURVE[0])}, "knots", "finite"),
    ("Band", {"knots": ((1.0, 1.0, -1.0), CURVE[0])}, "knots", "spread"),
    ("Band", {"knots": ((1.0, 0.0, 1.0), CURVE[0]), "transform": "log"}, "knots", "above zero"),
    ("Band", {"width": 0.0}, "width", "positive"),
    ("Band", {"clear": 6.0}, "clear", "below `width`"),
    ("Band", {"smooth": 0}, "smooth", "1 to 1024"),
    ("Collapse", {"knots": ((0.0, 0.0, 0.0), *SHARED[1:])}, "knots", ""),
    ("Collapse", {"align": (0.5, 0.5)}, "align", ""),
    ("Collapse", {"knots": ((0.3, 2.0, 0.0), *SHARED[1:])}, "align", ""),
    ("Collapse", {"total_steps": 1}, "total_steps", ""),
    ("Collapse", {"smooth": 0}, "smooth", ""),
    ("Collapse", {"width": 0.0}, "width", ""),
    ("Collapse", {"margin": 0.0}, "margin", ""),
    ("Collapse", {"lasting": 1.0}, "lasting", ""),
    ("Collapse", {"clear": 1.5}, "clear", ""),
    ("Averaged", {"window": 31}, "window", "32 to 1024"),
    ("Averaged", {"lasting": 0}, "lasting", "at least 1"),
    ("Comparable", {"window": 15}, "window", "16 to 1024"),
    ("Comparable", {"least": 1.0}, "least", "0 to 1"),
    ("Comparable", {"lasting": 0}, "lasting", "at least 1"),
    ("Cusum", {"k": -0.1}, "k", ""),
    ("Cusum", {"h": 0.0}, "h", ""),
    ("Cusum", {"clear": 8.0}, "clear", ""),
    ("Equal", {"to": None}, "to", ""),
    ("Equal", {"with_": "b"}, "to", ""),
    ("Equal", {"to": None, "with_": "a"}, "with", ""),
    ("Equal", {"law": "increasing"}, "law", ""),
    ("Equal", {"to": None, "with_": "b", "law": "nondecreasing"}, "law", ""),
    ("Equal", {"to": "first", "law": "changing"}, "law", ""),
    ("Equal", {"unlike_past": True}, "unlike_past", ""),
    ("Equal", {"longest": True}, "longest", ""),
    ("Equal", {"abs_tolerance": math.nan}, "abs_tolerance", ""),
    ("Harm", {"arl": 100.0}, "arl", ""),
    ("Harm", {"margin": -0.1}, "margin", ""),
    ("Harm", {"window": 31}, "window", "32 to 1024"),
    ("Join", {"all": ()}, "all", ""),
    ("Join", {"any": ("b",)}, "all", ""),
    ("Join", {"within": -1}, "within", ""),
    ("Nonfinite", {"metrics_": ()}, "metrics", ""),
    ("Nonfinite", {"startup": -1}, "startup", ""),
    ("Nonfinite", {"m_of_n": (3, 2)}, "m_of_n", ""),
    ("Paired", {"gt": None}, "gt", ""),
    ("Paired", {"gt": 0.0}, "gt", ""),
    ("Paired", {"lt": 0.0}, "lt", ""),
    ("Paired", {"key": "a"}, "key", ""),
    ("Paired", {"settle": -1}, "settle", ""),
    ("Paired", {"stands": 0}, "stands", ""),
    ("Rate", {"count_gte": None}, "count_gte", ""),
    ("Rate", {"share_gte": 0.1}, "count_gte", ""),
    ("Rate", {"count_gte": 201}, "count_gte", ""),
    ("Rate", {"count_gte": None, "share_gte": 1.5}, "share_gte", ""),
    ("Rate", {"clear": 10}, "clear", ""),
    ("Rate", {"window": 0}, "window", ""),
    ("RateGuard", {"metrics_": ()}, "metrics", ""),
    ("RateGuard", {"announced": ("learning_rate",)}, "announced", ""),
    ("RateGuard", {"confirm": "learning_rate"}, "confirm", ""),
    ("RateGuard", {"over": 1.0}, "over", ""),
    ("RateGuard", {"warmup_jump": math.inf}, "warmup_jump", ""),
    ("RateGuard", {"settle": 0}, "settle", ""),
    ("RateGuard", {"min_": 1}, "min", ""),
    ("RateGuard", {"freeze": 0}, "freeze", ""),
    ("Ratio", {"gt": None}, "gt", ""),
    ("Ratio", {"clear": 2.5}, "clear", ""),
    ("Ratio", {"ref": 50}, "slow", ""),
    ("Ratio", {"fast": 0}, "fast", ""),
    ("Ratio", {"fast": 256}, "slow", ""),
    ("Record", {"gt": 0.0}, "gt", ""),
    ("Record", {"ref": 257}, "ref", ""),
    ("Record", {"calm": 0}, "calm", ""),
    ("RobustZ", {"gt": 0.0}, "gt", ""),
    ("RobustZ", {"clear": 8.0}, "clear", ""),
    ("RobustZ", {"min_": 0}, "min", ""),
    ("RobustZ", {"min_": 129}, "min", ""),
    ("RobustZ", {"freeze": 0}, "freeze", ""),
    ("RobustZ", {"freeze": 129}, "freeze", ""),
    ("RobustZ", {"rel_jitter": 0.0}, "rel_jitter", ""),
    ("RobustZ", {"rel_floor": -1.0}, "rel_floor", ""),
    ("RobustZ", {"abs_floor": 0.0}, "abs_floor", ""),
    ("RobustZ", {"for_": 2, "m_of_n": (1, 2)}, "m_of_n", ""),
    ("Sequence", {"steps": ("a",)}, "steps", ""),
    ("Sequence", {"within": -1}, "within", ""),
    ("Sequence", {"until": "loss"}, "until", ""),
    ("Threshold", {"gt": None}, "gt", ""),
    ("Threshold", {"clear": 12.0}, "clear", ""),
    ("Threshold", {"gt": None, "lt": 12.0}, "clear", ""),
    ("Threshold", {"for_": 0}, "for", ""),
    ("Trend", {"slope_per_1k_gt": None}, "slope_per_1k_gt", ""),
    ("Trend", {"window": 31}, "window", ""),
    ("Trend", {"confidence": 0.5}, "confidence", ""),
]


@pytest.mark.parametrize(("kind", "fields", "key", "words"), WRONG)
def test_keys_that_cannot_work_are_named_in_the_complaint(kind, fields, key, words):
    complaints = dict(getattr(detectors, kind)(**GOOD[kind] | fields).find_errors())

    assert words in complaints[key]


@pytest.mark.parametrize("kind", GOOD)
def test_keys_that_can_work_pass(kind):
    assert getattr(detectors, kind)(**GOOD[kind]).find_errors() == []
