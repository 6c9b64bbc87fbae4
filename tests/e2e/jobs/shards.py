"""Trains on 150 shards over and over; one of them is rotten."""

import sys
import time

import torch
from torch.utils.data import DataLoader, IterableDataset

EPOCHS, SHARDS, ROTTEN = int(sys.argv[1]), 150, 70


class Rows(IterableDataset):
    """Two batches of each shard, in order."""

    def __iter__(self):
        chance = torch.Generator().manual_seed(0)
        for shard in range(SHARDS):
            for _ in range(2):
                x = torch.randn(4, generator=chance)
                yield {"x": 50.0 * x if shard == ROTTEN else x, "shard": f"data/{shard:03d}.tar"}


model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
steps = 0
for _ in range(EPOCHS):
    for batch in DataLoader(Rows(), batch_size=1):
        optimizer.zero_grad()
        (1.0 + model(batch["x"]).pow(2).mean()).backward()
        optimizer.step()
        steps += 1
        time.sleep(0.001)  # so that the supervisor keeps up
print(f"steps {steps}")
