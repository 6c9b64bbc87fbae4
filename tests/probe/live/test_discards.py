"""Gradients that a job throws away, and forwards that it leaves out, are in no frame."""

import math

import pytest

pytestmark = pytest.mark.slow

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

SAM_IN_STEP = """
class Sam(torch.optim.SGD):
    def step(self, closure):
        with torch.no_grad():
            old = [p.clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(p.grad, alpha=0.05)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, q in zip(model.parameters(), old):
                p.copy_(q)
        super().step()

optimizer = Sam(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    loss_of().backward()

    def again():
        loss = loss_of()
        loss.backward()
        told(loss)

    optimizer.step(again)
finish(model)
"""

SURGERY = """
for step in range(6):  # gradients of two losses of one forward are put together by hand
    x, y = batch()
    out = model(x)
    losses = F.cross_entropy(out, y), out.square().mean()
    kept = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        kept.append([p.grad.clone() for p in model.parameters()])
    for p, a, b in zip(model.parameters(), *kept):
        p.grad = a + 0.5 * b
    told(sum(losses))
    optimizer.step()
finish(model)
"""

RETRIED = """
class Memory(torch.autograd.Function):
    full = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        full, Memory.full = Memory.full, False
        if full:
            raise RuntimeError("out of memory")
        return gradient

def attempt(tokens):
    x, y = batch(tokens)
    loss = F.cross_entropy(model[2](Memory.apply(model[1](model[0](x)))), y)
    loss.backward()
    told(loss, tokens)

for step in range(8):
    Memory.full = step in BAD
    try:
        attempt(16)
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

OWN_PARTS = """
critic = nn.Linear(8, 4)
second = torch.optim.SGD(critic.parameters(), lr=0.1)
for step in range(6):  # zeroed in between, but other parameters
    x, y = batch()
    first_loss, second_loss = F.cross_entropy(model(x), y), critic(x).square().mean()
    optimizer.zero_grad(SET)
    first_loss.backward()
    second.zero_grad(SET)
    second_loss.backward()
    gradients = [p.grad for p in (*model.parameters(), *critic.parameters())]
    emit(train_loss_raw=(first_loss + second_loss).item(), grad_global_norm=norm(gradients),
         tokens_per_update=16)
    optimizer.step()
    second.step()
finish(model, critic)
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

LEFT_OUT_LAST = """
for step in range(10):  # as Lightning, where a part of the batch may have no loss
    optimizer.zero_grad()
    total = 0.0
    for part in range(2):
        loss = loss_of(8) / 2
        if part or step not in BAD:
            loss.backward()
            total += loss.detach()
    loss = None
    if step in BAD:
        loss_of(8)
    told(total, 8 if step in BAD else 16)
    optimizer.step()
finish(model)
"""

VIEWS = """
for step in range(6):  # several forwards, and one backward of their sum
    total = 0.0
    for view in range(3):
        total = total + loss_of()
    optimizer.zero_grad()
    total.backward()
    told(total, 48)
    optimizer.step()
finish(model)
"""

INSIDE = """
class Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, y):
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            losses = [F.cross_entropy(a, b, reduction="sum")
                      for a, b in zip(logits.chunk(2), y.chunk(2))]
            ctx.save_for_backward(torch.autograd.grad(sum(losses), logits)[0])
        return sum(losses).detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None

for step in range(5):  # the graphs of its losses are gone before backward begins
    x, y = batch()
    loss = Chunked.apply(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    told(loss)
    optimizer.step()
finish(model)
"""

NONE, ZEROS = "optimizer.zero_grad()", "model.zero_grad(set_to_none=False)"
LOOPS = {
    "skipped": SKIPPED.replace("ZERO", NONE),
    "skipped-zeros": SKIPPED.replace("ZERO", ZEROS),
    "sam": SAM,
    "sam-in-step": SAM_IN_STEP,
    "surgery": SURGERY,
    "retried": RETRIED.replace("ROOM", NONE),
    "retried-zeros": RETRIED.replace("ROOM", ZEROS),
    "retried-by-hand": RETRIED.replace("ROOM", "for p in model.parameters(): p.grad = None"),
    "own-buffers": OWN_BUFFERS,
    "own-parts": OWN_PARTS.replace("SET", ""),
    "own-parts-zeros": OWN_PARTS.replace("SET", "set_to_none=False"),
    "left-out": LEFT_OUT,
    "left-out-last": LEFT_OUT_LAST,
    "views": VIEWS,
    "inside": INSIDE,
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
    for step, row in zip(at, rows, strict=True):
        frame = job.frames[step]
        for metric, value in row.items():
            assert math.isclose(frame[metric], value, rel_tol=1e-6), (metric, frame, value)
    assert "safeguard" not in job.kinds()


FINGERPRINTS = (
    MODEL
    + """
batches = [batch() for _ in range(4)]
for step in range(16):  # each batch again and again
    x, y = batches[step % 4]
    loss = F.cross_entropy(model(x), y)
    if step in LEFT_OUT:
        continue
    optimizer.zero_grad()
    loss.backward()
    if step in THROWN_AWAY:
        optimizer.zero_grad()
        continue
    emit(batch=step % 4)
    optimizer.step()
"""
)


@pytest.mark.parametrize("where", ["LEFT_OUT", "THROWN_AWAY"])
def test_a_batch_keeps_its_fingerprint_behind_one_that_did_not_count(probed, where):
    other = {"LEFT_OUT": "THROWN_AWAY", "THROWN_AWAY": "LEFT_OUT"}[where]
    job = probed.run(FINGERPRINTS.replace(where, "(5, 10)").replace(other, "()"))
    prints = {}
    for row, frame in zip(job.output[1:], job.frames[1:], strict=True):  # the model is known
        prints.setdefault(row["batch"], set()).add(frame["batch_fingerprint"])
    assert sorted(map(len, prints.values())) == [1, 1, 1, 1]
    assert len(set.union(*prints.values())) == 4
