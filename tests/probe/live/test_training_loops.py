"""The ways in which people write a training loop, each measured as its author would."""

import math

import pytest

pytestmark = pytest.mark.slow

MODEL = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def batch():
    x = torch.randn(16, 8)
    return x, x.sum(1, keepdim=True)

def gradients():
    return [p.grad for p in model.parameters()]
"""

ACCUMULATION = (
    MODEL
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(8):
    total = 0.0
    for _ in range(4):
        x, y = batch()
        loss = F.mse_loss(model(x), y) / 4
        loss.backward()
        total += loss.item()
    emit(train_loss_raw=total, grad_global_norm=norm(gradients()))
    optimizer.step()
    optimizer.zero_grad()
"""
)

SCALED_ACCUMULATION = (
    MODEL
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(8):
    total = 0.0
    for _ in range(2):
        x, y = batch()
        loss = F.mse_loss(model(x), y)
        (scaler.scale(loss) / 2).backward()
        total += loss.item() / 2
    scaler.unscale_(optimizer)
    emit(train_loss_raw=total, grad_global_norm=norm(gradients()))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
)

CLIPPED_IN_PARTS = (
    MODEL
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(9):
    x, y = batch()
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    true = norm(gradients())
    if step % 3 == 0:    # a part only
        nn.utils.clip_grad_norm_(model[0].parameters(), 1e-3)
    elif step % 3 == 1:  # both parts, and once more
        nn.utils.clip_grad_norm_(model[0].parameters(), 1e-3)
        nn.utils.clip_grad_norm_(model[2].parameters(), 1e-3)
        nn.utils.clip_grad_norm_(model[2].parameters(), 1e-4)
    else:                # more than the optimizer has, from a list
        nn.utils.clip_grad_norm_([*model.parameters(), nn.Parameter(torch.ones(3))], 1e-3)
    emit(grad_global_norm=true)
    optimizer.step()
"""
)

CLIPPED_OTHERWISE = (
    MODEL
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(9):
    x, y = batch()
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    emit(grad_global_norm=norm(gradients()))
    if step % 3 == 0:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    elif step % 3 == 1:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=float("inf"))
    else:
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, total)
    optimizer.step()
"""
)

GROUPS = (
    MODEL
    + """
optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 1e-2},
                               {"params": model[2].parameters(), "lr": torch.tensor(1e-3)}])
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
extra = nn.Parameter(torch.ones(2))
for step in range(10):
    if step == 5:
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
    x, y = batch()
    optimizer.zero_grad()
    (F.mse_loss(model(x), y) + (extra**2).sum()).backward()
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    old = [p.detach().clone() for p in owned]
    true = norm(p.grad for p in owned)
    optimizer.step()
    if step < 5:
        schedule.step()
    emit(learning_rate=rates[0], **{"learning_rate.1": rates[1]}, learning_rate_scheduled=rates[0],
         grad_global_norm=true, update_norm=norm(p - q for p, q in zip(owned, old)),
         **({"learning_rate.2": 0.5} if step >= 5 else {}))
"""
)

CLOSURE = (
    MODEL
    + """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
for step in range(6):
    x, y = batch()
    first = []

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if not first:
            first.extend([loss.item(), norm(gradients())])
        return loss

    old = [p.detach().clone() for p in model.parameters()]
    optimizer.step(closure)
    moved = norm(p - q for p, q in zip(model.parameters(), old))
    emit(train_loss_raw=first[0], grad_global_norm=first[1], update_norm=moved)
"""
)

LOOPS = {
    "accumulation": ACCUMULATION,
    "scaled-accumulation": SCALED_ACCUMULATION,
    "clipped-in-parts": CLIPPED_IN_PARTS,
    "clipped-otherwise": CLIPPED_OTHERWISE,
    "groups": GROUPS,
    "closure": CLOSURE,
}


@pytest.mark.parametrize("name", LOOPS)
def test_each_loop_is_measured_as_its_author_would(probed, bare, name):
    """Steps are counted as the loop means them, and each frame holds what the script computes,
    which is what it computes without the probe, to the bit."""
    job = probed.run(LOOPS[name])
    assert job.err == "" and job.output == bare.run(LOOPS[name]).output
    assert [frame["step"] for frame in job.frames] == list(range(len(job.output)))
    for frame, row in zip(job.frames, job.output, strict=True):
        for metric, value in row.items():
            assert math.isclose(frame[metric], value, rel_tol=1e-6), (metric, frame, value)
