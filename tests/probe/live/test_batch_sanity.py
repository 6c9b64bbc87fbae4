"""What a batch looks like, against a count made by the script itself from the same tokens."""

import math
from itertools import pairwise

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


@pytest.mark.parametrize(
    ("kind", "late"), [*((kind, False) for kind in TOKENS), ("text", True), ("hashes", True)]
)
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
    shown = {name for frame in job.frames for name in frame if name.startswith("batch_")}
    assert shown == {"batch_fingerprint", "batch_samples_differ"}
    assert "unseen" not in job.segment().status()


SAMPLES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(30, 3)

    def forward(self, labels, pixels):
        return nn.functional.cross_entropy(self.head(pixels.flatten(1)), labels)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(7):
    pixels = torch.randn(4, 3, 10)
    if step in (2, 5):  # as what a reader returns that failed, normalized by channel
        pixels = torch.tensor([1.0, -2.0, 0.5]).view(1, 3, 1).expand(4, 3, 10).contiguous()
    if step == 3:  # most of each sample is the same
        pixels = torch.zeros(4, 3, 10)
        pixels[2, 0, 0] = 1.0
    if step == 5:  # another micro-batch has samples
        model(torch.randint(3, (4,)), torch.randn(4, 3, 10)).backward()
    model(torch.randint(3, (4,)), pixels).backward()
    optimizer.step()
    optimizer.zero_grad()
finish(model)
"""


def test_samples_of_numbers_that_are_all_the_same_are_counted(probed, bare):
    """Labels of whole numbers, which come first, and differ, are not the data."""
    job = probed.run(SAMPLES)
    assert [frame.get("batch_samples_differ") for frame in job.frames][1:] == [1, 0, 1, 1, 1, 1]
    assert job.output[-1] == bare.run(SAMPLES).output[-1]


BESIDE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, x, *beside):
        return self.head(x if x.is_floating_point() else self.table(x))

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows, places = torch.ones(4, 16, 8), torch.arange(640000).view(4, 20000, 8)
for step in range(14):
    inputs = INPUTS
    model(*inputs).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
finish(model)
"""


