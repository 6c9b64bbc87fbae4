"""A small training job that knows nothing of supervise: an MLP on synthetic data, own loop."""

import argparse
import hashlib
import math
import sys
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--exit", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
target = nn.Linear(16, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 20))

step = 0
while step < args.steps:
    x = torch.randn(64, 16)
    with torch.no_grad():
        y = torch.tanh(target(x)) + 0.1 * torch.randn(64, 8)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    step += 1
    if args.sleep:
        time.sleep(args.sleep)
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
finite = all(math.isfinite(v) for p in model.parameters() for v in p.detach().flatten().tolist())
print(f"steps {step} sha {hashlib.sha256(weights).hexdigest()[:16]} finite {finite}")
sys.exit(args.exit)
