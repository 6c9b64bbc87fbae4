"""Optimizers that change under way or bring their own backward, measured as the loop means them."""

import math

import pytest

pytestmark = pytest.mark.slow

ALWAYS = {"gradients": 1, "weights": 0, "share": 1e6}

MODEL = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def batch():
    x = torch.randn(16, 8)
    return x, x.sum(1, keepdim=True)

def gradients(module=model):
    return [p.grad for p in module.parameters()]

def moved(params, old):
    change = norm(p.detach() - q for p, q in zip(params, old))
    return {"update_norm": change, "update_to_weight": change / norm(old)}
"""

REPLACED_IN_ITS_GROUP = """
points, opacity = nn.Parameter(torch.randn(20, 3)), nn.Parameter(torch.zeros(20, 1))
optimizer = torch.optim.Adam([{"params": [points], "lr": 0.01}, {"params": [opacity], "lr": 0.05}])
for step in range(12):
    if step in (4, 8):      # as Gaussian splatting makes more points
        for group in optimizer.param_groups:
            was = group["params"][0]
            state = optimizer.state.pop(was)
            now = nn.Parameter(torch.cat([was.detach(), was.detach()[:10] + 0.01]))
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.cat([state[name], torch.zeros_like(now[:10])])
            optimizer.state[now], group["params"][0] = state, now
        (points,), (opacity,) = (group["params"] for group in optimizer.param_groups)
    weight = torch.sigmoid(opacity)
    loss = (((points * weight).sum(0) / weight.sum() - 1.0) ** 2).sum()
    loss.backward()
    params = [points, opacity]
    true, old = norm(p.grad for p in params), [p.detach().clone() for p in params]
    optimizer.step()
    optimizer.zero_grad()
    change = norm(p.detach() - q for p, q in zip(params, old))
    emit(train_loss_raw=loss.item(), grad_global_norm=true, update_norm=change,
         update_to_weight=change / norm(old))
"""

ONE_LAYER_REPLACED = (
    MODEL
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(10):
    if step == 5:
        new = nn.Linear(16, 1)
        with_new = dict(zip(model[2].parameters(), new.parameters()))
        model[2], params = new, optimizer.param_groups[0]["params"]
        params[:] = [with_new.get(p, p) for p in params]
    x, y = batch()
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    true, old = norm(gradients()), [p.detach().clone() for p in model.parameters()]
    if step % 3 == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    emit(train_loss_raw=loss.item(), grad_global_norm=true, **moved(model.parameters(), old))
"""
)

EMBEDDING_REPLACED = """
table, head = nn.Embedding(6, 4), nn.Linear(4, 1)
model = nn.Sequential(table, head)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(8):
    if step == 4:
        table.weight = nn.Parameter(torch.cat([table.weight.detach(), torch.randn(2, 4)]))
        optimizer.param_groups[0]["params"][0] = table.weight
    optimizer.zero_grad()
    loss = (model(torch.randint(0, len(table.weight), (5,))) ** 2).mean()
    loss.backward()
    if step < 2:            # nothing is sampled yet
        emit(train_loss_raw=loss.item())
    else:
        emit(**{"grad_global_norm.embedding": norm([table.weight.grad]),
                "grad_global_norm.0": norm(p.grad for p in head.parameters())})
    optimizer.step()
"""

LBFGS_AFTER_ADAM = (
    MODEL
    + """
x, y = batch()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(6):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    emit(train_loss_raw=loss.item(), grad_global_norm=norm(gradients()))
    optimizer.step()
second = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
for step in range(12):
    first = []

    def closure():
        second.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if not first:
            first.extend([loss.item(), norm(gradients())])
        return loss

    old = [p.detach().clone() for p in model.parameters()]
    second.step(closure)
    emit(train_loss_raw=first[0], grad_global_norm=first[1], **moved(model.parameters(), old))
"""
)

