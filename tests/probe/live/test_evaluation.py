"""`val_loss` of evaluations that a job writes by hand, against the mean that the job makes."""

import pytest

LOOP = """
kind = os.environ.get("KIND", "")
embed, drop, head = nn.Embedding(32, 16), nn.Dropout(0.2), nn.Linear(16, 32)
model = nn.Sequential(embed, drop, head)
teacher = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32)).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

def batch(rows=4):
    x = torch.randint(0, 32, (rows, 6))
    y = (x * 7 + 3) % 32
    y[torch.rand(rows, 6) < 0.3] = -100
    return x, y

def loss_of(net, x, y, **how):
    return F.cross_entropy(net(x).view(-1, 32), y.view(-1), **how)

def evaluate(mode, **how):
    total = count = 0.0
    if kind != "in train mode":
        model.eval()
    with mode:
        for rows in (4, 2, 1):
            x, y = batch(rows)
            loss = loss_of(model, x, y, **how)
            loss_of(teacher, x, y)  # another model that is evaluated beside it
            model(x)  # a forward whose output goes nowhere
            tokens = int((y != -100).sum())
            total += loss.sum().item() * (1 if how else tokens)
            count += tokens
    if kind != "trains in eval mode":
        model.train()
    return total / count

if kind == "trains in eval mode":
    model.eval()
told, means = {}, []
for step in range(12):
    if step == 3:
        told[step] = evaluate(torch.no_grad())
    if step == 6:
        told[step] = evaluate(torch.inference_mode(), reduction="sum")
    if step == 9:
        evaluate(torch.no_grad(), reduction="none" if kind != "smoothed" else "mean",
                 **({"label_smoothing": 0.1} if kind == "smoothed" else {}))
    nll = tokens = 0
    optimizer.zero_grad()
    for micro in range(2):
        x, y = batch()
        with torch.no_grad():
            loss_of(teacher, x, y)
            model.eval()
            loss_of(model, x, y) if micro else model(x)  # in the step, or without a loss
            model.train(kind != "trains in eval mode")
        loss, count = loss_of(model, x, y), int((y != -100).sum())
        nll, tokens = nll + loss.item() * count, tokens + count
        (loss / 2).backward()
    optimizer.step()
    means.append(nll / tokens)
    if step in told:
        weights = [0.99**i for i in range(step, -1, -1)]
        mean = sum(w * m for w, m in zip(weights, means)) / sum(weights)
        told[step] = told[step], told[step] - mean
emit(told=told)
finish(model)
"""


@pytest.mark.parametrize(
    ("kind", "late"),
    [
        ("", False),
        ("", True),
        *((k, False) for k in ("smoothed", "in train mode", "trains in eval mode")),
    ],
)
def test_an_evaluation_by_hand_is_a_val_loss(probed, bare, kind, late):
    """Its mean over targets, in the frame of the next step; nothing else counts, and all is as
    without the probe."""
    job = probed.run(LOOP, environ={"KIND": kind}, late=late)
    assert job.output == bare.run(LOOP, environ={"KIND": kind}).output
    told = {int(step): value for step, value in job.output[0]["told"].items()}
    if "mode" in kind:
        told = {}
    for i, name in enumerate(("val_loss", "train_val_gap")):
        found = {f["step"]: f[name] for f in job.frames if name in f}
        assert found == pytest.approx({n: t[i] for n, t in told.items()}, rel=1e-5), job.err
    assert not [n for n in job.notices if n.kind == "part-off"]