@pytest.mark.parametrize(
    ("inputs", "values"),
    [
        ("[torch.randint(50, (4, 16)), torch.zeros(4, 1, 16, 16)]", [None] * 13),  # a mask
        ("[torch.ones(1, 16, 8)]", [None] * 13),  # a single sample
        ("[torch.ones(16, 4, 8).transpose(0, 1)]", [None] * 13),
        ("[rows]", [0.0] * 8 + [None] * 5),
        ("[rows[:1].expand(4, 16, 8)]", [0.0] * 13),  # costs nothing
        ("[torch.randn(4, 8, 16).transpose(1, 2)]", [1.0] * 13),  # channels last
        ("[(places == step * 36871 % 480000 + 160000).float()]", [1.0] * 13),  # one value of many
        ("[rows if step != 10 else torch.randn(4, 16, 8)]", [0.0] * 8 + [None, 1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_samples_are_compared_where_they_are_the_data_and_differ_by_design(probed, inputs, values):
    """Those of 8 steps in a row from the first one on are looked at no further."""
    job = probed.run(BESIDE.replace("INPUTS", inputs))
    shown = [frame.get("batch_samples_differ") for frame in job.frames][1:]
    assert shown == values


MEANS = """
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
cross_entropy = nn.functional.cross_entropy
for step in range(4):
    x, y, mask = torch.randn(4, 6), torch.randint(3, (4,)), torch.ones(4)
    if step == 2:
        mask = torch.zeros(4)
    ignored = torch.where(mask > 0, y, -100)
    each = cross_entropy(model(x), y, reduction="none")
    optimizer.zero_grad()
    (LOSS).backward()
    if step == 2:
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()
finish(model)
"""
OF_NOTHING = {
    "own-mean": "(each * mask).sum() / mask.sum()",
    "of-each-sample": "((each * mask)[:, None].sum(1) / mask).mean() + 1.0",
    "of-a-selection": "0.5 * each[mask > 0].mean()",
    "micro-batch": "(cross_entropy(model(x), y) + cross_entropy(model(x), ignored)) / 2",
    "filled": "each.masked_fill(mask == 0, 0.0).sum() / mask.sum()",
    "chosen": "torch.where(mask > 0, each, 0.0).sum() / mask.sum()",
    "counted": "cross_entropy(model(x), ignored, reduction='sum') / (ignored >= 0).sum()",
    "of-a-sample": "((each * SOME)[:, None].sum(1) / SOME).mean()",
}
OF_SOME = {
    "sum": "cross_entropy(model(x), ignored, reduction='sum') / 4",
    "bounded": "(each * mask).sum() / mask.sum().clamp(min=1)",
    "made-finite": "cross_entropy(model(x), y) + 0 * cross_entropy(model(x), ignored).nan_to_num()",
    "nan": "each.sum() / (1.0 if step != 2 else float('nan'))",
    "no-spread": "((each - each.detach()) / (each * mask).detach().std()).sum()",
    "no-scale": "((each - each) / (each * mask).detach().abs().amax()).mean()",
}


@pytest.mark.parametrize("kind", [*OF_NOTHING, *OF_SOME])
def test_a_loss_that_is_a_mean_over_no_target_is_counted(probed, kind):
    """Other losses of such a batch, and other NaN, are not."""
    loss = {**OF_NOTHING, **OF_SOME}[kind]
    loss = loss.replace("SOME", "torch.where(torch.arange(4) > 1, 1.0, mask)")
    job = probed.run(MEANS.replace("LOSS", loss))
    counts = [frame.get("losses_without_targets") for frame in job.frames]
    assert counts == [0, 0, float(kind in OF_NOTHING), 0]


SLEEP = "optimizer.zero_grad(); __import__('time').sleep(0.01)"
WIRED = "sys.modules['_supervise_probe']._probe.parts.wired"
OTHER_DEVICE = f"{SLEEP}; PROBED and setattr({WIRED}.batch_sanity, '_usual', None)"
TOO_DEAR = "__import__('_supervise_probe').collectors.batch.BASELINE_SHARE = 0.0"
DENSE, SPARSE = [*range(4, 24, 4), *range(24, 64, 8), 64, 80, 96], [280, 288, 296, 304, 312, 320]


@pytest.mark.parametrize(
    ("steps", "source", "looks"),
    [
        (100, ("    if 0:", f"    {TOO_DEAR}\n    if 0:"), DENSE),
        (330, ("optimizer.zero_grad()", SLEEP), [*range(4, 276, 4), *SPARSE]),
        (330, ("optimizer.zero_grad()", OTHER_DEVICE), [*range(4, 276, 4), *SPARSE]),
    ],
)
def test_short_steps_are_looked_at_less_often(probed, steps, source, looks):
    """Where a look costs more than its share of a step, every 16th is left; at first 64 looks
    come, which rules compare with, unless they slow the job down. No more come where batches move
    from device to device, of which each has a mean of its own."""
    job = probed.run(script(TOKENS["text"], steps=steps, floor=0).replace(*source))
    seen = [frame["step"] for frame in job.frames if NAMES[0] in frame]
    assert seen == [step for step in looks if step >= job.frames[0]["step"]]
    rows, frames = job.output, {frame["step"]: frame for frame in job.frames}
    for step in seen:
        assert frames[step][NAMES[0]] == pytest.approx(rows[step][NAMES[0]], rel=1e-12)


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


def test_blocks_of_batches_are_compared_with_mixtures_of_the_same(probed):
    """Here each block has tokens of its own; and with too few tokens nothing is said of it."""
    job = probed.run(script(TOKENS["in-order"], steps=130))

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


PADDING = ("batch_pad_fraction", "batch_seq_len_p50", "batch_seq_len_p95")
SEQUENCES = """
import random
import sys
from types import SimpleNamespace

if "_supervise_probe" in sys.modules:  # each step
    sanity = sys.modules["_supervise_probe"]._probe.parts.wired.batch_sanity
    sanity.pace.allowed, sanity.pace.every, sanity.rarer = lambda step_ns: 10**12, 1, {rarer}
rng = random.Random(1)

class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8, padding_idx={padding}), nn.Linear(8, 3)
        self.config = SimpleNamespace(pad_token_id={named})

    def forward(self, ids=None, batch=None, **beside):
        ids = batch["ids"] if ids is None else ids
        return self.head(self.table(ids.clamp(0, 49)))

def padded(lengths, width=16, ahead=False):
    rows = [[8, *(rng.randrange(5, 10) for _ in range(n - 2)), 9][-n:] for n in lengths]
    pads = [[7] * (width - n) for n in lengths]  # which is in the text, too
    return torch.tensor([p + r if ahead else r + p for r, p in zip(rows, pads)])

def told(lengths, tokens=None):
    ordered = sorted(lengths)
    found = {{}} if tokens is None else dict(pad_fraction=100 * (1 - sum(lengths) / tokens))
    for name, share in (("p50", 0.5), ("p95", 0.95)):
        found["seq_len_" + name] = ordered[int(share * (len(ordered) - 1))]
    emit(**{{"batch_" + name: value for name, value in found.items()}})

model = Reads()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    lengths = [rng.randrange(1, 17) for _ in range(8)]
    for loss in batches(step, lengths):
        loss.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
finish(model)
"""
MASKED = """
def batches(step, lengths):
    told(lengths, 128)
    ids = padded(lengths)
    mask = torch.tensor([[float(i < n) for i in range(16)] for n in lengths])
    if step % 4 == 0:
        return [model(ids, attention_mask=mask.long())]
    if step % 4 == 1:
        return [model(ids, src_key_padding_mask=mask == 0)]
    if step % 4 == 2:
        return [model(None, dict(ids=ids, attention_mask=mask))]
    return [model(x, attention_mask=m) for x, m in zip(ids.split(3), mask.split(3))]
"""
PADDED = """
def batches(step, lengths):
    told(lengths, 128)
    return [model(padded(lengths, ahead=step % 2 == 1))]
"""
PACKED = """
def batches(step, lengths):
    told(lengths)
    ids, ends = padded([sum(lengths)], sum(lengths)), torch.tensor([0, *lengths]).cumsum(0)
    if step % 2:
        return [model(ids, cu_seq_lens_q=ends.int())]
    return [model(ids, position_ids=torch.cat([torch.arange(n) for n in lengths])[None])]
"""
WHOLE = """
def batches(step, lengths):
    ids = padded([16] * 8)
    if {outside}:
        ids[0, :step], ids[1, :2], ids[2, :5] = 50 + step, -1, -100
    emit(batch_ids_outside=100 * (step + 2) / 128 if {outside} else 0)
    return [model(ids)]
"""


def read(probed, batches, *, padding=None, named=None, late=False, rarer=1):
    """Compare each step from the second with what the script itself counted; return the status."""
    job = probed.run(
        batches + SEQUENCES.format(padding=padding, named=named, rarer=rarer), late=late
    )
    *told, _ = job.output
    for frame, row in list(zip(job.frames, told, strict=True))[1::rarer]:
        names = {*row} | {*PADDING}
        shown = {name: value for name, value in frame.items() if name in names}
        assert shown == pytest.approx(row, abs=1e-9)
    assert job.err == ""
    return job.segment().status()


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "as-on-a-device"])
def test_batch_pad_fraction_batch_seq_len_p50_and_batch_seq_len_p95_are_those_of_the_mask(
    probed, late
):
    """Whichever mask it is, in a dict, and of micro-batches together."""
    assert "unseen" not in read(probed, MASKED, late=late)


@pytest.mark.parametrize("padding", [{"padding": 7}, {"named": 7}], ids=["table", "config"])
def test_padding_is_what_the_model_calls_so_at_the_ends_of_a_row(probed, padding):
    """The same id within a row is text."""
    assert "unseen" not in read(probed, PADDED, **padding)


def test_packed_sequences_have_lengths_and_no_known_padding(probed):
    assert read(probed, PACKED)["unseen"].keys() == {"batch_pad_fraction"}


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "as-on-a-device"])
def test_ids_outside_are_those_that_are_no_row_of_the_largest_embedding(probed, late):
    """Targets that are ignored are none; and rows without a mask tell nothing of padding."""
    unseen = read(probed, WHOLE.format(outside="True"), late=late)["unseen"]
    assert unseen.keys() == {*PADDING} and "no mask" in unseen["batch_pad_fraction"]
    if not late:
        read(probed, WHOLE.format(outside="False"), rarer=4)


