"""16: an encoder and a decoder that fill in masked bytes (T5), with warm restarts of the rate."""

import torch
from common import Block, arguments, save, text, windows
from torch import nn
from torch.nn import functional as F

options = arguments(450, rows=16, rate=2e-3)


class Seq2Seq(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(258, width)  # bytes, a mask, a start
        self.positions = nn.Embedding(64, width)
        self.encoder = nn.Sequential(*(Block(width, 4, causal=False) for _ in range(2)))
        self.decoder = Block(width, 4)
        self.cross = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def embed(self, x):
        return self.tokens(x) + self.positions(torch.arange(x.shape[1]))

    def forward(self, source, previous):
        memory = self.encoder(self.embed(source))
        x = self.decoder(self.embed(previous))
        return self.head(x + self.cross(x, memory, memory, need_weights=False)[0])


def loss_of(network, generator):
    whole, _ = windows(source, options.rows, 48, generator)
    start = int(torch.randint(8, 32, (1,), generator=generator))
    masked = whole.clone()
    masked[:, start : start + 8] = 256
    wanted = whole[:, start : start + 8]
    begin = torch.full((options.rows, 1), 257)
    logits = network(masked, torch.cat([begin, wanted[:, :-1]], 1))
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


source, model = text(), Seq2Seq()
generator = torch.Generator().manual_seed(options.seed)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 150)

for step in range(options.steps):
    loss = loss_of(model, generator)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    save(options, step, model=model.state_dict(), optimizer=optimizer.state_dict())

with torch.no_grad():
    held_out = torch.Generator().manual_seed(12345)
    final = torch.stack([loss_of(model, held_out) for _ in range(16)]).mean()
print(f"final_loss {final:.5f}")
