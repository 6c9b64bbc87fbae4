"""Trains on 150 shards over and over; one of them is rotten.

Before each round it waits until the supervisor of the run has judged all steps so far.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset

EPOCHS, RUN, SHARDS, ROTTEN = int(sys.argv[1]), Path(sys.argv[2]), 150, 70


class Rows(IterableDataset):
    """Two batches of each shard, in order."""

    def __iter__(self):
        chance = torch.Generator().manual_seed(0)
        for shard in range(SHARDS):
            for _ in range(2):
                x = torch.randn(4, generator=chance)
                yield {"x": 50.0 * x if shard == ROTTEN else x, "shard": f"data/{shard:03d}.tar"}


def judged() -> int:
    """Return the newest step that the supervisor has judged; it reports that once a second."""
    state = RUN / "state.json"
    return json.loads(state.read_text())["step"] if state.exists() else -1


model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
steps = 0
for epoch in range(EPOCHS):
    while (steps and judged() < steps - 2) or (
        epoch == 3 and not (RUN / "quarantine.json").exists()
    ):
        time.sleep(0.02)
    for batch in DataLoader(Rows(), batch_size=1):
        optimizer.zero_grad()
        (1.0 + model(batch["x"]).pow(2).mean()).backward()
        optimizer.step()
        steps += 1
print(f"steps {steps}")
