"""The ways in which people write a training loop, each measured as its author would.

Some do something unusual with losses, optimizers or weights, or change their optimizer on the way.
"""

import pytest

from tests.support.probed_job import check_frames

ALWAYS = {"gradients": 1, "weights": 0, "share": 1e6}

MODEL = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def batch():
    x = torch.randn(16, 8)
    return x, x.sum(1, keepdim=True)

def gradients(module=model):
    return [p.grad for p in module.parameters()]

def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]

def moved(params, old):
    change = norm(p.detach() - q for p, q in zip(params, old))
    return {"update_norm": change, "update_to_weight": change / norm(old)}
"""


LOOPS = {
    "clipped-otherwise": """
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
""",
    "clipped-after-each-backward": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(6):  # the last clips see what those before left, and the newest gradients
    optimizer.zero_grad()
    for order in ((0, 2), (2, 0)):
        x, y = batch()
        F.mse_loss(model(x), y).backward()
        before = norm(gradients())
        for layer in (*order, 0):
            nn.utils.clip_grad_norm_(model[layer].parameters(), 1e-2 / (1 + layer))
    emit(grad_global_norm=before)
    optimizer.step()
""",
    "each-part-clipped-after-its-backward": """
head = nn.Linear(8, 1)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)
for step in range(6):
    optimizer.zero_grad()
    before = []
    for module in (model, head):
        x, y = batch()
        F.mse_loss(module(x), y).backward()
        before.append(norm(gradients(module)))
        nn.utils.clip_grad_norm_(module.parameters(), 1e-2)
    emit(grad_global_norm=math.hypot(*before))
    optimizer.step()
""",
    "closure": """
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

    old = copies(model.parameters())
    optimizer.step(closure)
    emit(train_loss_raw=first[0], grad_global_norm=first[1], **moved(model.parameters(), old))
""",
    "two-losses": """
critic = nn.Linear(8, 1)
first = torch.optim.SGD(model.parameters(), lr=0.05)
second = torch.optim.SGD(critic.parameters(), lr=0.01)
for step in range(6):   # as a GAN: each has its own backward, so each is a step of its own
    x, y = batch()
    first.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    emit(train_loss_raw=loss.item(), grad_global_norm=norm(gradients()))
    first.step()
    second.zero_grad()
    loss = F.mse_loss(critic(x), y)
    loss.backward()
    emit(train_loss_raw=loss.item(), grad_global_norm=norm(p.grad for p in critic.parameters()))
    second.step()
""",
    "now-and-then": """
first = torch.optim.SGD(model[0].parameters(), lr=0.05)
second = torch.optim.SGD(model[2].parameters(), lr=0.01)
for step in range(10):  # the second optimizer steps every other time
    x, y = batch()
    model.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    both = step % 2 == 0
    emit(train_loss_raw=loss.item(),
         grad_global_norm=norm(gradients() if both else [p.grad for p in model[0].parameters()]))
    first.step()
    if both:
        second.step()
""",
    "reloaded": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
kept = {k: v.clone() for k, v in model.state_dict().items()}
for step in range(8):
    x, y = batch()
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    if step == 3:
        model.load_state_dict(kept)
    if step == 5:
        model[0].weight.data = model[0].weight.data.clone() * 2
    old = copies(model.parameters())
    optimizer.step()
    emit(**moved(model.parameters(), old))
""",
    "odd-tensors": """
table, body = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4).to(torch.bfloat16)
first = torch.optim.SparseAdam(table.parameters(), lr=1e-2)
second = torch.optim.SGD(body.parameters(), lr=1e-2)
for step in range(5):
    first.zero_grad()
    second.zero_grad()
    loss = (body(table(torch.tensor([1, 1, 3])).to(torch.bfloat16)).float() ** 2).mean()
    loss.backward()
    dense = [table.weight.grad.to_dense(), *(p.grad for p in body.parameters())]
    emit(train_loss_raw=loss.item(), grad_global_norm=norm(dense))
    first.step()
    second.step()
""",
    "nested": """
from torch.utils.checkpoint import checkpoint
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(5):   # a checkpointed block runs a backward inside the backward
    x, y = batch()
    optimizer.zero_grad()
    loss = F.mse_loss(checkpoint(model, x.requires_grad_(), use_reentrant=True), y)
    loss.backward()
    emit(train_loss_raw=loss.item(), grad_global_norm=norm(gradients()))
    optimizer.step()
""",
    "replaced-in-its-group": """
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
    emit(train_loss_raw=loss.item(), grad_global_norm=true, **moved(params, old))
""",
    "two-closures": """
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

        old = copies(module.parameters())
        optimizer.step(closure)
        change = norm(p.detach() - q for p, q in zip(module.parameters(), old))
        rate = "learning_rate" if module is body else "learning_rate.1"
        emit(train_loss_raw=first[0], grad_global_norm=first[1], tokens_per_update=24,
             update_norm=change, **{rate: optimizer.param_groups[0]["lr"]})
