"""Faults injected on purpose, and the reflex that answers one of them."""

import math

import pytest

pytestmark = pytest.mark.slow

LOOP = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, x, y=None):
        self.saw = x
        logits = self.head(self.table(x))
        return F.cross_entropy(logits.reshape(-1, 50), y.reshape(-1))

model = Words()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
while step < 20:
    if step == {wait}:
        barrier("go")
    x = torch.randint(0, 5, (4, 16))
    optimizer.zero_grad()
    loss = model(x, y=x)
    loss.backward()
    {clip}
    old = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    emit(step=step, lr=optimizer.param_groups[0]["lr"], same_input=bool((model.saw == x).all()),
         finite=all(bool(p.isfinite().all()) for p in model.parameters()),
         same=all(bool((p == q).all()) for p, q in zip(model.parameters(), old)))
    step += 1
finish(model)
"""
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def loop(clip="pass", wait=-1):
    return LOOP.format(clip=clip, wait=wait)


def drill(fault, step=8, **params):
    return {"fault": fault, "step": step, "params": params}


def test_lr_spike_multiplies_the_rate_for_some_steps(probed):
    """The schedule and `lr_scale` do not show it; the rate that was used does."""
    job = probed.run(loop(), drills=[drill("lr_spike", factor=30, steps=5)])
    spiked = [step for step, lr in enumerate(job.column("learning_rate")) if lr > 0.02]
    assert spiked == [8, 9, 10, 11, 12]
    assert job.column("learning_rate")[8] == pytest.approx(0.3)
    assert set(job.column("lr_scale")) == {1.0}
    assert {row.get("lr", 1e-2) for row in job.output} == {1e-2}
    assert job.kinds() == ["drill"] and "lr_spike begins at step 8" in job.notices[0].message


def test_nan_grad_strikes_once(probed):
    """The gradient norm is NaN in that step, and without a reflex the weights are NaN after it."""
    job = probed.run(loop(CLIP), drills=[drill("nan_grad")])
    assert next(s for s, n in enumerate(job.column("grad_global_norm")) if math.isnan(n)) == 8
    assert [row["finite"] for row in job.output[:-1]] == [True] * 8 + [False] * 12
    assert job.frames[8]["nan_inf_events"] == 2  # the gradient, and the update it made


@pytest.mark.parametrize("clip", ["pass", CLIP], ids=["", "clipped"])
def test_skip_nonfinite_keeps_the_step_from_the_weights(probed, clip):
    """Weights and optimizer state are untouched, the step is counted as skipped and reported."""
    order = {"skip_nonfinite": {"max": 3, "per": 128}}
    job = probed.run(loop(clip), drills=[drill("nan_grad")], safeguards=order)
    assert all(row["finite"] for row in job.output[:-1])
    assert [row["step"] for row in job.output[:-1] if row["same"]] == [8]
    assert [s for s, n in enumerate(job.column("update_skipped")) if n] == [8]
    assert math.isnan(job.frames[8]["grad_global_norm"]) and job.frames[8]["nan_inf_events"] == 1
    assert job.kinds() == ["drill", "safeguard"] and job.notices[1].step == 8
    assert job.segment().status()["safeguards"] == {"skip_nonfinite": "armed"}


STUBBORN = """
model = nn.Linear(4, 1)
optimizer = torch.optim.{optimizer}
for step in range(10):
    calls = 0

    def closure():
        global calls
        calls += 1
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).pow(2).mean() * (float("nan") if step >= 4 else 1)
        loss.backward()
        return loss

    old = model.weight.detach().clone()
    if {deferred}:
        loss = optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    emit(calls=calls, same=bool((old == model.weight).all()), state=len(optimizer.state))
