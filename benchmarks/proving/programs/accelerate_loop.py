"""18: accelerate with a loop of the job's own, saved by `save_state`, as in its examples."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from common import ByteGPT, text, warmup_cosine, windows
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--output_dir", type=Path, default=None)
parser.add_argument("--resume_from_checkpoint", type=str, default=None)
options = parser.parse_args()

torch.manual_seed(options.seed)
data = TensorDataset(*windows(text(), 6400, 48, torch.Generator().manual_seed(options.seed)))
accelerator = Accelerator(cpu=True)
model = ByteGPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: warmup_cosine(s, options.steps))
loader = DataLoader(data, 16, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

done = 0
if options.resume_from_checkpoint:
    accelerator.load_state(options.resume_from_checkpoint)
    done = int(Path(options.resume_from_checkpoint).name.removeprefix("step_"))
while done < options.steps:
    epoch = loader
    if done % len(loader):
        epoch = accelerator.skip_first_batches(loader, done % len(loader))
    for inputs, targets in epoch:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        done += 1
        if options.output_dir and done % 100 == 0:
            accelerator.save_state(str(options.output_dir / f"step_{done}"))
        if done == options.steps:
            break

held_out = windows(text(), 256, 48, torch.Generator().manual_seed(12345))
with torch.no_grad():
    final = F.cross_entropy(model(held_out[0]).flatten(0, 1), held_out[1].flatten())
print(f"final_loss {final:.5f}")
