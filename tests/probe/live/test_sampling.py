"""Sampled sets: when they are due, denser on request, sparser when too dear; copies of weights."""

import time

import pytest

TRAIN = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.router = None

    def forward(self, x):
        q, k = self.q_proj(x)[:, None], self.k_proj(x)[:, None]
        return x + F.scaled_dot_product_attention(q, k, x[:, None], is_causal=True)[:, 0]

model = nn.Sequential(*[Attention() for _ in range(2)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def steps(number):
    for _ in range(number):
        optimizer.zero_grad()
        model(torch.randn(4, 16, 16, requires_grad=True)).square().mean().backward()
        optimizer.step()

"""

SLOW_SOFTMAX = """
import sys
sampling = sys.modules["_supervise_probe.sampling.schedule"]
sampling.{change}
steps(70)
"""

NO_FLOOR = "FLOOR_NS = sys.modules['_supervise_probe.sampling.sample_sets'].FLOOR_NS = 0"

ALL = {"attention": 1, "activations": 1, "routing": 1, "weights": 0, "share": 100}


def sampled(job, name="max_attn_logit"):
    return [frame["step"] for frame in job.frames if name in frame]


def test_intervals_are_those_of_the_step_number(probed):
    config = {"attention": 4, "activations": 6, "routing": 0, "share": 100}
    job = probed.run(TRAIN + "steps(14)", sampling=config)
    assert sampled(job) == [4, 8, 12]
    assert sampled(job, "residual_rms") == [6, 12]
    status = job.segment().status()["sampling"]
    assert status == {
        "attention": 4,
        "activations": 6,
        "routing": 0,
        "routers": 7,  # at first; then 50
        "weights": 500,
        "gradients": 50,
        "checksums": 50,
        "batch_sanity": 4,
        "moments": 4,
        "updates": 1,
    }


def test_what_has_its_default_interval_is_dense_until_there_is_a_spread(probed):
    """Thirteen samples in the first hundred steps: twelve to compare with, and one to judge."""
    job = probed.run(TRAIN + "steps(160)", sampling={"activations": 50, "share": 100})
    assert sampled(job) == [*range(7, 100, 7), 150]
    assert sampled(job, "residual_rms") == [50, 100, 150]


def test_the_supervisor_makes_samples_denser_for_a_while(probed):
    script = (
        TRAIN
        + "steps(21)\nbarrier('tight')\nsteps(20)\nbarrier('going')\nsteps(2)\n"
        + "barrier('over')\nsteps(40)\n"
    )
    job = probed.start(script, sampling={"attention": 20, "activations": 0, "share": 100})
    job.reached("tight")
    assert sampled(job) == [20]
    assert "tight" not in job.segment().status()["sampling"]
    job.segment().sample_densely(time.monotonic_ns() + 1_500_000_000)
    time.sleep(0.3)  # the probe looks four times a second
    job.go("tight")
    job.reached("going")
    assert sampled(job) == [20, 30, 40]
    status = job.segment().status()["sampling"]
    assert (status["attention"], status["tight"]) == (10, True)
    time.sleep(1.5)  # nobody asks again: a supervisor that died
    job.go("going")
    job.reached("over")
    job.go("over")
    probed.wait(job)
    assert sampled(job) == [20, 30, 40, 60, 80]


def test_a_set_over_its_share_is_taken_less_often(probed):
    # A sample of a quarter of a millisecond, and a share that no step is long enough for.
    change = SLOW_SOFTMAX.format(change=NO_FLOOR)
    job = probed.run(TRAIN + change, sampling={"attention": 2, "activations": 0, "share": 0.001})
    taken = sampled(job)
    assert taken[:3] == [2, 4, 8]  # the first one only loads code; then half as often each time
    assert taken == [2, 4, 8, 16, 32, 64]
    assert job.segment().status()["sampling"]["attention"] == 64
    assert job.segment().status()["thinned"]["attention"] == 64
    assert not any(notice.kind == "sampling" for notice in job.notices)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("LONGEST_NS = 1000", "one sample took "),
        ("SHORT_NS = sampling.LONGEST_STEPS = 0", " steps"),
    ],
)
def test_a_single_sample_that_is_far_too_dear_ends_it(probed, change, why):
    job = probed.run(TRAIN + SLOW_SOFTMAX.format(change=change), sampling={**ALL, "activations": 0})
    assert sampled(job) in ([2], [2, 3])
    state = job.segment().status()["sampling"]["attention"]
    assert state.startswith("off: one sample took ") and why in state
    assert "collector-off" in job.kinds()
    assert [frame["step"] for frame in job.frames] == list(range(70))  # the rest goes on


CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint

class Recomputed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)

model = nn.Sequential(*[Recomputed(Attention()) for _ in range(2)])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
with torch.autocast("cpu", dtype=torch.bfloat16):
    steps(6)
finish(model)
"""


def test_a_model_that_recomputes_its_forward_trains_as_it_would(probed, bare):
    text = TRAIN + CHECKPOINTED
    job = probed.run(text, sampling={**ALL, "weights": 1})
    assert job.output == bare.run(text).output
    assert len(sampled(job, "residual_rms")) == len(sampled(job)) == 4


COPIES = """
model.add_module("moe", nn.Module())
model.moe.num_experts = 4
model.moe.gate = nn.Linear(16, 4, bias=False)
first = nn.Sequential(*[m for m in model][:2])
model.forward = lambda x: first(x) + model.moe.gate(x).sum()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
weights = {}
for step in range(7):
    weights[step] = {n: p.detach().clone() for n, p in model.named_parameters()}
    steps(1)
    w = weights[step]["moe.gate.weight"].double()
    cosines = torch.nn.functional.cosine_similarity(w[:, None], w[None], dim=-1)
    emit(step=step,
         router_weight_similarity=(cosines.sum() - 4).item() / 12,
         router_conditioning=((w - w.mean(0)).norm(dim=1).max() / w.mean(0).norm()).item())
"""


def test_weights_of_routers_are_judged_within_a_hundred_steps(probed):
    """As their scores are: a rule that reads both needs twelve samples of each to compare with."""
    script = COPIES.partition("weights = {}")[0] + "steps(160)"
    job = probed.run(TRAIN + script, sampling={"share": 100})
    assert sampled(job, "router_conditioning") == [*range(7, 100, 7), 150]
    assert sampled(job, "layer_weight_std.0") == []


@pytest.mark.parametrize(
    ("late", "arrived"), [(False, {2: 2, 4: 4, 6: 6}), (True, {3: 2, 5: 4})], ids=["cpu", "device"]
)
def test_copies_of_weights_and_what_follows_from_them(probed, late, arrived):
    """A copy from a device is used a step later, and is still that of the step it was taken in."""
    job = probed.run(TRAIN + COPIES, sampling={**ALL, "routers": 2}, late=late)
    assert sampled(job, "router_conditioning") == list(arrived)
    for step, taken in arrived.items():
        for name in ("router_weight_similarity", "router_conditioning"):
            assert job.frames[step][name] == pytest.approx(job.output[taken][name], rel=1e-5)
