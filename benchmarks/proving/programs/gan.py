"""9: a small GAN, two optimizers by turns; healthy only, since its losses descend to nothing."""

import torch
from common import arguments, images
from torch import nn
from torch.nn import functional as F

options = arguments(500, rows=48, rate=2e-4)
generator = torch.Generator().manual_seed(options.seed)
make = nn.Sequential(
    nn.ConvTranspose2d(32, 32, 4),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.ConvTranspose2d(32, 16, 4, 2, 1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.ConvTranspose2d(16, 1, 4, 2, 1),
    nn.Tanh(),
)
judge = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(16, 32, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(32, 1, 4),
    nn.Flatten(0),
)
for_judge = torch.optim.Adam(judge.parameters(), lr=options.rate, betas=(0.5, 0.999))
for_make = torch.optim.Adam(make.parameters(), lr=options.rate, betas=(0.5, 0.999))

for _ in range(options.steps):
    real, _ = images(options.rows, generator)
    fake = make(torch.randn(options.rows, 32, 1, 1, generator=generator))
    for_judge.zero_grad()
    ones, zeros = torch.ones(options.rows), torch.zeros(options.rows)
    loss = F.binary_cross_entropy_with_logits(judge(real), ones)
    loss = loss + F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
    loss.backward()
    for_judge.step()
    for_make.zero_grad()
    F.binary_cross_entropy_with_logits(judge(fake), ones).backward()
    for_make.step()
print(f"final_loss {loss.item():.5f}")
