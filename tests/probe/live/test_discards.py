"""Gradients that a job throws away, and forwards that it leaves out, are in no frame."""

from types import SimpleNamespace

import pytest
import torch

from supervise_probe.collectors import collector_classes
from tests.support.probed_job import check_frames

MODEL = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
BAD = (3, 4, 7)

def batch(tokens=16):
    x = torch.randn(tokens, 8)
    return x, (x[:, 0] > 0).long()

def loss_of(tokens=16):
    x, y = batch(tokens)
    return F.cross_entropy(model(x), y)

def true():
    return norm(p.grad for p in model.parameters())

def told(loss, tokens=16, **more):
    emit(train_loss_raw=loss.item(), grad_global_norm=true(), tokens_per_update=tokens,
         update_skipped=0, **more)
"""

SKIPPED = """
for step in range(10):  # the job keeps a batch that is not finite from its weights by itself
    loss = loss_of() * (float("nan") if step in BAD else 1.0)
    ZERO
    loss.backward()
    before = true()
    if not torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 0.5)):
        ZERO
        continue
    emit(train_loss_raw=loss.item(), grad_global_norm=before, tokens_per_update=16,
         update_skipped=0, clip_threshold=0.5)
    optimizer.step()
finish(model)
"""

SAM = """
for step in range(6):  # the first gradient shows where to take the second one
    loss_of().backward()
    with torch.no_grad():
        old = [p.clone() for p in model.parameters()]
        for p in model.parameters():
            p.add_(p.grad, alpha=0.05)
    optimizer.zero_grad()
    loss = loss_of()
    loss.backward()
    with torch.no_grad():
        for p, q in zip(model.parameters(), old):
            p.copy_(q)
    told(loss)
    optimizer.step()
    optimizer.zero_grad()
finish(model)
"""


RETRIED = """
def out_of_memory(gradient):
    raise RuntimeError("out of memory")

def attempt(tokens, fails=False):
    x, y = batch(tokens)
    hidden = model[1](model[0](x))
    if fails:
        hidden.register_hook(out_of_memory)
    loss = F.cross_entropy(model[2](hidden), y)
    loss.backward()
    told(loss, tokens)

for step in range(8):
    try:
        attempt(16, fails=step in BAD)
    except RuntimeError:
        ROOM
        attempt(8)
    optimizer.step()
    optimizer.zero_grad()
finish(model)
"""

OWN_BUFFERS = """
for p in model.parameters():
    p.main = torch.zeros_like(p)

    def move(p):
        p.main += p.grad
        p.grad = None

    p.register_post_accumulate_grad_hook(move)
for step in range(6):  # as Megatron: after a backward no parameter has a gradient
    losses = [loss_of() / 3 for _ in range(3)]
    for loss in losses:
        loss.backward()
    for p in model.parameters():
        p.grad, p.main = p.main, torch.zeros_like(p)
    if step:  # before the first step it cannot be told from a warm-up
        told(sum(losses), 48, at=step)
    optimizer.step()
    optimizer.zero_grad()
finish(model)
"""


LEFT_OUT = """
for step in range(10):  # the job looks at the loss, and goes on to the next batch
    loss = loss_of()
    if step in BAD:
        continue
    optimizer.zero_grad()
    loss.backward()
    told(loss)
    optimizer.step()
finish(model)
"""


NONE = "optimizer.zero_grad()"
LOOPS = {
    "skipped": SKIPPED.replace("ZERO", NONE),
    "sam": SAM,
    "retried": RETRIED.replace("ROOM", "model.zero_grad(set_to_none=False)"),
    "own-buffers": OWN_BUFFERS,
    "left-out": LEFT_OUT,
}
ORDER = {"skip_nonfinite": {"max": 3, "per": 128}}


@pytest.mark.parametrize("name", LOOPS)
def test_a_frame_is_of_what_reached_the_step(probed, bare, name):
    """Loss, norm and tokens are those of the gradients that the optimizer got, no safeguard
    takes thrown away ones for these, and the weights end as without the probe."""
    script = MODEL + LOOPS[name]
    job = probed.run(script, safeguards=ORDER)
    assert job.err == "" and job.output == bare.run(script).output
    *rows, _ = job.output
    at = [row.pop("at", step) for step, row in enumerate(rows)]
    assert [frame["step"] for frame in job.frames] == list(range(at[-1] + 1))
    check_frames([job.frames[step] for step in at], rows)
    assert "safeguard" not in job.kinds()


SEEN = {
    "norm": SKIPPED.replace("ZERO", NONE),
    "loss": """
