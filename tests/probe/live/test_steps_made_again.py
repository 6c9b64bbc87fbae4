"""An optimizer's step that raised, and that the job makes again."""

import math
import re

import pytest

pytestmark = pytest.mark.slow

ALWAYS = {"gradients": 1, "weights": 0, "share": 1e6}
OF_THE_MACHINE = re.compile("time|share|per_sec|probe|mem|load|temp")

MODEL = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def batch():
    x = torch.randn(16, 8)
    return x, x.sum(1, keepdim=True)
"""

MADE_AGAIN = (
    MODEL
    + """
import supervise_probe

class Raises(torch.optim.Adam):
    soon = False

    def step(self, closure=None):
        if self.soon:
            self.soon = False
            raise torch.OutOfMemoryError("no memory")
        return super().step(closure)

first = torch.optim.SGD(model[0].parameters(), lr=0.05)
second = Raises([{"params": [p]} for p in model[2].parameters()], lr=0.05)
for step in range(12):
    first.zero_grad()
    second.zero_grad()
    total = 0.0
    for part in range(2):
        x, y = batch()
        loss = F.mse_loss(model(x), y) / 2
        loss.backward()
        total += loss.item()
    supervise_probe.report(tokens_per_update=32)
    true = norm(p.grad for p in model.parameters())
    if step % 3:            # at first over both optimizers, later of one alone
        nn.utils.clip_grad_norm_((model if step < 2 else model[2]).parameters(), 1.0)
    first.step()
    second.soon = AGAIN and step % 4 < 3
    try:
        second.step()
    except torch.OutOfMemoryError:
        second.step()
    emit(train_loss_raw=total, grad_global_norm=true)
"""
)


def test_a_step_that_is_made_again_counts_once(probed):
    """The frame holds what the script computes; nothing tells that the first attempt raised."""
    jobs = [
        probed.run(MADE_AGAIN.replace("AGAIN", how), sampling=ALWAYS) for how in ("False", "True")
    ]
    once, again = (
        [{k: v for k, v in f.items() if not OF_THE_MACHINE.search(k)} for f in job.frames]
        for job in jobs
    )
    assert once == again and len(again) == 12
    for frame, row in zip(again, jobs[1].output, strict=True):
        for metric, value in row.items():
            assert math.isclose(frame[metric], value, rel_tol=1e-6), (metric, frame, value)
    assert {"grad_noise_scale", "grad_global_norm.1", "adam_rms_ratio"} <= set(once[-1])


CHANGED_AND_MADE_AGAIN = (
    MODEL
    + """
class Raises(torch.optim.SGD):
    soon = False

    def step(self, closure=None):
        if self.soon:
            self.soon = False
            raise torch.OutOfMemoryError("no memory")
        return super().step(closure)

embed = nn.Embedding(10, 8)
params = [embed.weight, *model.parameters()]
optimizer = Raises([{"params": [p]} for p in params], lr=0.05)

def backward():
    for part in range(2):
        (model(embed(torch.randint(0, 10, (16,)))) - 1.0).square().mean().backward()

def look():
    row = {f"grad_global_norm.{i or 'embedding'}": norm([p.grad]) for i, p in enumerate(params)}
    return {"grad_global_norm": norm(p.grad for p in params), **row}

for step in range(12):
    if step == 2:
        barrier("go")
    optimizer.zero_grad()
    backward()
    if step == 6:
        params[-1].grad[0] = math.nan
    row = look()
    optimizer.soon = step > 2
    try:
        optimizer.step()
    except torch.OutOfMemoryError:
        if step > 8:        # from other gradients
            optimizer.zero_grad()
            backward()
            row = look()
        optimizer.step()
    emit(**row)
"""
)


def test_norms_are_those_that_the_first_attempt_found(probed):
    """A bound and a safeguard change the gradients before the step raises; the frame holds
    what they were. Where the job makes new gradients, those count."""
    order = {"zero_nonfinite": {"max": 3, "per": 128}}
    job = probed.start(CHANGED_AND_MADE_AGAIN, sampling=ALWAYS, safeguards=order)
    job.reached()
    key = job.send("clip", max_norm=0.01)
    job.go()
    assert job.answer(key).ok
    probed.wait(job)
    assert job.err == "" and [n.kind for n in job.notices].count("safeguard") == 1
    assert len(job.frames) == len(job.output) == 12
    for frame, row in zip(job.frames[2:], job.output[2:], strict=True):
        for metric, value in row.items():
            expected = pytest.approx(value, rel=1e-5, nan_ok=True)
            assert frame[metric] == expected, (metric, frame["step"])


SKIPPED_AND_MADE_AGAIN = (
    MODEL
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(5):
    if step == 2:
        barrier("go")
    x, y = batch()
    raises = [step == 3]

    def closure():
        if raises.pop():
            raises.append(False)
            raise torch.OutOfMemoryError("no memory")
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    except torch.OutOfMemoryError:
        optimizer.step(closure)
"""
)


def test_a_skip_that_was_ordered_outlives_a_step_that_raised(probed):
    """The closure of a step that is to be skipped raises; made again, the step is skipped."""
    job = probed.start(SKIPPED_AND_MADE_AGAIN)
    job.reached()
    key = job.send("skip_step", count=1)
    job.go()
    assert job.answer(key).ok
    probed.wait(job)
    assert job.column("update_skipped") == [0.0, 0.0, 0.0, 1.0, 0.0]
