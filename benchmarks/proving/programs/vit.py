"""5: a vision transformer on made pictures, from a DataLoader, epoch by epoch."""

import torch
from common import Block, arguments, images, save, warmup_cosine
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

options = arguments(500, rows=64, rate=1e-3)


class ViT(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.positions = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4, causal=False) for _ in range(3)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(x).mean(1))


generator = torch.Generator().manual_seed(options.seed)
loader = DataLoader(TensorDataset(*images(6400, generator)), options.rows, shuffle=True)
held_out = images(1000, torch.Generator().manual_seed(12345))
model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.05)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: warmup_cosine(s, options.steps))

step = 0
while step < options.steps:
    for pictures, labels in loader:
        if step >= options.steps:
            break
        loss = F.cross_entropy(model(pictures), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        save(options, step, model=model.state_dict(), optimizer=optimizer.state_dict())
        step += 1
    model.eval()
    with torch.no_grad():
        final = F.cross_entropy(model(held_out[0]), held_out[1])
    model.train()
print(f"final_loss {final:.5f}")