""",
}


LATE = ("now-and-then", "odd-tensors", "two-closures")  # once more, as on a device


@pytest.mark.parametrize(
    ("name", "late"), [*((name, False) for name in LOOPS), *((name, True) for name in LATE)]
)
def test_each_loop_is_measured_as_its_author_would(probed, bare, name, late):
    """Steps are counted as the loop means them, and each frame holds what the script computes,
    which is what it computes without the probe, to the bit."""
    script = MODEL + LOOPS[name]
    job = probed.run(script, sampling=ALWAYS, late=late)
    assert job.err == "" and job.output == bare.run(script).output
    rows = [row for row in job.output if "sha" not in row]
    assert job.column("step") == list(range(len(rows)))
    check_frames(job.frames, rows)


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
    job = probed.run(NAN, safeguards={"skip_nonfinite": {"max": 3, "per": 128}})
    assert job.output == [{"finite": True}]
    assert [frame["step"] for frame in job.frames if frame["update_skipped"]] == [7]


TRAININGS = """
def make(rate=0.01):
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=rate)

def backward(pair):
    pair[1].zero_grad()
    pair[0](torch.randn(8, 4)).square().mean().backward()

def train(pair, steps, s=0.0):
    for _ in range(steps):
        backward(pair)
        pair[1].step()
        time.sleep(s)
    return pair

a, b = make(), make()
"""
ORDERS = {
    "models that are kept": "kept = [train(make(), 70) for _ in range(3)]",
    "short": "kept = [train(make(), 20) for _ in range(3)]",
    "short but slow": "kept = [train(make(), 20, 0.06) for _ in range(3)]",
    "one that joins": "train(a, 70)\nfor _ in range(70):\n    train(a, 1)\n    train(b, 1)",
    "one that joins a round": """train(a, 70)
for _ in range(70):
    backward(a)
    backward(b)
    a[1].step()
    b[1].step()
""",
    "turns": "for pair in (a, b) * 5:\n    train(pair, 70)",
    "a latent of its own in each step": """train(a, 64)
for _ in range(650):
    b = make()
    backward(a)
    backward(b)
    a[1].step()
    b[1].step()
""",
    "inner and outer": "for _ in range(350):\n    train(a, 1)\n    train(make(), 1)",
}


@pytest.mark.parametrize(
    ("loop", "begins"),
    [
        ("models that are kept", [70, 140]),
        ("short", []),
        ("short but slow", [20, 40]),
        ("one that joins", [71]),
        ("one that joins a round", [72]),
        ("turns", [70 * number for number in range(1, 9)]),
        ("a latent of its own in each step", [66 + 65 * number for number in range(8)]),
        ("inner and outer", [65 + 64 * number for number in range(8)]),
    ],
)
def test_an_optimizer_of_other_parameters_begins_a_training(probed, loop, begins):
    """Where the one before was of 64 steps, or of a second, whether the job holds that or not.

    One from before may step on in it; where that came in eight trainings, all are of one.
    """
    job = probed.run(TRAININGS + ORDERS[loop])
    starts = [notice.step for notice in job.notices if "a new training" in notice.message]
    assert starts == begins
    assert any(notice.kind == "turns" for notice in job.notices) is (loop == "turns")
    assert [frame["step"] for frame in job.frames] == list(range(len(job.frames)))


def test_optimizers_from_before_keep_their_order_in_the_next_training(probed):
    """A third one joins two: their groups are those that a later launch counts, too."""
    loop = """a, b, c = make(0.01), make(0.02), make(0.03)
for step in range(80):
    for pair in (a, b, c)[: 3 if step > 40 else 2]:
        train(pair, 1)
"""
    job = probed.run(TRAININGS + loop)
    names = ("learning_rate", "learning_rate.1", "learning_rate.2")
    rates = [[frame.get(name) for name in names] for frame in job.frames]
    assert any("a new training" in notice.message for notice in job.notices)
    assert rates[-3:] == [[0.01, None, None], [None, 0.02, None], [None, None, 0.03]]


def test_a_held_rate_is_let_go_with_the_training_that_it_was_for(probed):
    """It would limit the next model, in groups of the same numbers."""
    script = TRAININGS + "train(a, 10)\nbarrier('go')\ntrain(a, 60)\ntrain(b, 20)"
    job = probed.start(script)
    job.reached("go")
    job.send("hold_rate", before_step=4, within=0.5, release=0)
    job.go("go")
    probed.wait(job)

    assert job.column("learning_rate") == [0.01] * 10 + [0.005] * 60 + [0.01] * 20
    assert [n.step for n in job.notices if "held no more" in n.message] == [70]


CLIMB = """
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=START)
for step in range(150):
    optimizer.param_groups[0]["lr"] = START * FACTOR ** step if step < 100 else 1e-3
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("start", "factor", "is_search", "is_training"),
    [
        (1e-8, 1.2, True, True),
        (1e-7, 1.2, True, True),
        (1e-7, 1.08, True, False),  # a warm-up rises as far
        (1e-3, 1.02, False, False),
        (1e-6, 1.02, False, False),
    ],
)
def test_a_search_for_the_highest_rate_is_a_training_of_its_own(
    probed, start, factor, is_search, is_training
):
    """It begins far below each rate that trains, and grows evenly until it falls."""
    job = probed.run(CLIMB.replace("START", str(start)).replace("FACTOR", str(factor)))
    searches = [frame["step"] for frame in job.frames if frame.get("lr_phase", 0) >= 4]
    starts = [notice.step for notice in job.notices if "a new training" in notice.message]

    assert searches == (list(range(32, 100)) if is_search else [])
    assert starts == ([100] if is_training else [])
