"""Attention logits and entropies of a sampled step are those that the script computes itself."""

import pytest

SAMPLING = {"attention": 3, "activations": 0, "routing": 0, "weights": 0, "share": 100}

MODEL = """
class Attention(nn.Module):
    def __init__(self, width, heads, shared, kind):
        super().__init__()
        self.heads, self.shared, self.kind = heads, shared, kind
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width // heads * shared)
        self.v = nn.Linear(width, width // heads * shared)

    def forward(self, x):
        B, T, C = x.shape
        size = C // self.heads
        q = self.q(x).view(B, T, self.heads, size).transpose(1, 2) * 3
        k = self.k(x).view(B, T, self.shared, size).transpose(1, 2) * 3
        v = self.v(x).view(B, T, self.shared, size).transpose(1, 2)
        keep(q, k)
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        elif self.kind == "additive":
            mask = torch.zeros(T, T).masked_fill(~allowed(T), torch.finfo(torch.float32).min)
            y = F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask,
                                               enable_gqa=True)
        else:
            k = k.repeat_interleave(self.heads // self.shared, 1)
            v = v.repeat_interleave(self.heads // self.shared, 1)
            if self.kind == "folded":
                q, k, v = (each.flatten(0, 1) for each in (q, k, v))
            logits = (q @ k.transpose(-2, -1)) / math.sqrt(size)
            logits = logits.masked_fill(~allowed(T), -math.inf)
            spelt = {
                "functional": lambda x: F.softmax(x, dim=-1),
                "torch": lambda x: torch.softmax(x, -1),
                "method": lambda x: x.softmax(-1),
                "folded": nn.Softmax(dim=-1),
            }
            y = (spelt[self.kind](logits) @ v).view(B, self.heads, T, size)
        return y.transpose(1, 2).reshape(B, T, C)

def allowed(T):
    return torch.ones(T, T).tril().bool()

def keep(q, k):
    seen.append((q.detach().double(), k.detach().double()))

def expected():
    tops, means, entropies = [], [], []
    for q, k in seen:
        T = q.shape[2]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        rows = torch.arange(T) if T <= 64 else torch.arange(64) * (T - 1) // 63
        logits = (q[:4] @ k[:4].transpose(-2, -1) / math.sqrt(q.shape[-1]))[:, :, rows]
        mask = allowed(T)[rows]
        tops.append(logits.masked_fill(~mask, -math.inf).amax((0, 2, 3)))
        means.append(logits.abs()[mask.expand(logits.shape)].mean())
        p = logits.masked_fill(~mask, -math.inf).softmax(-1)
        H = torch.special.entr(p).sum(-1)
        late = rows >= 8
        entropies.append((H / (rows + 1).log())[:, :, late].mean((0, 2)))
    tops = torch.stack(tops)
    entropies = torch.stack(entropies)
    return {
        "max_attn_logit": tops.max().item(),
        "attn_logit_absmean": torch.stack(means).mean().item(),
        "attn_logit_heads_over_100": int((tops > 100).sum()),
        "attn_entropy": entropies.mean().item(),
        "attn_entropy_min": entropies.min().item(),
        **{f"max_attn_logit.{i}": tops[i].max().item() for i in range(len(tops))},
        "heads": sorted(((top.item(), f"{i}.{h}") for i, layer in enumerate(tops)
                         for h, top in enumerate(layer)), reverse=True)[:3],
    }
"""

TRAIN = """
seen = []
layers = nn.ModuleList([Attention(32, 4, 2, KIND) for _ in range(3)])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = layers

    def forward(self, x):
        for layer in self.inner:
            x = x + layer(x)
        return x

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for step in range(8):
    optimizer.zero_grad()
    x = torch.randn(6, LENGTH, 32) * (6 if step == 6 else 1)
    for part in x.chunk(2) if step == 3 else [x]:
        model(part).square().mean().backward()
    del seen[3:]
    emit(step=step, **expected())
    seen.clear()
    optimizer.step()
finish(model)
"""

KINDS = ["sdpa", "additive", "functional", "torch", "method", "folded"]


def script(kind, length):
    return MODEL + f"KIND, LENGTH = {kind!r}, {length}\n" + TRAIN


def compare(job, every=3, rel=2e-5):
    """Sampled frames hold what the script told of their step; the others hold none of it."""
    told = [row for row in job.output if "sha" not in row]
    first = {}
    for row in told:
        sampled = row["step"] >= 2 and row["step"] % every == 0
        for logit, head in row.pop("heads", []):
            if sampled and (head in first or len(first) < 6):
                first[head] = row[f"max_attn_logit_head.{head}"] = logit
    assert [frame["step"] for frame in job.frames] == [row["step"] for row in told]
    compared = 0
    for frame, row in zip(job.frames, told, strict=True):
        sampled = row["step"] >= 2 and row["step"] % every == 0
        assert not any(name.startswith("attn_head") for name in frame)
        for name in row.keys() - {"step"}:
            if sampled:
                assert frame[name] == pytest.approx(row[name], rel=rel), (name, row["step"])
                compared += 1
            else:
                assert name not in frame, (name, row["step"])
    assert compared


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_entropies_are_right_however_attention_is_spelt(probed, bare, kind):
    text = script(kind, 70 if kind == "sdpa" else 16)
    job = probed.run(text, sampling=SAMPLING)
    compare(job)
    assert [frame.get("attn_logit_heads_over_100") for frame in job.frames][6] > 0
    if kind in ("sdpa", "functional"):
        assert job.output[-1] == bare.run(text).output[-1]  # the weights, to the last bit


