"""Trainer, Lightning, Accelerate and Fabric: what they compute, save, resume and take back."""

import pytest

from .conftest import KEEP

# The Trainer with a model of random weights; with dropout, so that random state counts.
TRAINER = """
from transformers import (
    LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
)

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.1,
))

def sample(i):
    ids = torch.randint(0, 64, (16,))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(16) < 3 + i % 7, -100)}

data = [sample(i) for i in range(76)]                  # 9 updates of 2 x 4, and one of 1 x 4

def make(callback, kind=Trainer, eval_dataset=None, **options):
    options = {
        "gradient_accumulation_steps": 2, "num_train_epochs": 2, "lr_scheduler_type": "cosine",
        "save_strategy": "no", "logging_strategy": "no", **options,
    }
    arguments = TrainingArguments(
        "saved", per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        disable_tqdm=True, use_cpu=True, seed=3, **options,
    )
    trainer = kind(model, arguments, train_dataset=data, callbacks=[callback],
                   eval_dataset=eval_dataset)
    trainer.remove_callback(PrinterCallback)
    return trainer
"""
TRAIN = (
    TRAINER
    + """
class Counting(Trainer):                                # as people do to change a step
    def training_step(self, model, inputs, *args, **kwargs):
        counts.append(int((inputs["labels"][:, 1:] != -100).sum()))
        return super().training_step(model, inputs, *args, **kwargs)

class Book(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.book = Ledger(optimizer)
        self.book.before(tokens_per_update=sum(counts), epoch=state.epoch or 0.0)
        counts.clear()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.book.after()

counts = []
trainer = make(
    Book(), Counting, data[:8], per_device_eval_batch_size=4, warmup_steps=4, max_grad_norm=0.8,
    logging_strategy="steps", logging_steps=1, eval_strategy="steps", eval_steps=6,
    save_strategy="steps", save_steps=8,
)
trainer.train()
for row in trainer.state.log_history:
    emit(note={k: v for k, v in row.items() if not k.endswith(("_runtime", "_per_second"))})
finish(model)
"""
)


def test_the_trainer(library_pair):
    """Its own log says the same of every step; epochs, evaluations and saves are heard of."""
    job = library_pair.run(TRAIN, capacity=128)  # as in a run
    log = [row["note"] for row in job.output if "note" in row]
    steps = [row for row in log if "grad_norm" in row]
    assert len(steps) == len(job.frames) == 20
    for frame, row in zip(job.frames, steps, strict=True):
        assert frame["train_loss_raw"] == pytest.approx(row["loss"], rel=1e-5)
        assert frame["grad_global_norm"] == pytest.approx(row["grad_norm"], rel=1e-5)
        assert frame["learning_rate"] == pytest.approx(row["learning_rate"], rel=1e-5)
        assert row["step"] == frame["step"] + 1

    losses = {row["step"]: row["eval_loss"] for row in log if "eval_loss" in row}
    assert sorted(losses) == [6, 12, 18, 20]
    last = losses.pop(20)
    assert {f["step"]: f["val_loss"] for f in job.frames if "val_loss" in f} == losses
    saved = [notice for notice in job.notices if notice.kind == "checkpoint-saved"]
    assert [notice.data["step"] for notice in saved] == [8, 16, 20]
    assert all((job.folder / "saved" / f"checkpoint-{n}").is_dir() for n in (8, 16, 20))
    assert saved[0].data["path"] == str(job.folder / "saved" / "checkpoint-8")
    assert [f["step"] for f in job.frames if f.get("checkpoint_time", 0) > 0] == [8, 16]
    assert job.kinds() == ["checkpoint-saved"] * 3 + ["training-ended", "note"]
    ended = next(each.data for each in job.notices if each.kind == "training-ended")
    assert (ended["done"], ended["total"]) == (20, 20)
    assert job.notices[-1].message.startswith("after the last step: val_loss")
    assert job.notices[-1].data["val_loss"] == last


RESUMED = TRAIN.replace("data[:8]", '{"code": data[:8], "text": data[8:16]}').replace(
    "trainer.train()",
    "trainer.train()\ntrainer.train(resume_from_checkpoint='saved/checkpoint-16')",
)


def test_a_trainer_that_resumes_in_the_same_process_counts_on(library_pair):
    """Epoch and steps go on where the checkpoint was; each evaluation set has its own column."""
    job = library_pair.probed.run(RESUMED)
    library_pair.compare(job)
    assert len(job.frames) == 24
    assert job.frames[20]["epoch"] == pytest.approx(31 / 19)  # 12 of 19 batches of the second
    ended = [notice.data for notice in job.notices if notice.kind == "training-ended"]
    assert [(data["done"], data["total"]) for data in ended] == [(20, 20)] * 2
    log = [row["note"] for row in job.output if "note" in row]
    for name in ("code", "text"):
        losses = {
            row["step"]: row[f"eval_{name}_loss"] for row in log if f"eval_{name}_loss" in row
        }
        for step in (6, 12, 18):
            assert job.frames[step][f"slice_val_loss.{name}"] == losses[step]


