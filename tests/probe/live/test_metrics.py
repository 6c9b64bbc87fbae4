"""Every frame holds what the script itself computes, and the script computes what it always did."""

import math

import pytest

pytestmark = pytest.mark.slow

SGD = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(30):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    loss.backward()
    old = [p.detach().clone() for p in model.parameters()]
    gradient = norm(p.grad for p in model.parameters())
    optimizer.step()
    moved = norm(p - q for p, q in zip(model.parameters(), old))
    emit(train_loss_raw=loss.item(), grad_global_norm=gradient, learning_rate=0.05,
         update_norm=moved, update_to_weight=moved / norm(old))
finish(model)
"""

SCALER = """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.{optimizer}
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=5)
for step in range(20):
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    overflow = model[0].weight.register_hook(lambda g: g * (math.inf if step == 7 else 1))
    scaler.scale(loss).backward()
    overflow.remove()
    scale = scaler.get_scale()
    {clip}
    old = [p.detach().clone() for p in model.parameters()]
    gradient = norm(p.grad for p in model.parameters()) / (scale if {scaled} else 1)
    scaler.step(optimizer)
    scaler.update()
    moved = norm(p - q for p, q in zip(model.parameters(), old))
    emit(step=step, loss=loss.item(), grad_global_norm={norm}, learning_rate=1e-2,
         update_to_weight=moved / norm(old), loss_scale=scale, tokens_per_update=16)
finish(model)
"""

TWO = """
model, head = nn.Linear(8, 16), nn.Linear(16, 1)
first = torch.optim.AdamW(model.parameters(), lr=1e-2)
second = torch.optim.SGD(head.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(16, 8)
    first.zero_grad()
    second.zero_grad()
    loss = ((head(model(x).tanh()) - x.sum(1, keepdim=True)) ** 2).mean()
    loss.backward()
    both = [*model.parameters(), *head.parameters()]
    old = [p.detach().clone() for p in both]
    gradient = norm(p.grad for p in both)
    first.step()
    second.step()
    moved = norm(p - q for p, q in zip(both, old))
    emit(train_loss_raw=loss.item(), grad_global_norm=gradient, learning_rate=1e-2,
         **{"learning_rate.1": 1e-3}, update_norm=moved, update_to_weight=moved / norm(old))
finish(model, head)
"""


def compare(job, rel=1e-6):
    """Every value that the script told is in the frame of its step."""
    told = [row for row in job.output if "sha" not in row]
    assert [frame["step"] for frame in job.frames] == list(range(len(told)))
    for frame, row in zip(job.frames, told, strict=True):
        for name, value in row.items():
            assert frame[name] == pytest.approx(value, rel=rel, nan_ok=True), (name, frame["step"])


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "as-on-a-device"])
@pytest.mark.parametrize("script", [SGD, TWO], ids=["plain", "two-optimizers"])
def test_frames_equal_what_the_script_computes(probed, bare, script, late):
    """Loss, gradient norm, rates and update ratio in every frame; final weights bit-identical."""
    job = probed.run(script, late=late)
    compare(job)
    assert job.output[-1] == bare.run(script).output[-1]
    assert job.err == ""


UNSCALE = "scaler.unscale_(optimizer); total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
CLIP_SCALED = "total = nn.utils.clip_grad_norm_(model.parameters(), 1e6) / scale"


FUSED = "AdamW(model.parameters(), lr=1e-2, fused=True)"


@pytest.mark.parametrize(
    ("optimizer", "late"),
    [("SGD(model.parameters(), lr=1e-2)", False), (FUSED, False), (FUSED, True)],
    ids=["sgd", "fused", "fused-as-on-a-device"],
)
@pytest.mark.parametrize(
    ("clip", "scaled", "measured"),
    [
        ("pass", True, "gradient"),
        (UNSCALE, False, "total.item()"),
        (CLIP_SCALED, True, "total.item()"),
    ],
    ids=["no-clip", "unscale-and-clip", "clip-before-unscale"],
)
def test_a_scaler_changes_no_number(probed, bare, optimizer, late, clip, scaled, measured):
    """Loss and gradient norm come unscaled, whoever unscales; an overflow is a skipped step."""
    script = SCALER.format(optimizer=optimizer, clip=clip, scaled=scaled, norm=measured)
    job = probed.run(script, late=late)
    told = job.output[:-1]
    for row, values in zip(told, job.frames, strict=True):
        row["train_loss_raw"] = row.pop("loss")
        for name, value in row.items():
            expected = pytest.approx(value, rel=1e-5, nan_ok=True)
            assert values[name] == expected, (name, values["step"])
    assert [step for step, skipped in enumerate(job.column("update_skipped")) if skipped] == [7]
    assert job.frames[7]["update_norm"] == 0 and set(job.column("nan_inf_events")) == {0}
    assert not math.isfinite(job.frames[7]["grad_global_norm"])
    assert job.frames[-1]["steps_seen"] == 19 and job.frames[-1]["skipped_updates"] == 1
    assert job.output[-1] == bare.run(script).output[-1]