def test_values_on_a_device_come_a_step_late_in_the_right_frame(probed):
    compare(probed.run(script("sdpa", 16), sampling=SAMPLING, late=True))


ENTROPIES = {"attn_entropy", "attn_entropy_min"}

WINDOWS = """
class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        T = x.shape[1]
        apart = torch.arange(T)[:, None] - torch.arange(T)
        for window in WIDTHS:
            q, k = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k))
            mask = (apart >= 0) & (apart < window)
            logits = (q @ k.transpose(-2, -1)).detach().double() / 2
            p = logits.masked_fill(~mask, -math.inf).softmax(-1)
            share = torch.special.entr(p).sum(-1) / mask.sum(-1).log()
            if window > 8:
                shares.append(share[:, :, 8:].mean((0, 2)))
            if BY_HAND:
                scores = q @ k.transpose(-2, -1) / 2
                y = scores.masked_fill(~mask, -math.inf).softmax(-1) @ k
            else:
                y = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
            x = x + y.transpose(1, 2).flatten(2)
        return x

shares = []
model = Windows()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(7):
    optimizer.zero_grad()
    model(torch.randn(4, 20, 8)).square().mean().backward()
    seen = torch.cat(shares) if shares else torch.full((1,), math.nan)
    emit(step=step, attn_entropy=seen.mean().item(), attn_entropy_min=seen.min().item())
    shares.clear()
    optimizer.step()
"""


def windows(widths, by_hand):
    return f"WIDTHS, BY_HAND = {widths}, {by_hand}\n" + WINDOWS


@pytest.mark.parametrize(
    ("by_hand", "late"), [(False, False), (True, True)], ids=["sdpa", "by-hand-as-on-a-device"]
)
def test_a_layer_in_which_no_query_sees_nine_keys_has_no_entropy(probed, by_hand, late):
    """Alone it leaves the entropies absent; beside a layer that has one it does not count."""
    job = probed.run(windows((8, 8), by_hand), sampling=SAMPLING, late=late)
    assert [f["step"] for f in job.frames if "max_attn_logit.1" in f] == [3, 6]
    assert not any(ENTROPIES & frame.keys() for frame in job.frames)

    compare(probed.run(windows((8, 20, 8), by_hand), sampling=SAMPLING, late=late))


BIASED = """
class Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        p = (q @ k.transpose(-2, -1)).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, p = ctx.saved_tensors
        dp = g @ v.transpose(-2, -1)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True) - BIAS * dp.abs().mean(-1, keepdim=True))
        dk = ds.transpose(-2, -1) @ q
        rows = dk[:4].double()
        told.append((rows.sum(-2).abs().sum(-1) / rows.abs().sum((-2, -1)) / 1e-4).flatten())
        return ds @ k, dk, p.transpose(-2, -1) @ g

home = torch.nn.functional
exact, told = home.scaled_dot_product_attention, []
if BIAS is not None:
    home.scaled_dot_product_attention = lambda q, k, v: Biased.apply(q, k, v)
layers = nn.ModuleList([nn.Linear(16, 32) for _ in range(3)])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = layers

    def forward(self, x):
        for layer in self.inner:
            q, k = layer(x).unflatten(-1, (4, 8)).transpose(1, 2).chunk(2, 1)
            x = x + home.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2) * k.mean()
        return x

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(7):
    optimizer.zero_grad()
    model(torch.randn(5, 12, 16)).square().mean().backward()
    emit(step=step, sum=torch.cat(told).median().item() if told else None)
    told.clear()
    optimizer.step()
finish(model)
"""


@pytest.mark.parametrize("bias", [None, 0.0, 0.1])
def test_key_gradients_add_up_to_zero_unless_the_backward_is_biased(probed, bare, bias):
    """Only what attention makes of a key counts, and the weights are the same to the bit."""
    text = f"BIAS = {bias}\n" + BIASED
    job = probed.run(text, sampling=SAMPLING)
    sampled = {f["step"]: f["key_gradient_sum"] for f in job.frames if "key_gradient_sum" in f}
    assert list(sampled) == [3, 6]
    if bias:
        told = {row["step"]: row["sum"] for row in job.output if "sum" in row}
        assert sampled == {step: pytest.approx(told[step], rel=1e-3) for step in sampled}
        assert min(sampled.values()) > 10.0
    else:
        assert max(sampled.values()) < 0.1
    assert job.output[-1]["sha"] == bare.run(text).output[-1]["sha"]
