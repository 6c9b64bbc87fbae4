"""13b: Lightning's `fit` on the byte GPT; it owns the loop."""

import warnings

import torch
from common import ByteGPT, arguments, text, warmup_cosine, windows
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", module="lightning")
options = arguments(400, rows=16, rate=2e-3)
seed_everything(options.seed)


class Job(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = ByteGPT()

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=options.rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: warmup_cosine(s, options.steps)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


generator = torch.Generator().manual_seed(options.seed)
data = TensorDataset(*windows(text(), 6400, 48, generator))
saves = [ModelCheckpoint(options.out, every_n_train_steps=100)] if options.out else []
job = Job()
Trainer(
    accelerator="cpu",
    devices=1,
    max_steps=options.steps,
    logger=False,
    callbacks=saves,
    enable_checkpointing=bool(saves),
    enable_progress_bar=False,
    enable_model_summary=False,
    gradient_clip_val=1.0,
).fit(job, DataLoader(data, options.rows, shuffle=True))

held_out = windows(text(), 256, 48, torch.Generator().manual_seed(12345))
with torch.no_grad():
    final = F.cross_entropy(job.model(held_out[0]).flatten(0, 1), held_out[1].flatten())
print(f"final_loss {final:.5f}")
