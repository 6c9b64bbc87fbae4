"""What is counted or estimated where it cannot be read off: tokens, inputs, a dear update."""

import math

import pytest

THINNED = """
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
updates = __import__("sys").modules["_supervise_probe"]._probe.parts.wired.updates
for step in range(60):
    if step == 2:
        updates.relax()
        updates.relax()
        type(updates.pace).weigh = lambda *costs: None
    if step == 40:
        optimizer.param_groups[0]['lr'] *= 3
    optimizer.zero_grad()
    model(torch.randn(2, 256)).pow(2).mean().backward()
    old = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moved = norm(p - q for p, q in zip(model.parameters(), old))
    emit(update_norm=moved, update_to_weight=moved / norm(old))
"""


def test_a_costly_update_is_measured_in_every_fourth_step_until_something_changes(probed):
    """On a sample, which comes in every step first."""
    job = probed.run(THINNED)
    measured = [frame["step"] for frame in job.frames if "update_norm" in frame]
    assert [step for step in measured if 4 <= step <= 40] == list(range(4, 44, 4))
    assert [step for step in measured if 40 < step < 60] == list(range(41, 57))
    for step in measured:
        for metric, value in job.output[step].items():
            assert math.isclose(job.frames[step][metric], value, rel_tol=0.1)
    assert job.segment().status()["sampling"]["updates"] == 4
    assert job.segment().status()["thinned"]["updates"] == 4
    assert job.segment().status()["update_to_weight"] == "sampled"
    (changed,) = (notice for notice in job.notices if notice.kind == "measurement-changed")
    assert changed.data == {"metrics": ["update_norm", "update_to_weight"]}


OVERFLOW = """
    if step == 22:
        spare = torch.nn.Parameter(torch.ones(1))
        spare.grad = torch.tensor([math.inf])
        torch.nn.utils.clip_grad_norm_([spare, *model.parameters()], 1.0)
    old ="""


def test_the_update_of_an_infinite_gradient_is_measured_where_only_one_in_four_is(probed):
    """Of a tensor that no optimizer holds: the clip has made all others 0."""
    script = THINNED.replace("\n    old =", OVERFLOW, 1)
    job = probed.run(f"import math\n{script}")
    measured = [frame["step"] for frame in job.frames if "update_norm" in frame]
    assert [step for step in measured if 16 <= step <= 22] == [16, 20, 22]
    assert job.frames[22]["grad_global_norm"] == math.inf
    moved = job.output[22]["update_norm"]
    assert math.isclose(job.frames[22]["update_norm"], moved, rel_tol=0.1)


CLOSURE = """
def closure():
    if step == 22:  # as where somebody else wrote its moments
        with torch.no_grad():
            updates.force_measurement(tracker.current)
    return torch.tensor(0.0)

tracker = __import__("sys").modules["_supervise_probe"]._probe.parts.tracker
"""


def test_an_update_is_measured_where_that_is_asked_for_inside_its_closure(probed):
    """The call before it had counted the optimizer among those that are not measured."""
    script = CLOSURE + THINNED.replace("optimizer.step()", "optimizer.step(closure)")
    job = probed.run(script)
    moved = job.output[22]["update_norm"]
    assert "update_norm" not in job.frames[21]
    assert math.isclose(job.frames[22]["update_norm"], moved, rel_tol=0.1)


PAIR = """
import math
models = [nn.Linear(64, 64) for _ in range(2)]
pair = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
updates = __import__("sys").modules["_supervise_probe"]._probe.parts.wired.updates
for step in range(32):
    if step == 2:
        updates.relax()
        updates.relax()
        type(updates.pace).weigh = lambda *costs: None
    old = [p.detach().clone() for model in models for p in model.parameters()]
    for model in models:
        model.zero_grad()
        model(torch.randn(2, 64)).pow(2).mean().backward()
    if step == 22:
        spare = torch.nn.Parameter(torch.ones(1))
        spare.grad = torch.zeros(1)
        (models[INFINITE].bias if OWN else spare).grad.fill_(math.inf)
        torch.nn.utils.clip_grad_norm_([spare, *models[INFINITE].parameters()], 1.0)
    for optimizer in pair:
        optimizer.step()
    emit(moved=norm(p - q for p, q in zip([p for m in models for p in m.parameters()], old)))
"""