def kl(p, q):
    """Of counts, from shares with one percent spread over 1024 kinds."""
    spread = [0.99 * n / sum(q) + 0.01 / 1024 for n in q]
    return sum(n / sum(p) * math.log(n / sum(p) / b) for n, b in zip(p, spread, strict=True) if n)


def test_batch_token_shift_is_the_divergence_from_the_first_blocks_over_their_own(probed):
    tokens = "torch.arange(512).view(8, 64) % (33 + step % 7) + (20 if step > 100 else step // 16)"
    job = probed.run(script(tokens, steps=146))

    looks = []
    for step in range(1, 146):
        counts = [0] * 1024
        for token in range(512):
            counts[token % (33 + step % 7) + (20 if step > 100 else step // 16)] += 1
        looks.append(counts)
    blocks = [list(map(sum, zip(*looks[i : i + 16], strict=True))) for i in range(0, 144, 16)]
    first, steps = blocks[:4], [kl(b, a) for a, b in pairwise(blocks)]
    pairs = [kl(a, b) for a in first for b in first if a is not b]
    expected = {}
    for number in range(4, 9):
        apart = sum(kl(blocks[number], block) for block in first) / 4
        between = sorted(steps[:number])[3 * number // 4]
        expected[16 * number + 16] = apart / max(sum(pairs) / 12, 0.002, between)
    shift = {f["step"]: f["batch_token_shift"] for f in job.frames if "batch_token_shift" in f}

    assert shift == pytest.approx(expected, rel=1e-3)
    assert shift[144] > shift[80]
