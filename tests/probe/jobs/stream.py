"""A data module with its position in a global, as many scripts have one."""

import torch

data = torch.arange(4096) % 61
position = 0
counts = {"batches": 0}


def get_batch():
    global position
    rows = data[position : position + 32].reshape(4, 8)
    position = (position + 32) % 4000
    counts["batches"] += 1
    return rows.float() / 61
