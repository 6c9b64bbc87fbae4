"""A script of Lightning that saves and has no way to resume: `lit.py OUT FILE`. At step 50 it waits
until FILE tells of a verified checkpoint, for two minutes at most; behind step 80 it goes
slowly until it was started again."""

import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

out, wait_file = sys.argv[1], Path(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, index):
        until = time.monotonic() + (120 if self.trainer.global_step == 50 else 0)
        while time.monotonic() < until and "was verified" not in wait_file.read_text():
            time.sleep(0.05)
        if self.trainer.global_step > 80 and "was restarted" not in wait_file.read_text():
            time.sleep(0.1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


x = torch.randn(1280, 16)
data = TensorDataset(x, torch.tanh(nn.Linear(16, 8)(x)).detach())
saver = pl.callbacks.ModelCheckpoint(out, "{step}", every_n_train_steps=25, save_top_k=-1)
trainer = pl.Trainer(
    max_steps=160,
    accelerator="cpu",
    logger=False,
    callbacks=[saver],
    default_root_dir=out,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Net(), DataLoader(data, batch_size=32, shuffle=True))
print(f"done at {trainer.global_step}")
