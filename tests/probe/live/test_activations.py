"""What blocks and the output put out in a sampled step is what the script sees there itself."""

import pytest

from .test_attention import compare

SAMPLING = {"attention": 0, "activations": 3, "routing": 0, "weights": 0, "share": 100}

TRAIN = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        y = self.two(torch.relu(self.one(torch.tanh(x)))) * gain
        return (x + y, None) if PAIR else x + y

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(16, 50)

    def forward(self, tokens, targets=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)[0] if PAIR else block(x)
            seen.append(x.detach().double())
        logits = self.head(x)
        outputs.append(logits.detach().double())
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.view(-1, 50), targets.view(-1))

def percentile(rows, p):
    norms = sorted(float((row ** 2).mean()) ** 0.5 for row in rows)
    return norms[(len(norms) - 1) * p // 100]

seen, outputs = [], []
gain = torch.ones(16)
gain[3] = 30.0  # one channel runs away, as in a large model
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(8):
    tokens = torch.randint(0, 50, SHAPE)
    optimizer.zero_grad()
    if INSIDE:
        loss = model(tokens, tokens)[1]
    else:
        loss = F.cross_entropy(model(tokens).view(-1, 50), tokens.view(-1))
    loss.backward()
    some = [x.reshape(-1, 16)[::max(1, -(-x.numel() // 16 // 256))] for x in seen]
    rms = [(x ** 2).mean().sqrt() for x in some]
    outliers = [(x.abs() > 6 * r).double().mean() for x, r in zip(some, rms)]
    z = outputs[0].reshape(-1, 50)[::max(1, -(-outputs[0].numel() // 50 // 256))]
    columns = range(LAYERS) if LAYERS <= 8 else [i * (LAYERS - 1) // 7 for i in range(8)]
    emit(step=step, residual_rms=max(rms).item(),
         activation_outlier_rate=100 * max(outliers).item(),
         logz_mean=z.exp().sum(-1).log().mean().item(),
         token_entropy=torch.distributions.Categorical(logits=z[::4]).entropy().mean().item(),
         **{f"residual_rms.{i}": rms[i].item() for i in columns},
         **{f"{name}.{i}": percentile(some[i], p) for name, p in
            (("residual_rms_p50", 50), ("residual_rms_p99", 99))
            for i in sorted({i * (LAYERS - 1) // 3 for i in range(4)} if LAYERS > 4
                            else range(LAYERS))})
    assert not any(m._forward_hooks for m in model.modules())
    seen.clear()
    outputs.clear()
    optimizer.step()
finish(model)
"""


def script(layers=3, shape=(2, 16), pair=False, inside=False):
    return f"LAYERS, SHAPE, PAIR, INSIDE = {layers}, {shape}, {pair}, {inside}\n" + TRAIN


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "as-on-a-device"])
def test_residuals_and_logits_are_those_of_the_model(probed, bare, late):
    """Of few layers; of many in long batches, which return tuples, with the loss inside."""
    few = script()
    job = probed.run(few, sampling=SAMPLING, late=late)
    compare(job)
    assert job.frames[6]["activation_outlier_rate"] > 0
    assert late or job.output[-1] == bare.run(few).output[-1]

    many = script(layers=20, shape=(3, 201), pair=True, inside=True)
    job = probed.run(many, sampling=SAMPLING, late=late)
    compare(job)
    assert {name for name in job.frames[3] if name.startswith("residual_rms.")} == {
        f"residual_rms.{i}" for i in (0, 2, 5, 8, 10, 13, 16, 19)
    }


RAISES = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        if number == 3 and not failed:
            failed.append(1)
            raise RuntimeError("out of memory")
        return F.softmax(self.one(x), -1)

number, failed = 0, []
before = F.softmax, torch.softmax, torch.Tensor.softmax, F.scaled_dot_product_attention
model = nn.Sequential(Block(), Block(), Block())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while number < 7:
    optimizer.zero_grad()
    try:
        model(torch.randn(2, 4, 4)).sum().backward()
    except RuntimeError:
        assert number == 3
    assert not any(m._forward_hooks for m in model.modules())
    assert before == (F.softmax, torch.softmax, torch.Tensor.softmax,
                      F.scaled_dot_product_attention)
    assert "softmax" not in vars(torch.Tensor)
    if failed == [1]:
        failed.append(2)
        continue
    optimizer.step()
    number += 1
    torch.save(model, "model.pt")
emit(saved=[len(m._forward_hooks) for m in torch.load("model.pt", weights_only=False).modules()])
"""


def test_nothing_is_left_behind_when_a_forward_raises(probed):
    job = probed.run(RAISES, sampling={**SAMPLING, "attention": 3})
    assert job.err == ""
    assert not any(job.output[0]["saved"])
    # The step was tried again, and its first forward was the one that was watched.
    assert job.frames[6]["residual_rms"] > 0
