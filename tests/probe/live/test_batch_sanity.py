"""What a batch looks like, against a count made by the script itself from the same tokens."""

import math

import pytest

NAMES = ("batch_token_entropy", "batch_unique_ratio", "batch_top1_share")

SCRIPT = """
import sys
from collections import Counter

PROBED = "_supervise_probe" in sys.modules
if PROBED:  # each step, however short it is
    pace = sys.modules["_supervise_probe"]._probe.parts.wired.batch_sanity.pace
    pace.allowed = lambda step_ns: {floor}
    if {floor}:
        pace.every = 1


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.table(x.abs() % 50))


def counted(batches):
    tokens = [t for x in batches for t in x.reshape(-1).tolist()[:16384]]
    counts = [n / len(tokens) for n in Counter(tokens).values()]
    return {{"batch_token_entropy": -math.fsum(p * math.log(p) for p in counts),
            "batch_unique_ratio": len(counts) / len(tokens), "batch_top1_share": max(counts)}}


model = Words()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    batches = []
    for micro in range({micro}):
        x = {tokens}
        batches.append(x.clone())
        model(x).pow(2).mean().backward()
        {after}
    optimizer.step()
    optimizer.zero_grad()
    emit(**counted(batches))
finish(model)
"""
TOKENS = {
    "text": "(torch.rand(8, 64) ** 3 * 40).long()",
    "hashes": "torch.randint(0, 2**62, (32, 64)) // 2**57 * 2**57",
    "longer-than-is-looked-at": "torch.arange(20000) // 7",
    "in-order": "torch.arange(512).view(8, 64) % (33 + step % 7) + 10 * (step // 16)",
    "not-in-a-row": "torch.randint(0, 9, (16, 4)).t()",
}


def script(tokens, micro=1, after="pass", steps=6, floor=10**12):
    return SCRIPT.format(tokens=tokens, micro=micro, after=after, steps=steps, floor=floor)


def compare(job):
    """Every step from the second: the outermost module is known by then."""
    *told, _ = job.output
    assert not any(name in job.frames[0] for name in NAMES) and len(job.frames) >= 6
    for frame, row in list(zip(job.frames, told, strict=True))[1:]:
        for name in NAMES:
            assert frame[name] == pytest.approx(row[name], rel=1e-12, abs=1e-14), name


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "as-on-a-device"])
@pytest.mark.parametrize("kind", TOKENS)
def test_the_numbers_are_those_of_the_batch(probed, kind, late):
    """Entropy, kinds and the commonest, from counts and from sorted values."""
    compare(probed.run(script(TOKENS[kind]), late=late))


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "as-on-a-device"])
def test_micro_batches_are_counted_together(probed, bare, late):
    """Also where the job uses its buffer again at once; the weights are bit-identical."""
    source = script(TOKENS["text"], micro=3, after="x.zero_()")
    job = probed.run(source, late=late)
    compare(job)
    assert job.output[-1] == bare.run(source).output[-1]
    assert job.err == ""


def test_a_model_of_numbers_has_no_tokens(probed):
    job = probed.run(script("torch.randn(4, 16)").replace("x.abs() % 50", "x.abs().long() % 50"))
    assert len(job.frames) == 6
    assert not any(name in frame for frame in job.frames for name in NAMES)


def test_short_steps_are_looked_at_less_often(probed):
    """Where a look costs more than its share of a step, every 16th is left."""
    job = probed.run(script(TOKENS["text"], steps=100, floor=0))
    seen = [frame["step"] for frame in job.frames if NAMES[0] in frame]
    assert seen == [*range(4, 24, 4), *range(24, 64, 8), 64, 80, 96]
    rows = job.output
    for step in seen:
        assert job.frames[step][NAMES[0]] == pytest.approx(rows[step][NAMES[0]], rel=1e-12)


def test_other_data_are_far_from_the_tokens_before_and_become_usual(probed):
    tokens = "torch.randint(0, 20, (8, 64)) + (20 if step >= 20 else 0)"
    job = probed.run(script(tokens, steps=120))
    drift = [frame.get("batch_token_drift") for frame in job.frames]

    assert drift[:5] == [None] * 5
    assert max(drift[5:20]) < 0.1 < 3.0 < min(drift[20:22])
    assert drift[-1] < 0.3


def divergence(p, q):
    """Jensen-Shannon's of two lists of counts of as many tokens, in nat."""
    whole = 0.0
    for a, b in zip(p, q, strict=True):
        whole += sum(x * math.log(2 * x / (a + b)) for x in (a, b) if x)
    return whole / (2 * sum(p))


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "as-on-a-device"])
def test_blocks_of_batches_are_compared_with_mixtures_of_the_same(probed, late):
    """Here each block has tokens of its own; and with too few tokens nothing is said of it."""
    job = probed.run(script(TOKENS["in-order"], steps=130), late=late)

    looks = []
    for step in range(1, 130):
        counts = [0] * 200
        for token in range(512):
            counts[token % (33 + step % 7) + 10 * (step // 16)] += 1
        looks.append(counts)
    found, apart, mixed = {}, 0.0, 0.0
    for end in range(32, len(looks) + 1, 16):
        both = looks[end - 32 : end]
        signs = [bin(n % 16).count("1") % 2 ^ (n // 16) for n in range(32)]
        halves = both[:16], both[16:]
        mixtures = [[look for look, s in zip(both, signs, strict=True) if s == k] for k in (0, 1)]
        sums = [
            [list(map(sum, zip(*part, strict=True))) for part in pair]
            for pair in (halves, mixtures)
        ]
        apart, mixed = (
            0.75 * old + divergence(*pair) for old, pair in zip((apart, mixed), sums, strict=True)
        )
        if end >= 80:
            found[end] = (apart + 1e-6) / (mixed + 1e-6)
    skew = {f["step"]: f["shuffle_block_skew"] for f in job.frames if "shuffle_block_skew" in f}

    assert list(skew) == [80, 96, 112, 128] and min(skew.values()) > 3.0
    assert skew == pytest.approx(found, rel=1e-3)
    few = probed.run(script(TOKENS["in-order"].replace("33", "5").replace("10 *", "1 *"), steps=90))
    assert [f["shuffle_block_skew"] for f in few.frames if "shuffle_block_skew" in f] == [1.0]
