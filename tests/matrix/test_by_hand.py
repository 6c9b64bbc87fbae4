"""Updates that a job writes by hand: a step is inferred from backward, or not at all."""

import math

import pytest

from .conftest import KEEP

MODEL = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
params = list(model.parameters())
count = 0

def batch():
    return torch.randn(6, 8), torch.randint(0, 4, (6,))

def step_told(loss, old, tokens):
    # what the author computes of a step, once its update is written
    global count
    moved = norm(p.detach() - q for p, q in zip(params, old))
    emit(step=count, train_loss_raw=loss, grad_global_norm=told_norm, update_norm=moved,
         update_to_weight=moved / norm(old), tokens_per_update=tokens)
    count += 1
"""

UNDER_NO_GRAD = """
for _ in range(60):
    x, y = batch()
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    told_norm, old = norm(p.grad for p in params), [p.detach().clone() for p in params]
    with torch.no_grad():
        for p in params:
            p -= 0.1 * p.grad
    step_told(loss.item(), old, 6)
"""


ACCUMULATED = """
for n in range(32):
    total = 0.0
    several = {27: 3, 30: 1}.get(n, 2)    # once the gradients of one more batch, once of one less
    for _ in range(several):
        x, y = batch()
        loss = F.cross_entropy(model(x), y) / several
        loss.backward()
        total += loss.item()
    told_norm, old = norm(p.grad for p in params), [p.detach().clone() for p in params]
    with torch.no_grad():
        for p in params:
            p.sub_(p.grad, alpha=0.1)
    model.zero_grad()
    if n in (28, 30):     # shorter than the step before: when that shows, the gradients are gone
        told_norm = None
    step_told(total, old, 6 * several)
"""


OWN_CLASS = """
class Momentum:     # not one of torch.optim
    def __init__(self, params):
        self.params = list(params)
        self.moved = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        for p, m in zip(self.params, self.moved):
            m.mul_(0.9).add_(p.grad)
            p.add_(m, alpha=-0.02)

optimizer = Momentum(params)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(360, 8), torch.randint(0, 4, (360,))), batch_size=6)
for x, y in loader:
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    told_norm, old = norm(p.grad for p in params), [p.detach().clone() for p in params]
    nn.utils.clip_grad_norm_(params, 0.5)
    optimizer.step()
    step_told(loss.item(), old, 6)
"""

LOOPS = {
    "under-no-grad": (UNDER_NO_GRAD, 45),
    "accumulated": (ACCUMULATED, 24),
    "own-class": (OWN_CLASS, 45),
}


@pytest.mark.parametrize(
    ("name", "late"), [("under-no-grad", False), ("accumulated", True), ("own-class", False)]
)
def test_a_hand_written_update_ends_a_step(pair, name, late):
    """Each frame holds what the script computes; what needs an optimizer is said to be off."""
    script, latest = LOOPS[name]
    script = MODEL + script + "finish(model)"
    untouched = pair.bare.run(script)
    job = pair.probed.run(script, late=late, safeguards={"skip_nonfinite": {"max": 3}})
    assert job.output == untouched.output and job.err == ""
    rows = {row["step"]: row for row in job.output[:-1]}
    seen = [frame["step"] for frame in job.frames]
    assert seen == list(range(seen[0], len(rows))) and seen[0] <= latest
    assert [frame["steps_seen"] for frame in job.frames] == [step + 1 for step in seen]
    for frame in job.frames:
        for metric, value in rows[frame["step"]].items():
            if value is None:
                assert metric not in frame
                continue
            assert metric in frame, (metric, frame)
            assert math.isclose(frame[metric], value, rel_tol=1e-5), (metric, frame, value)
        assert "learning_rate" not in frame and frame["step_time"] > 0
    status = job.segment().status()
    assert status["steps"].startswith("inferred from backward")
    for name in ("rollback", "skip_nonfinite"):
        assert "without an optimizer" in status["unavailable"][name]
    assert "out of reach" in job.notices[0].message


NO_INFERENCE = {
    "accumulation": """
