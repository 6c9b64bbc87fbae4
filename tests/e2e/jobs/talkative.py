"""A training job that tells its secrets wherever it can; argv and environment hold more of them."""

import os
import subprocess
import sys
import time

import torch
from torch import nn

TITLE, NOTICE, RAISED = (
    os.environ[name] for name in ("JOB_TITLE_KEY", "NOTICE_PASSWORD", "DB_PASS")
)
sleeper = subprocess.Popen([sys.executable, "-c", "input()", f"worker of {TITLE}"], stdin=-1)
print(f"logged in with {os.environ['HF_TOKEN']} and {RAISED}", flush=True)


class Shards(torch.utils.data.Dataset):
    """Each batch is of a shard with a telling name."""

    def __len__(self):
        return 200 * 16

    def __getitem__(self, index):
        torch.manual_seed(index)
        x = torch.randn(8)
        return {
            "x": x,
            "shard": f"https://u:{NOTICE}@host/{NOTICE}-{index // 160}.tar?sig={NOTICE}",
        }


def raise_it(*_):
    raise RuntimeError(f"cannot reach https://u:{RAISED}@db/x?token={RAISED}, tried {RAISED}")


torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step, batch in enumerate(torch.utils.data.DataLoader(Shards(), batch_size=16)):
    loss = nn.functional.mse_loss(model(batch["x"]), batch["x"])
    if step == 60:
        torch.get_rng_state = raise_it  # what the probe's part of the evidence meets
    if step >= 60:
        loss = loss * 1000
        time.sleep(0.02)  # leaves the evidence time to be complete
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    if step == 120:
        sleeper.communicate()
        raise_it()
