"""14: the byte GPT on two ranks under torchrun, DistributedDataParallel over gloo."""

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, its default arguments would hold the group
from common import ByteGPT, arguments, save, text, warmup_cosine, windows
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

options = arguments(300, rows=8, rate=2e-3)
dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(1000 * options.seed + rank)
source, model = text(), DistributedDataParallel(ByteGPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: warmup_cosine(s, options.steps))

for step in range(options.steps):
    inputs, targets = windows(source, options.rows, 48, generator)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if rank == 0:
        save(options, step, model=model.module.state_dict(), optimizer=optimizer.state_dict())

held_out = windows(source, 256, 48, torch.Generator().manual_seed(12345))
with torch.no_grad():
    final = F.cross_entropy(model.module(held_out[0]).flatten(0, 1), held_out[1].flatten())
if rank == 0:
    print(f"final_loss {final:.5f}")
dist.destroy_process_group()