optimizer = torch.optim.SGD(params, lr=0.1)
for n in range(3):
    for _ in range(50):
        x, y = batch()
        (F.cross_entropy(model(x), y) / 50).backward()
    emit(step=n)
    optimizer.step()
    optimizer.zero_grad()
""",
    "adversary": """
for n in range(150):     # gradients of the input, over and over
    x, y = batch()
    model.zero_grad()
    F.cross_entropy(model(x.requires_grad_()), y).backward()
optimizer = torch.optim.SGD(params, lr=0.1)
for n in range(3):
    x, y = batch()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    emit(step=n)
    optimizer.step()
""",
    "lbfgs": """
optimizer = torch.optim.LBFGS(params, lr=0.1, max_iter=60, tolerance_grad=0, tolerance_change=0)
for n in range(3):
    x, y = batch()

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    emit(step=n)
    optimizer.step(closure)
""",
}


@pytest.mark.parametrize("name", NO_INFERENCE)
def test_nothing_is_inferred_where_it_would_be_wrong(pair, name):
    script = MODEL + NO_INFERENCE[name] + "finish(model)"
    untouched = pair.bare.run(script)
    job = pair.probed.run(script)
    assert job.output == untouched.output and job.err == ""
    assert job.column("step") == [row["step"] for row in job.output[:-1]]
    assert "steps" not in job.segment().status() and job.kinds() == []


COMMANDED = (
    MODEL
    + UNDER_NO_GRAD.replace("    x, y", "    if count == 50: barrier('go')\n    x, y")
    + "finish(model)"
)


def test_what_needs_an_optimizer_is_refused_the_rest_works(pair):
    """At the next sign of a new step; the weights are those of a run without commands."""
    job = pair.probed.start(COMMANDED, savepoints=KEEP)
    job.reached()
    orders = {"lr_scale": {"value": 0.5}, "rollback": {"before_step": 45}, "clip": {"max_norm": 1}}
    orders |= {verb: {} for verb in ("skip_step", "savepoint", "update_clip", "loss_scale")}
    refused = [job.send(verb, **args) for verb, args in orders.items()]
    pause, resume = job.send("pause"), job.send("resume")
    job.go()
    for key in refused:
        answer = job.answer(key)
        assert not answer.ok and answer.error.endswith("updates its weights without an optimizer")
    assert job.answer(pause).ok and job.answer(resume).ok
    pair.probed.wait(job)
    assert job.kinds() == ["rollback-unavailable", "note"]
    bare = pair.bare.start(COMMANDED)
    bare.go()
    assert pair.bare.wait(bare).output == job.output


ENGINE = """
import sys, types
deepspeed = sys.modules["deepspeed"] = types.ModuleType("deepspeed")

class DeepSpeedEngine(nn.Module):
    __module__ = "deepspeed.runtime.engine"

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, x):
        return self.module(x)

model = nn.Linear(4, 1)
if USED:
    model = DeepSpeedEngine(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
count = 0
while count < 30:
    if count == 20: barrier("go")
    count += 1
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("used", [True, False])
def test_weights_that_deepspeed_keeps_are_not_changed(pair, used):
    """One that is imported and not used stands in nobody's way: its engine is recognised."""
    job = pair.probed.start(f"USED = {used}\n{ENGINE}", savepoints=KEEP)
    job.reached()
    orders = [job.send("lr_scale", value=0.5), job.send("rollback", before_step=15)]
    job.go()
    answers = [job.answer(key) for key in orders]
    pair.probed.wait(job)

    assert [answer.ok for answer in answers] == [not used] * 2
    assert ("rollback-unavailable" in job.kinds()) == used
    for answer in answers:
        assert not used or "DeepSpeed keeps weights and moments of its own" in answer.error
