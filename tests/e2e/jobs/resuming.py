"""A training script in the manner of nanoGPT: its only checkpoint is overwritten in place, and
`--init_from=resume` goes on from it. At step 150 it waits until a file, if it was given
one, tells of a verified checkpoint; behind step 215 it goes slowly until it was started again."""

import sys
import time
from pathlib import Path

import torch
from torch import nn

init_from, out_dir, max_iters, every, pause_s = "scratch", "out", 300, 100, 0.0
wait_file = ""
for word in sys.argv[1:]:  # later ones win, as with nanoGPT's configurator
    key, _, value = word.removeprefix("--").partition("=")
    globals()[key] = type(globals()[key])(value)

Path(out_dir).mkdir(exist_ok=True)
path = Path(out_dir) / "ckpt.pt"
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
target = nn.Linear(16, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
iter_num = 0
if init_from == "resume":
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    print(f"resumed at {iter_num}", flush=True)
    torch.manual_seed(iter_num)

while iter_num < max_iters:
    x = torch.randn(64, 16)
    with torch.no_grad():
        y = torch.tanh(target(x))
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    iter_num += 1
    if iter_num % every == 0:
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iter_num": iter_num,
        }
        torch.save(checkpoint, path)
    while iter_num == 150 and wait_file and "was verified" not in Path(wait_file).read_text():
        time.sleep(0.05)
    if iter_num > 215 and wait_file and "was restarted" not in Path(wait_file).read_text():
        time.sleep(0.1)
    time.sleep(pause_s)

print(f"done at {iter_num} loss {loss.item():.4f}")
