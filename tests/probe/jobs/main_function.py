"""The loop in a function: batch norm, EMA copy, data from four sources of chance."""

import copy
import hashlib
import json
import random

import numpy as np
import torch
from torch import nn


def make_batch(generator, chance, table):
    rows = torch.randint(0, len(table), (16,), generator=generator)
    noise = torch.from_numpy(chance.normal(size=(16, 8)).astype(np.float32))
    x = table[rows] + 0.1 * noise + 0.01 * random.random() + 0.01 * float(np.random.rand())
    return x, table[rows].sum(1, keepdim=True)


class Running:
    """A running mean, as people write it into their scripts."""

    __slots__ = ("count", "mean")

    def __init__(self):
        self.count, self.mean = 0, 0.0

    def update(self, value):
        self.count += 1
        self.mean += (value - self.mean) / self.count


def main(steps=30):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    generator = torch.Generator().manual_seed(5)
    chance = np.random.default_rng(7)
    table = torch.randn(128, 8)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    ema = copy.deepcopy(model)
    head = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.AdamW([*model.parameters(), head], lr=1e-2)
    shadow = {name: value.clone() for name, value in model.state_dict().items()}
    losses, running, step = [], Running(), 0
    x, y = make_batch(generator, chance, table)
    while step < steps:
        loss = (model(x) + head - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
            for name, value in model.state_dict().items():
                shadow[name] = shadow[name] * 0.9 + value * 0.1
        running.update(loss.item())
        losses.append(loss.item())
        x, y = make_batch(generator, chance, table)
        step += 1
    tensors = [*model.state_dict().values(), *ema.state_dict().values(), head.detach()]
    tensors += shadow.values()
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors))
    also = [running.count, running.mean]
    print(json.dumps({"losses": losses, "sha": digest.hexdigest(), "also": also}))


if __name__ == "__main__":
    raise SystemExit(main())
