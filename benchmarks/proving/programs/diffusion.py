"""15: a denoising diffusion model on made pictures, with an average of the weights."""

import math

import torch
from common import arguments, images, save
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

options = arguments(500, rows=32, rate=1e-3)


class Denoiser(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.first = nn.Conv2d(1, width, 3, 1, 1)
        self.middle = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))
        self.last = nn.Conv2d(width, 1, 3, 1, 1)

    def forward(self, x, t):
        waves = t[:, None] * torch.exp(torch.linspace(0, math.log(1000), 8))
        features = self.time(torch.cat([waves.sin(), waves.cos()], -1))[:, :, None, None]
        h = self.first(x)
        for norm, layer in zip(self.norms, self.middle, strict=True):
            h = h + layer(F.silu(norm(h + features)))
        return self.last(F.silu(h))


def loss_of(network, generator):
    pictures, _ = images(options.rows, generator)
    t = torch.rand(options.rows, generator=generator)
    noise = torch.randn(pictures.shape, generator=generator)
    angle = (t * math.pi / 2)[:, None, None, None]
    return F.mse_loss(network(pictures * angle.cos() + noise * angle.sin(), t), noise)


model = Denoiser()
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
generator = torch.Generator().manual_seed(options.seed)

for step in range(options.steps):
    loss = loss_of(model, generator)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    average.update_parameters(model)
    save(options, step, model=model.state_dict(), optimizer=optimizer.state_dict())

with torch.no_grad():
    held_out = torch.Generator().manual_seed(12345)
    final = torch.stack([loss_of(model, held_out) for _ in range(16)]).mean()
print(f"final_loss {final:.5f}")
