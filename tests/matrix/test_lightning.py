"""Lightning's `Trainer`."""

import pytest

BEGIN = """
import logging, warnings
warnings.filterwarnings("ignore", module="lightning")    # it advises more workers
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import lightning.pytorch as pl

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 36

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.randn(8, generator=generator), torch.randint(0, 4, (), generator=generator)

def loader(size):
    return torch.utils.data.DataLoader(Data(), batch_size=size, shuffle=size == 4)

class Base(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4))
        self.log_of_steps, self.total, self.count, self.started = [], 0.0, 0, 0.0

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def begins(self, i):
        if not self.count:
            self.started = self.current_epoch + i / self.trainer.num_training_batches

    def saw(self, loss, batch, parts=1):
        self.total, self.count = self.total + loss.item() / parts, self.count + len(batch[1])

    def validation_step(self, batch, i):
        self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self):
        emit(note={"val_loss": float(self.trainer.callback_metrics["val_loss"])})

def run(model, **options):
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir="saved", num_sanity_val_steps=2, **options,
    )
    trainer.fit(model, loader(4), loader(12))
    finish(model)
"""

AUTOMATIC = (
    BEGIN
    + """
class Automatic(Base):
    def training_step(self, batch, i):
        self.begins(i)
        loss = self.loss(batch)
        self.saw(loss, batch, parts=2)
        return loss

    def on_before_optimizer_step(self, optimizer):     # unscaled, not clipped, before the step
        self.book = Ledger(optimizer)
        self.book.before(train_loss_raw=self.total, grad_global_norm=self.book.gradient(),
                         tokens_per_update=self.count, epoch=self.started)
        self.total, self.count = 0.0, 0

    def lr_scheduler_step(self, scheduler, metric):    # the first thing behind the step
        self.book.after()
        super().lr_scheduler_step(scheduler, metric)

run(Automatic(), accumulate_grad_batches=2, gradient_clip_val=0.3)
from lightning.fabric import Fabric
Fabric(accelerator="cpu", devices=1).save("saved/fabric.pt", {"x": torch.ones(2)})
"""
)


def test_automatic_optimisation(library_pair):
    """Forward and backward run inside the step, and every number is right; the rest is heard of."""
    job = library_pair.run(AUTOMATIC)
    assert len(job.frames) == 10
    first, last = [row["note"]["val_loss"] for row in job.output if "note" in row][-2:]
    assert {f["step"]: f["val_loss"] for f in job.frames if "val_loss" in f} == {
        5: pytest.approx(first)
    }
    saved = [notice.data for notice in job.notices if notice.kind == "checkpoint-saved"]
    assert [data["step"] for data in saved] == [5, 10, 10]
    assert all(data["path"].startswith(str(job.folder / "saved")) for data in saved)
    assert job.frames[5]["checkpoint_time"] > 0
    assert job.notices[-1].data["val_loss"] == pytest.approx(last)
    assert saved[-1]["path"] == str(job.folder / "saved" / "fabric.pt")
    assert sorted(job.kinds()) == ["checkpoint-saved"] * 3 + ["note", "training-ended"]
    ended = next(each.data for each in job.notices if each.kind == "training-ended")
    assert ended == {"done": 10, "total": 10, "stopped": False}
    for frame in job.frames[1:]:  # the model itself is never called, only its training_step
        parts = [frame[f"{part}_time"] for part in ("input", "forward", "backward", "optimizer")]
        assert min(parts) > 0 and sum(parts) + frame["other_time"] == pytest.approx(
            frame["step_time"]
        )
    assert len(set(job.column("batch_fingerprint"))) == 10
    assert any("logz_mean" in frame for frame in job.frames)  # the net inside is sampled
