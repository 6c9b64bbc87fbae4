"""A policy put together from packs, its own words and their defaults."""

from .conftest import HEAD

PACK = """\
version: supervise/v1
pack: {name}
summary: a pack
status: experimental
source: [here]
false_alarms: [none]
detectors:
  z: {{kind: robust_z, metric: train_loss_raw, gt: 6.0}}
  up: {{kind: threshold, metric: update_norm, gt: 2.0, clear: 1.5}}
  chain: {{kind: sequence, steps: [up, z], within: 5}}
rules:
  - {{id: spike, when: chain and not z, sev: SEV1}}
  - {{id: notice, when: z, sev: SEV2, keep: 10}}
inhibit: [{{by_rule: spike, mute: [notice]}}]
"""
MINE = {"packs/mine.yaml": PACK.format(name="mine")}


def test_a_pack_is_known_by_its_name_from_outside(load):
    policy = load(HEAD + "use: [mine]\n", MINE)

    assert set(policy.detectors) == {"mine.z", "mine.up", "mine.chain"}
    assert policy.detectors["mine.chain"].detectors == ("mine.up", "mine.z")
    assert [rule.id for rule in policy.rules] == ["mine.spike", "mine.notice"]
    assert policy.rules[0].text == "mine.chain and not mine.z"
    assert policy.inhibit[0].by_rule == "mine.spike"
    assert policy.inhibit[0].mute == ("mine.notice",)


def test_a_mute_that_an_override_voids_is_left_out(load):
    """Also of the copy in the run, which replay and adopt load."""
    override = "{mine.spike: {sev: SEV2}, mine.notice: {sev: SEV1}}"

    policy = load(HEAD + f"use: [mine]\noverride: {override}\n", MINE)

    assert policy.inhibit == ()
    assert load(policy.resolved).digest == policy.digest


def test_a_pack_beside_the_policy_wins_over_a_shipped_one(load):
    policy = load(HEAD + "use: [hang]\n", {"packs/hang.yaml": PACK.format(name="hang")})

    assert "hang.chain" in policy.detectors


def test_a_policy_can_build_on_what_packs_define(load):
    text = HEAD + (
        "use: [mine]\n"
        "detectors: {both: {kind: join, all: [mine.up, mine.chain], within: 3}}\n"
        "rules: [{id: r, when: both or mine.z, sev: SEV2}]\n"
        "inhibit: [{by_rule: mine.spike, mute: [r]}]\n"
    )
    policy = load(text, MINE)

    assert policy.detectors["both"].detectors == ("mine.up", "mine.chain")
    assert policy.rules[-1].uses == ("both", "mine.z")


def test_overrides_change_keys_and_keep_the_rest(load):
    text = HEAD + (
        "use: [mine, hang]\n"
        "override:\n"
        "  mine.z: {gt: 9, m_of_n: [2, 3]}\n"
        "  mine.notice: {sev: SEV1, when: z and not mine.up}\n"
        "  hang.stalled: {after: {min: 60s}}\n"
        "  hang.stuck: {run: null}\n"
    )
    policy = load(text, MINE)
    z, stalled = policy.detectors["mine.z"], policy.detectors["hang.stalled"]
    notice, stuck = policy.rules[1], policy.rules[2]

    assert (z.gt, z.m_of_n, z.metric) == (9.0, (2, 3), "train_loss_raw")
    assert stalled.after == {"min": 60.0, "p99_multiple": 8.0}
    assert (notice.severity, notice.keep_steps) == ("SEV1", 10)
    assert notice.text == "mine.z and not mine.up"
    assert stuck.runbook is None
    assert stuck.see in policy.runbooks  # what people read stays


def test_the_baseline_goes_to_detectors_that_do_not_say_more(load):
    """128 and 64 unless the policy or the detector says otherwise."""
    text = (
        "baseline: {window: 200, min: 100}\n"
        "detectors:\n"
        "  a: {kind: robust_z, metric: update_norm}\n"
        "  b: {kind: robust_z, metric: update_norm, window: 150}\n"
        "  c: {kind: trend, metric: train_loss_raw, slope_per_1k_gt: 0.1}\n"
    )
    policy = load(HEAD + text)
    plain = load(HEAD + "detectors: {a: {kind: robust_z, metric: update_norm}}\n")

    a, b, c = (policy.detectors[name] for name in "abc")
    assert (a.window, a.min_, b.window, b.min_, c.window) == (200, 100, 150, 100, 400)
    assert (plain.detectors["a"].window, plain.detectors["a"].min_) == (128, 64)


def test_a_short_window_holds_what_nobody_wrote(load):
    """`min` and `freeze` of a detector are at most its window; what was written is as written."""
    text = (
        "baseline: {window: 32}\n"
        "detectors:\n"
        "  a: {kind: robust_z, metric: update_norm}\n"
        "  b: {kind: cusum, metric: update_norm, window: 16}\n"
        "  c: {kind: ratio, metric: update_norm, slow: 48, gt: 2.0}\n"
        "  d: {kind: robust_z, metric: update_norm, window: 400, min: 20}\n"
    )
    policy = load(HEAD + text)
    a, b, c, d = (policy.detectors[name] for name in "abcd")

    assert (a.window, a.min_, a.freeze) == (32, 32, 32)
    assert (b.window, b.min_, b.freeze) == (16, 16, 16)
    assert (c.slow, c.min_, c.freeze) == (48, 8, 48)
    assert (d.window, d.min_, d.freeze) == (400, 20, 64)
