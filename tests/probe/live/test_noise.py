"""The gradient noise scale, where the truth is known, and what several ranks tell."""

import json
import math

import pytest

from tests.inputs.conftest import join_ranks
from tests.support.probed_job import rank_jobs

ALWAYS = {"gradients": 1, "weights": 0, "share": 1e6}

# The gradient of one sample is the sample itself: mean of squared length SIGNAL, trace of the
# covariance NOISE, so the scale is NOISE / SIGNAL = 100 samples.
KNOWN = """
import supervise_probe

SIZE, SIGNAL, MICRO, PARTS = 1000, 10.0, 8, 4
model = nn.Linear(SIZE, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
mean = torch.randn(SIZE)
mean *= SIGNAL**0.5 / mean.norm()
noise = signal = weight = 0.0
for step in range(400):
    optimizer.zero_grad()
    for micro in range(PARTS):
        model(torch.randn(MICRO, SIZE) + mean).mean().backward()
        if micro == 0:
            small = norm([model.weight.grad]) ** 2 * PARTS**2
    supervise_probe.report(tokens_per_update=MICRO * PARTS)
    large = norm([model.weight.grad]) ** 2
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step >= 2:
        few, many = MICRO, MICRO * PARTS
        s = (small - large) / (1 / few - 1 / many)
        g = (many * large - few * small) / (many - few)
        noise, signal = 0.99 * noise + 0.01 * s, 0.99 * signal + 0.01 * g
        weight += 1
        emit(step=step, noise=s, signal=g, ratio=noise / signal)
"""


def test_the_estimate_finds_the_noise_that_was_put_in(probed):
    """Each value equals the script's own; over 400 steps both parts are right in their error. The
    losses of the parts are added up, gradients are clipped, and the job is on a device."""
    job = probed.run(KNOWN, late=True, sampling=ALWAYS, slots=512)
    told = job.output
    for row in told:
        frame = job.frames[row["step"]]
        if row["ratio"] > 0:
            assert frame["grad_noise_scale"] == pytest.approx(row["ratio"], rel=1e-4)
            assert frame["gsnr"] * frame["grad_noise_scale"] == pytest.approx(1.0)
    # One sample: S +- 67 of 1000, G^2 +- 3.1 of 10; 398 independent ones: 0.34 % and 1.6 %.
    noise, signal = (
        sum(row[name] for row in told) / len(told) / 16.0 for name in ("noise", "signal")
    )
    assert noise == pytest.approx(1000.0, rel=4 * 0.0034)
    assert signal == pytest.approx(10.0, rel=4 * 0.016)
    last = job.frames[-1]["grad_noise_scale"]  # of about 200 samples: 2.3 %
    assert last == pytest.approx(100.0, rel=4 * 0.023)


def test_two_losses_of_one_forward_are_no_two_batch_sizes(probed):
    script = """
model = nn.Linear(6, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 5, (8,)))
    loss.backward(retain_graph=True)
    (loss * 0.1).backward()
    optimizer.step()
"""
    job = probed.run(script, sampling=ALWAYS)
    assert not any("grad_noise_scale" in frame for frame in job.frames)
    assert not any(name.startswith("_") for frame in job.frames for name in frame)


RANKS = """
import atexit, sys
import torch.distributed as dist

os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
child = os.fork()
rank = 0 if child else 1
os.environ["RANK"] = str(rank)
torch.manual_seed(0)
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank,
                        world_size=2)
inner = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 8))
model = nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank + 1)
watched = [p for p in inner.parameters() if p.numel() >= 16]

def signs(count):
    found = []
    for word in range(1, count + 1):
        for factor in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D):
            word = word * factor % 2**32
            word ^= word >> 15
        found.append(1 if word % 2 else -1)
    return found

SIGNS = torch.tensor(signs(8 * 8192), dtype=torch.float64).view(8, 8192)
PARTS, rows, noise, signal = 3, [], 0.0, 0.0
for step in range(10):
    optimizer.zero_grad()
    micros = [(torch.randn(8, 40), torch.randint(0, 8, (8,))) for _ in range(PARTS)]
    x, y = micros[0]
    loss = -inner(x).log_softmax(1)[torch.arange(8), y].mean()  # not counted as tokens
    own = torch.autograd.grad(loss / PARTS, watched)
    for part, (x, y) in enumerate(micros):
        with model.no_sync() if part < 2 else torch.enable_grad():
            (F.cross_entropy(model(x), y) / PARTS).backward()
    small = norm(own) ** 2 * PARTS**2
    large = norm(p.grad for p in watched) ** 2
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    if step >= 2:
        few, many = 8, 8 * PARTS * 2
        noise = 0.99 * noise + (small - large) / (1 / few - 1 / many)
        signal = 0.99 * signal + (many * large - few * small) / (many - few)
        sketch = torch.zeros(16, dtype=torch.float64)
        for index, g in enumerate(own):
            run = g.double().view(-1)[: g.numel() // 16 * 16]
            sketch += (run * SIGNS[index, : run.numel()]).view(-1, 16).sum(0)
        rows.append(dict(step=step, sketch=sketch.tolist(), ratio=noise / signal))
dist.destroy_process_group()
import hashlib
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in inner.parameters()))
rows.append(dict(sha=digest.hexdigest()))
with open(f"told.{rank}", "w") as file:
    file.writelines(json.dumps(row) + chr(10) for row in rows)
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    atexit._run_exitfuncs()
    os._exit(0)
"""


def rows_of_ranks(job):
    """What the script told of each rank."""
    paths = [job.folder / f"told.{rank}" for rank in (0, 1)]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def cosine(one, other):
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    return dot / math.hypot(*one) / math.hypot(*other)


def test_two_ranks_tell_their_own_gradients(probed, bare):
    """Sketches and noise from before the reduction, on both ranks; weights bit-identical."""
    job = probed.run(RANKS, sampling=ALWAYS)
    told, ranks = rows_of_ranks(job), rank_jobs(job.folder)
    for rows, rank in zip(told, ranks, strict=True):
        for row in rows[:-1]:
            frame = rank.frames[row["step"]]
            sketch = [frame[f"grad_sketch.{index}"] for index in range(16)]
            assert sketch == pytest.approx(row["sketch"], rel=1e-5, abs=1e-9)
            if row["ratio"] > 0:
                assert frame["grad_noise_scale"] == pytest.approx(row["ratio"], rel=1e-3)
    for one, other in zip(told[0][:-1], told[1][:-1], strict=True):
        joined = join_ranks(*(rank.frames[one["step"]] for rank in ranks))
        alike = cosine(one["sketch"], other["sketch"])
        assert joined["grad_direction_consistency"] == pytest.approx(alike, abs=1e-6)
    assert told[0][-1] == told[1][-1]
    assert rows_of_ranks(bare.run(RANKS)) == told