"""


@pytest.mark.parametrize("deferred", [False, True], ids=["", "closure"])
def test_a_run_that_is_not_finite_for_good_does_not_idle_on(probed, deferred):
    """At most `max` steps in `per` are skipped; then the trouble takes its course, visibly."""
    optimizer = "SGD(model.parameters(), lr=0.1)"
    script = STUBBORN.format(optimizer=optimizer, deferred=deferred)
    job = probed.run(script, safeguards={"skip_nonfinite": {"max": 2, "per": 100}})
    assert [row["same"] for row in job.output] == [False] * 4 + [True] * 2 + [False] * 4
    assert {row["calls"] for row in job.output} == {1}
    assert job.kinds() == ["safeguard"] * 2


def test_skip_nonfinite_leaves_the_state_of_a_closure_optimizer_alone(probed):
    """LBFGS evaluates its closure inside the step: it is left before the first update."""
    optimizer = "LBFGS(model.parameters(), lr=0.5, max_iter=3)"
    script = STUBBORN.format(optimizer=optimizer, deferred=True)
    job = probed.run(script, safeguards={"skip_nonfinite": {"max": 9, "per": 100}})
    assert [row["same"] for row in job.output] == [False] * 4 + [True] * 6
    assert [row["calls"] for row in job.output][4:] == [1] * 6
    assert [frame["update_skipped"] for frame in job.frames] == [0] * 4 + [1] * 6


def test_bad_batch_feeds_random_tokens(probed):
    """Other tokens for so many steps, from a generator of its own; the job's draws are the same."""
    job = probed.run(loop(), drills=[drill("bad_batch", steps=3)])
    assert [row["step"] for row in job.output[:-1] if not row["same_input"]] == [8, 9, 10]
    undisturbed = probed.run(loop()).column("train_loss_raw")
    losses = job.column("train_loss_raw")
    assert losses[:8] == undisturbed[:8] and losses[8] > 1.1 * undisturbed[8]
    assert len(job.frames) == 20


@pytest.mark.parametrize("target", ["grad", "weight"])
def test_bit_flip_strikes_once(probed, target):
    """One exponent bit: a gradient that is huge in one step, or a weight that stays huge."""
    job = probed.run(loop(CLIP), drills=[drill("bit_flip", target=target, bit=30)])
    norms = job.column("grad_global_norm")
    assert max(norms[:8]) < 10
    if target == "grad":
        assert norms[8] > 1e6 and max(norms[9:]) < 10
    else:
        assert max(job.column("update_norm")) > 1e6 or job.frames[9]["train_loss_raw"] > 100


def test_a_hang_may_end(probed, bare):
    """With `seconds` the job goes on, and nothing but time was lost."""
    job = probed.run(loop(), drills=[drill("hang", seconds=0.3)])
    assert job.column("step_time")[8] > 0.3
    assert job.output[-1] == bare.run(loop()).output[-1]


def test_a_drill_fires_once_per_run(probed, make_folder):
    """Not again in steps that a rollback repeats, nor in a job that is launched again."""
    drills = [drill("lr_spike", step=12, factor=10, steps=4)]
    keep = {"every": 5, "keep": 3, "max_bytes": 1 << 24}
    job = probed.start(loop(wait=14), drills=drills, savepoints=keep)
    job.reached()
    key = job.send("rollback", before_step=12, rng="restore", rewarm=None)
    job.go()
    assert job.answer(key).ok
    probed.wait(job)
    spiked = [(f["attempt"], f["step"]) for f in job.frames if f["learning_rate"] > 0.02]
    assert spiked == [(0, 12), (0, 13), (0, 14)]
    again = probed.run(loop(), drills=drills, marks=str(job.folder / "probe"))
    assert set(again.column("learning_rate")) == {1e-2}


def test_a_drill_that_cannot_run_is_said(probed):
    """A wrong order never disturbs the job."""
    job = probed.run(loop(), drills=[drill("quake"), {"fault": "hang"}, drill("hang", second=1)])
    assert job.kinds() == ["drill"] * 3 and "no fault 'quake'" in job.notices[0].message
    assert len(job.frames) == 20
