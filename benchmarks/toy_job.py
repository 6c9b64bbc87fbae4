"""A job with steps of some milliseconds and a given number of them; see toy_soak.py.

Classes are drawn at random, so that the loss stays at the logarithm of their number: nothing is to
be learned, nothing changes, and whatever grows is not the job's.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

CLASSES, WIDTH, BATCH = 16, 16, 64


def main(steps: int) -> None:
    """Train a model of 500 weights; a `while`, so that savepoints are kept as well."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    step = 0
    while step < steps:
        classes = torch.randint(CLASSES, (BATCH,))
        loss = F.cross_entropy(model(torch.randn(BATCH, WIDTH)), classes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1


if __name__ == "__main__":
    main(int(sys.argv[1]))
