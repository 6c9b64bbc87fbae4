"""Real, tiny training that knows nothing of us. What it came to goes to `result`: JSON."""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--sleep", type=float, default=0.0, help="in each step")
parser.add_argument("--stall", default="", help="AT:SECONDS, once; or AT:ever")
parser.add_argument("--exit", type=int, default=0)
parser.add_argument("--before", default="", help="Python, before torch is imported")
parser.add_argument("--at", type=int, default=-1, help="before this step comes `then`")
parser.add_argument("--then", default="", help="Python")
args = parser.parse_args()

Path("pid").write_text(str(os.getpid()))
exec(args.before)

import torch  # noqa: E402

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
stall, _, seconds = args.stall.partition(":")

step = 0
while step < args.steps:
    x = torch.randn(16, 8)
    loss = (model(x) - x[:, :4]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    step += 1
    if args.sleep:
        time.sleep(args.sleep)
    if str(step) == stall:
        time.sleep(1e6 if seconds == "ever" else float(seconds))
    if step == args.at:
        exec(args.then)

weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
result = {"steps": step, "sha": hashlib.sha256(weights).hexdigest()}
Path("result").write_text(json.dumps(result))
sys.exit(args.exit)