@pytest.mark.parametrize(
    ("infinite", "own", "measured"), [(0, False, True), (1, False, False), (1, True, True)]
)
def test_what_one_of_two_optimizers_moved_is_no_update_of_the_step(probed, infinite, own, measured):
    """Behind one whose update was not measured; only NaN tells of both."""
    job = probed.run(PAIR.replace("INFINITE", str(infinite)).replace("OWN", str(own)))
    frames = {frame["step"]: frame for frame in job.frames}
    assert frames[22]["grad_global_norm"] == math.inf
    assert ("update_norm" in frames[22]) is measured and "update_norm" not in frames[21]
    for step, row in enumerate(job.output[:32]):
        if step > 2 and "update_norm" in frames[step]:
            expected = pytest.approx(row["moved"], rel=0.1, nan_ok=True)
            assert frames[step]["update_norm"] == expected


UNDIVIDED = """
model = nn.Linear(6, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    optimizer.zero_grad()
    told, count = 0.0, 0
    for micro in range(4):
        x, y = torch.randn(8, 6), torch.randint(0, 5, (8,))
        y[:micro] = -1
        loss = F.cross_entropy(model(x), y, ignore_index=-1, OPTIONS)
        told += loss.detach().sum().item() * ((y != -1).sum().item() if SCALE else 1)
        count += (y != -1).sum().item()
        loss = loss.sum()
        loss += 30 * model.weight.square().sum()
        loss.backward()
    optimizer.step()
    emit(train_loss=told / count)
"""


@pytest.mark.parametrize(
    ("options", "mean", "known", "late"),
    [
        ("", True, True, True),
        ("reduction='sum'", False, True, False),
        ("reduction='none'", False, False, False),
        ("label_smoothing=0.1", True, False, True),
        ("weight=torch.ones(5)", True, False, False),
    ],
)
def test_the_loss_of_a_target_is_known_whatever_is_added_up(probed, options, mean, known, late):
    """Four losses that nobody divides, and a term beside them: no perplexity is of their sum."""
    job = probed.run(UNDIVIDED.replace("OPTIONS", options).replace("SCALE", str(mean)), late=late)
    for frame, row in zip(job.frames, job.output[:6], strict=True):
        assert frame["train_loss_raw"] > 10
        assert ("train_loss" in frame, "train_ppl" in frame) == (known, known)
        if known:
            assert frame["train_loss"] == pytest.approx(row["train_loss"])
            assert frame["train_ppl"] < 20


TOKENS = """
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randint(0, 20, (40, 10))
for step, x in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
    y = x.clone()
    y[:, :step] = -100
    logits = model(x).reshape(-1, 20)
    optimizer.zero_grad()
    if step == 3:
        loss = F.nll_loss(logits.log_softmax(-1), y.reshape(-1))
    else:
        loss = F.cross_entropy(logits, y.reshape(-1))
    with torch.no_grad():
        F.cross_entropy(model(x).reshape(-1, 20), x.reshape(-1))  # evaluation does not count
    loss.backward()
    optimizer.step()
    emit(tokens_per_update=40 - 4 * step)
"""


@pytest.mark.parametrize("late", [False, True])
def test_tokens_are_targets_that_carry_loss(probed, late):
    """Ignored targets and evaluation do not count; rates and sums follow."""
    job = probed.run(TOKENS, late=late)
    told = [row["tokens_per_update"] for row in job.output]
    assert job.column("tokens_per_update") == told
    assert job.column("tokens_seen") == [sum(told[: i + 1]) for i in range(10)]
    assert all(
        frame["tokens_per_sec"] == pytest.approx(frame["tokens_per_update"] / frame["step_time"])
        for frame in job.frames[1:]
    )
    assert len(set(job.column("batch_fingerprint"))) == 10
    for frame in job.frames[1:]:
        parts = ("input", "forward", "backward", "optimizer", "other")
        assert sum(frame[f"{part}_time"] for part in parts) == pytest.approx(frame["step_time"])