LIGHTNING = """
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

def fit(model, *loaders, **options):
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir="saved", **options,
    )
    trainer.fit(model, *loaders)
    finish(model)
"""

AUTOMATIC = (
    LIGHTNING
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

fit(Automatic(), loader(4), loader(12), max_epochs=2, num_sanity_val_steps=2,
    accumulate_grad_batches=2, gradient_clip_val=0.3)
from lightning.fabric import Fabric
Fabric(accelerator="cpu", devices=1).save("saved/fabric.pt", {"x": torch.ones(2)})
"""
)


def test_lightning(library_pair):
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


# ── resumed from outside, from a checkpoint that the library wrote ────────────────────────────────


RESUMABLE = (
    TRAINER
    + """
class Standing(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        pass_by(state.global_step)

make(Standing(), save_strategy="steps", save_steps=4).train(ARGUMENTS)
finish(model)
"""
)
RESUMABLE_LIGHTNING = (
    LIGHTNING
    + """
class Net(Base):
    def __init__(self):
        super().__init__()
        self.net[2] = nn.Identity()     # nothing is random

    def training_step(self, batch, i):
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer):
        pass_by(self.trainer.global_step)

keep = pl.callbacks.ModelCheckpoint("saved", "{step}", every_n_train_steps=5, save_top_k=-1)
fit(Net(), loader(9), max_epochs=3, callbacks=[keep])
"""
)


def go_on(library_pair, script, whole, path, step):
    """Start a script again, from a checkpoint of its first process; return job and what is lost."""
    resumed = library_pair.probed.run(
        script, resume={"how": "library", "path": path}, first_step=step, attempt=1
    )
    assert [frame["step"] for frame in resumed.frames] == list(range(step, len(whole.frames)))
    assert {frame["attempt"] for frame in resumed.frames} == {1}
    notice = next(notice for notice in resumed.notices if notice.kind == "resumed")
    facts = dict(notice.data)
    inexact = facts.pop("inexact")
    assert facts == {"how": "library", "path": path, "step": step}
    assert notice.step == step
    assert notice.message.endswith(inexact)
    return resumed, inexact


def ordered(library_pair, script, at, **args):
    """Run a script, and order a checkpoint while it makes step `at`; return job and its notice."""
    job = library_pair.probed.start(script, environ={"BACK_AT": str(at)})
    answer = job.order("checkpoint", **args, barrier="back")
    assert answer.ok and answer.step == at and answer.result["step"] == at + 1, answer
    library_pair.probed.wait(job)
    assert not [notice for notice in job.notices if notice.kind == "checkpoint-refused"]
    saved = [notice for notice in job.notices if notice.kind == "checkpoint-saved"]
    return job, next(notice.data for notice in saved if notice.data["step"] == at + 1)


def test_the_trainer_goes_on_where_it_was(library_pair):
    """From a checkpoint that was ordered: same batches, same losses, same weights, whatever the
    job itself had asked for."""
    whole, saved = ordered(library_pair, RESUMABLE.replace("ARGUMENTS", ""), at=5)
    assert saved["path"] == str(whole.folder / "saved" / "checkpoint-6")
    assert whole.frames[6]["checkpoint_time"] > 0

    asked = RESUMABLE.replace("ARGUMENTS", "resume_from_checkpoint=False")
    resumed, inexact = go_on(library_pair, asked, whole, saved["path"], 6)
    assert inexact == ""
    assert "; the job asked for False" in resumed.notices[0].message
    assert resumed.output[-1] == whole.output[-1]
    for before, after in zip(whole.frames[6:], resumed.frames, strict=True):
        for name in ("batch_fingerprint", "train_loss_raw", "learning_rate", "grad_global_norm"):
            assert after[name] == before[name]


def test_a_checkpoint_that_the_trainer_cannot_go_on_from_is_refused(library_pair, tmp_path):
    (tmp_path / "half").mkdir()
    script = RESUMABLE.replace("ARGUMENTS", "").replace("save_steps=4", "save_steps=4, max_steps=2")
    for name, why in (("gone", "there is no such folder"), ("half", "no trainer_state.json")):
        order = {"how": "library", "path": str(tmp_path / name)}
        job = library_pair.probed.run(script, resume=order, attempt=1, first_step=100)
        told = [notice for notice in job.notices if notice.kind == "resume-refused"]
        assert len(told) == 1 and why in told[0].message
        assert [f["step"] for f in job.frames] == [0, 1] and "resumed" not in job.kinds()


def test_lightning_goes_on_between_two_epochs_and_begins_one_again(library_pair):
    """Counters, schedule and optimizer are put back: the same weights, where nothing is random.
    Of a checkpoint within an epoch the first batch comes again and the last never."""
    whole, saved = ordered(library_pair, RESUMABLE_LIGHTNING, at=3)
    assert saved["path"] == str(whole.folder / "saved" / "supervise-4.ckpt")
    resumed, inexact = go_on(library_pair, RESUMABLE_LIGHTNING, whole, saved["path"], 4)

    assert inexact == "random state is not put back"
    assert resumed.output[-1] == whole.output[-1]
    for before, after in zip(whole.frames[4:], resumed.frames, strict=True):
        for name in ("batch_fingerprint", "train_loss_raw", "learning_rate"):
            assert after[name] == before[name]

    path = str(whole.folder / "saved" / "step=5.ckpt")
    resumed, inexact = go_on(library_pair, RESUMABLE_LIGHTNING, whole, path, 5)

    assert inexact.startswith("1 batches of the epoch were seen")
    batches = whole.column("batch_fingerprint")
    assert resumed.column("batch_fingerprint")[:4] == [*batches[4:7], batches[8]]
    assert resumed.frames[0]["learning_rate"] == whole.frames[5]["learning_rate"]


BY_HAND = """
weight = nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.sum().backward()
optimizer.step()
"""


def test_a_loop_of_the_jobs_own_cannot_be_resumed_from_outside(library_pair, tmp_path):
    order = {"how": "library", "path": str(tmp_path)}
    job = library_pair.probed.run(BY_HAND, resume=order, attempt=1, first_step=100)
    assert [frame["step"] for frame in job.frames] == [0]
    assert job.kinds() == ["resume-refused"]
    assert "Accelerator.load_state has to be called by the script itself" in job.notices[0].message


# ── a rollback in loops that cannot be rewound: a library's, and `for` statements ───────────────


KEPT = """
class Kept:
    '''Weights and optimizer state behind every step.'''

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.of = model, optimizer, []

    def now(self):
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        moments = [v for held in inner.state.values() for v in held.values()]
        return [t.detach().clone() for t in (*self.model.state_dict().values(), *moments)]

    def before(self):
        pass_by(len(self.of))
        now = self.now()
        self.same = [i for i, old in enumerate(self.of) if all(map(torch.equal, now, old))]

    def after(self):
        emit(note={"same": self.same})
        self.of.append(self.now())
"""
FOR = """
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
ACCELERATE = (
    FOR
    + """
from accelerate import Accelerator
accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, optimizer)
"""
)
FABRIC = (
    FOR
    + """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1)
model, optimizer = fabric.setup(model, optimizer)
"""
)
LOOP = """
kept = Kept(model, optimizer)
data = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(12)]
for epoch in range(2):
    for x, y in data:
        kept.before()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        BACKWARD
        optimizer.step()
        kept.after()
"""
TRAINER_BACK = (
    TRAINER
    + """
class Watch(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.kept = Kept(model, optimizer)

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.kept.before()

    def on_optimizer_step(self, *args, **kwargs):
        self.kept.after()

make(Watch(), gradient_accumulation_steps=1, lr_scheduler_type="linear").train()
"""
)
LIGHTNING_BACK = (
    LIGHTNING
    + """
class Module(Base):
    def training_step(self, batch, i):
        return self.loss(batch)

    def configure_optimizers(self):
        self.made = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.kept = Kept(self.net, self.made)
        return self.made

    def on_before_optimizer_step(self, optimizer):
        self.kept.before()

    def on_train_batch_end(self, *args):
        self.kept.after()

fit(Module(), loader(4), max_epochs=3, enable_checkpointing=False)
"""
)
JOBS = {
    "for": FOR + LOOP.replace("BACKWARD", "loss.backward()"),
    "accelerate": ACCELERATE + LOOP.replace("BACKWARD", "accelerator.backward(loss)"),
    "fabric": FABRIC + LOOP.replace("BACKWARD", "fabric.backward(loss)"),
    "trainer": TRAINER_BACK,
    "lightning": LIGHTNING_BACK,
}


@pytest.mark.parametrize("name", JOBS)
def test_the_weights_go_back_and_the_loop_goes_on(library_pair, name):
    """Bit for bit, at the boundary behind step 17; no step is made twice, none is left out."""
    script = KEPT + JOBS[name]
    job = library_pair.probed.start(script, environ={"BACK_AT": "17"}, savepoints=KEEP)
    order = {"before_step": 13, "rewarm": {"start": 0.5, "steps": 4}}
    answer = job.order("rollback", **order, barrier="back")
    assert answer.ok, answer.error
    library_pair.probed.wait(job)
    at, to = answer.result["from_step"], answer.result["step"]
    assert (at, to) == (17, 12)
    same = [row["note"]["same"] for row in job.output if "note" in row]
    assert [i for i, earlier in enumerate(same) if earlier != [i - 1]] == [0, 18]
    assert same[18] == [to, at]  # behind its step, step 17 has the weights of step 12
    assert job.column("step") == list(range(len(same)))
    assert [f["attempt"] for f in job.frames] == [0] * 18 + [1] * (len(same) - 18)
    rates = [f["learning_rate"] / f["learning_rate_scheduled"] for f in job.frames[18:24]]
    assert rates == pytest.approx([0.5, 0.625, 0.75, 0.875, 1.0, 1.0])
