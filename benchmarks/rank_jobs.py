"""Jobs of several ranks that nothing is wrong with, beside those of `proving/programs`.

    torchrun --nproc-per-node 2 benchmarks/rank_jobs.py fsdp2|ragged [--steps 400]

`fsdp2`: the byte GPT, sharded, with an evaluation each 100 steps.
`ragged`: a `for` loop over epochs of a DataLoader; rows are as long as their text, so batches
differ from rank to rank and step to step, and the last one of an epoch is short.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent / "proving" / "programs"))

from common import ByteGPT, text, warmup_cosine, windows

LENGTH, ROWS, RATE, EPOCH = 48, 8, 2e-3, 700
PAD = -100


def prepare(model: torch.nn.Module, steps: int) -> tuple[torch.optim.Optimizer, object]:
    """Return the optimizer and its schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, steps)
    )


def fsdp2(steps: int) -> None:
    """Train shards."""
    from torch.distributed.fsdp import fully_shard

    model = ByteGPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer, schedule = prepare(model, steps)
    source, own = text(), torch.Generator().manual_seed(dist.get_rank())
    fixed = windows(source, 32, LENGTH, torch.Generator().manual_seed(12345))
    for step in range(steps):
        inputs, targets = windows(source, ROWS, LENGTH, own)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            with torch.no_grad():
                model(fixed[0])


class Rows(torch.utils.data.Dataset):
    """Rows of 8 to `LENGTH` bytes."""

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(7)
        self.inputs, self.targets = windows(text(), EPOCH, LENGTH, chance)
        self.lengths = torch.randint(8, LENGTH, (EPOCH,), generator=chance).tolist()

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.lengths[index]
        return self.inputs[index, :length], self.targets[index, :length]


def padded(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of one length, that of the longest."""
    inputs, targets = zip(*rows, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(inputs, batch_first=True), pad(targets, batch_first=True, padding_value=PAD)


def ragged(steps: int) -> None:
    """Train on batches of unlike sizes."""
    model = torch.nn.parallel.DistributedDataParallel(ByteGPT())
    optimizer, schedule = prepare(model, steps)
    sampler = torch.utils.data.DistributedSampler(Rows())
    loader = torch.utils.data.DataLoader(sampler.dataset, ROWS, sampler=sampler, collate_fn=padded)
    for epoch in range(-(-steps // len(loader))):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PAD)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("fsdp2", "ragged"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    torch.manual_seed(wanted.seed)
    dist.init_process_group("gloo")
    {"fsdp2": fsdp2, "ragged": ragged}[wanted.kind](wanted.steps)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # FSDP2 keeps gloo's threads, which may abort Python as it ends


if __name__ == "__main__":
    main()