for step in range(10):  # it looks at the loss, and takes no backward
    loss = loss_of() * 1.0
    if step in BAD:
        F.cross_entropy(model(batch()[0]) * float("nan"), batch()[1])
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "finite": SAM,
    # Two overflows of a search are no news, and a third one later is.
    "scaler": """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
for step in range(80):
    loss = loss_of()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if step in (1, 2, 70):
        model[0].weight.grad[0, 0] = float("inf")
    if not torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 0.5)):
        optimizer.zero_grad()
        scaler.update()
        continue
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
}


@pytest.mark.parametrize(
    ("name", "late", "counts"),
    [
        ("norm", True, [None] * 3 + [2.0, 2.0, 3.0, 3.0]),
        ("loss", False, [None] * 3 + [2.0, 2.0, 3.0, 3.0]),
        ("finite", False, [None] * 6),
        ("scaler", False, [None] * 68 + [1.0] * 9),
    ],
)
def test_what_a_job_discards_as_not_finite_is_counted(probed, name, late, counts):
    """By the norm that its clip told, or the loss that it left out; a device is not waited for."""
    job = probed.run(MODEL + SEEN[name], late=late)
    assert job.err == "" and job.column("nonfinite_discards") == counts
    assert "discards" not in job.kinds()


@pytest.mark.parametrize(("name", "late"), [("norm", True), ("loss", False)])
def test_a_job_that_discards_everything_says_so(probed, name, late):
    """No step comes any more, and so no frame; it lives, and there is one notice of it."""
    script = SEEN[name].replace("range(10)", "range(100)").replace("step in BAD", "step > 3")
    job = probed.run(MODEL + script, late=late)
    (told,) = [notice for notice in job.notices if notice.kind == "discards"]
    assert job.err == "" and len(job.frames) == 4 and told.step == 4
    assert told.message.startswith("no optimizer step for 0 s: the newest 3")
    assert told.message.endswith("were not finite, and the job discarded them")


NORMED = MODEL.replace("nn.Tanh()", "nn.BatchNorm1d(16)")
IN_BATCH = """
for step in range(8):
    x, y = batch()
    if step == 3:
        x[0, 0] = float("nan")
    if step == 6 and "running_mean" in dir(model[1]):
        nn.BatchNorm1d.reset_running_stats(model[1])
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    if OWN and not torch.isfinite(loss):
        continue
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("own", "late", "model", "counts"),
    [
        (False, False, NORMED, [*[None] * 4, 1.0, 1.0, 0.0, None]),  # the safeguard skips it
        (False, True, NORMED, [*[None] * 5, *[1.0] * 3]),  # it is applied: NaN for good
        (True, False, NORMED, [*[None] * 4, 1.0, 0.0, None]),
        (False, False, NORMED.replace("(16)", "(16, track_running_stats=False)"), []),
        (False, False, MODEL, []),
    ],
)
def test_running_statistics_that_a_batch_made_nan_are_counted_until_they_are_whole(
    probed, own, late, model, counts
):
    """No training step shows them: each goes by the statistics of its batch."""
    job = probed.run(model + IN_BATCH.replace("OWN", str(own)), safeguards=ORDER, late=late)

    assert job.err == ""
    assert [frame.get("running_stats_broken") for frame in job.frames] == (counts or [None] * 8)


@pytest.mark.parametrize("cheap", [True, False])
def test_running_statistics_are_counted_in_each_step_where_frames_are_whole_a_step_late(cheap):
    """As on a device; where the count is too dear it is repeated: to a rule it is not over."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4))
    context = SimpleNamespace(
        torch=torch,
        scalars=SimpleNamespace(value=float),
        registry=SimpleNamespace(roots=lambda: [model]),
    )
    collector = collector_classes()["running_stats"](context)
    assert cheap or collector.relax()
    frames = []
    for number in range(40):
        if number == 3:
            model[0].running_mean.fill_(float("nan"))
        if number == 8:
            model[0].reset_running_stats()
        values = {"train_loss_raw": float("nan") if number == 3 else 1.0}
        collector.collect(SimpleNamespace(number=number), values)
        frames.append(values)
        if number:
            collector.add_derived_values(frames[-2])

    counts = [frame.get("running_stats_broken") for frame in frames]
    whole = 8 if cheap else 16
    assert counts[:5] == [None] * 5 and set(counts[5:whole]) == {1.0} and counts[whole] == 0.0
    assert set(counts[whole + 2 :]) == {None}
