"""A language model with attention in three spellings, trained as people train one."""

import pytest

pytestmark = pytest.mark.slow

MODEL = """
class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        return self.out({attention}.transpose(1, 2).reshape(b, t, c))

    def by_hand(self, q, k, v):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return self.drop(scores.masked_fill(ahead, -math.inf).softmax(-1)) @ v

class Whole(nn.MultiheadAttention):
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return super().forward(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(50, 32), nn.Parameter(torch.randn(16, 32) / 10)
        self.blocks = nn.ModuleList({block} for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight                                    # tied

    def forward(self, x):
        h = self.embed(x) + self.place[: x.size(1)]
        for norm, block in zip(self.norms, self.blocks):
            h = h + block(norm(h))
        return self.head(h)
"""
LOOP = """
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
book = Ledger(optimizer)

def evaluate():
    model.eval()
    with torch.no_grad():
        rows = torch.randint(0, 50, (8, 17))
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    model.train()
    return loss.item()

step = 0
while step < 10:
    pass_by(step)
    if step % 4 == 0:
        evaluate()                                    # counts for nothing
    rows = torch.randint(0, 50, (4, 17))
    targets = rows[:, 1:].masked_fill(torch.rand(4, 16) < 0.2, -100)
    logits = model(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    loss.backward()
    book.before(train_loss_raw=loss.item(), grad_global_norm=book.gradient(),
                tokens_per_update=int((targets != -100).sum()))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    book.after()
    step += 1
finish(model)
"""
SPELLINGS = {
    "by-hand": ("self.by_hand(q, k, v)", "Attention(32, 4)"),
    "sdpa": (
        "F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)",
        "Attention(32, 4)",
    ),
    "whole": ("None", "Whole(32, 4, dropout=0.1, batch_first=True)"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_attention(pair, spelling):
    """Every number in float64, evaluations aside; dropout draws what it drew without the probe."""
    attention, block = SPELLINGS[spelling]
    script = MODEL.format(attention=attention, block=block) + LOOP
    job = pair.run(script)

    again, answer = pair.back(script, at=9, to=5)
    assert answer.ok, answer.error
    assert again.output[-1] == job.output[-1]
