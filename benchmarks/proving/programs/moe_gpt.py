"""4: a byte GPT with four experts, two a token, and a load-balancing loss."""

import torch
from common import Block, ByteGPT, arguments, save, text, warmup_cosine, windows
from torch import nn
from torch.nn import functional as F

options = arguments(500, rows=16, rate=2e-3)


class Experts(nn.Module):
    """Top-2 of four small networks; `balance` is Switch Transformer's auxiliary loss."""

    def __init__(self, width: int, experts: int = 4, top: int = 2) -> None:
        super().__init__()
        self.top, self.balance = top, torch.tensor(0.0)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x):
        flat = x.flatten(0, 1)
        probabilities = self.router(flat).softmax(-1)
        weights, chosen = probabilities.topk(self.top, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        share = F.one_hot(chosen[:, 0], len(self.experts)).float().mean(0)
        self.balance = len(self.experts) * (share * probabilities.mean(0)).sum()
        return y.view_as(x)


generator = torch.Generator().manual_seed(options.seed)
source, model = text(), ByteGPT()
model.blocks = nn.ModuleList(Block(64, 4, mlp=Experts(64)) for _ in range(2))
optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: warmup_cosine(s, options.steps))

for step in range(options.steps):
    inputs, targets = windows(source, options.rows, 48, generator)
    main = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss = main + 0.01 * sum(block.mlp.balance for block in model.blocks)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    save(options, step, model=model.state_dict(), optimizer=optimizer.state_dict())

held_out = windows(source, 128, 48, torch.Generator().manual_seed(12345))
with torch.no_grad():
    final = F.cross_entropy(model(held_out[0]).flatten(0, 1), held_out[1].flatten())
print(f"final_loss {final:.5f}")