TWO_CLOSURES = """
body, head = nn.Linear(8, 16), nn.Linear(16, 4)
pairs = [(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), m) for m in (body, head)]
for step in range(6):       # one half of the weights after the other, each with a loss of its own
    x = torch.randn(24, 8)
    y = (x[:, 0] > 0).long()
    for optimizer, module in pairs:
        optimizer.param_groups[0]["lr"] *= 0.9
        first = []

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(head(torch.tanh(body(x))), y)
            loss.backward()
            first.extend([loss.item(), norm(p.grad for p in module.parameters())])
            return loss

        old = [p.detach().clone() for p in module.parameters()]
        optimizer.step(closure)
        change = norm(p.detach() - q for p, q in zip(module.parameters(), old))
        rate = "learning_rate" if module is body else "learning_rate.1"
        emit(train_loss_raw=first[0], grad_global_norm=first[1], tokens_per_update=24,
             update_norm=change, **{rate: optimizer.param_groups[0]["lr"]})
"""

EMPTY_CLOSURES = (
    MODEL
    + """
first = torch.optim.SGD(model[0].parameters(), lr=0.05)
second = torch.optim.SGD(model[2].parameters(), lr=0.01)
for step in range(10):      # as Lightning passes them on; the second optimizer joins at step 4
    x, y = batch()
    model.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    measured = model[0] if step <= 4 else model
    emit(train_loss_raw=loss.item(), grad_global_norm=norm(gradients(measured)))
    first.step(lambda: None)
    if step >= 4:
        second.step(lambda: None)
"""
)

CLOSURE_UNUSED = (
    MODEL
    + """
class Deaf(torch.optim.SGD):
    def step(self, closure=None):
        return super().step()

first, second = Deaf(model[0].parameters(), lr=0.05), Deaf(model[2].parameters(), lr=0.01)
for step in range(6):
    x, y = batch()
    model.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    emit(train_loss_raw=loss.item(), **{"learning_rate": 0.05, "learning_rate.1": 0.01})
    first.step(lambda: None)
    second.step(lambda: None)
"""
)

LOOPS = {
    "replaced-in-its-group": REPLACED_IN_ITS_GROUP,
    "one-layer-replaced": ONE_LAYER_REPLACED,
    "embedding-replaced": EMBEDDING_REPLACED,
    "lbfgs-after-adam": LBFGS_AFTER_ADAM,
    "two-closures": TWO_CLOSURES,
    "empty-closures": EMPTY_CLOSURES,
    "closure-unused": CLOSURE_UNUSED,
}


@pytest.mark.parametrize("name", LOOPS)
def test_each_loop_is_measured_as_its_author_would(probed, bare, name):
    """Steps are counted as the loop means them, and each frame holds what the script computes,
    which is what it computes without the probe, to the bit."""
    job = probed.run(LOOPS[name], sampling=ALWAYS)
    assert job.err == "" and job.output == bare.run(LOOPS[name]).output
    assert [frame["step"] for frame in job.frames] == list(range(len(job.output)))
    for frame, row in zip(job.frames, job.output, strict=True):
        for metric, value in row.items():
            assert math.isclose(frame[metric], value, rel_tol=1e-6), (metric, frame, value)


NAN = """
weight = nn.Parameter(torch.randn(8, 3))
optimizer = torch.optim.Adam([weight], lr=0.01)
for step in range(10):
    if step == 5:
        now = nn.Parameter(weight.detach() * 1.01)
        optimizer.state[now] = optimizer.state.pop(weight)
        weight = optimizer.param_groups[0]["params"][0] = now
    loss = (weight ** 2).mean()
    loss.backward()
    if step == 7:
        weight.grad[0] = math.nan
    optimizer.step()
    optimizer.zero_grad()
emit(finite=bool(weight.isfinite().all()))
"""


def test_the_safeguard_protects_a_weight_that_came_later(probed):
    """Its gradient is not finite, and does not reach it."""
    job = probed.run(NAN, safeguards={"skip_nonfinite": {"max": 3, "per": 128}})
    assert job.output == [{"finite": True}]
    assert [frame["step"] for frame in job.frames if frame["update_skipped"]] == [7]
