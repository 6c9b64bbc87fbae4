"""Jobs that are told from outside to go on from a checkpoint that their library wrote."""

from .test_lightning import BEGIN

TRAINER = """
from transformers import (
    GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
)

class Standing(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        pass_by(state.global_step)

model = GPT2LMHeadModel(GPT2Config(                     # with dropout: random state counts
    vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
))
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (44, 12))]
arguments = TrainingArguments(
    "saved", per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2,
    learning_rate=1e-2, lr_scheduler_type="cosine", save_strategy="steps", save_steps=4,
    report_to=[], disable_tqdm=True, use_cpu=True, seed=3, logging_strategy="no",
)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Standing()])
trainer.remove_callback(PrinterCallback)
trainer.train(ARGUMENTS)
finish(model)
"""

LIGHTNING = (
    BEGIN
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
trainer = pl.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[keep],
    enable_model_summary=False, accumulate_grad_batches=1, default_root_dir="saved",
)
net = Net()
trainer.fit(net, loader(9))
finish(net)
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
    whole, saved = ordered(library_pair, TRAINER.replace("ARGUMENTS", ""), at=5)
    assert saved["path"] == str(whole.folder / "saved" / "checkpoint-6")
    assert whole.frames[6]["checkpoint_time"] > 0

    asked = TRAINER.replace("ARGUMENTS", "resume_from_checkpoint=False")
    resumed, inexact = go_on(library_pair, asked, whole, saved["path"], 6)
    assert inexact == ""
    assert "; the job asked for False" in resumed.notices[0].message
    assert resumed.output[-1] == whole.output[-1]
    for before, after in zip(whole.frames[6:], resumed.frames, strict=True):
        for name in ("batch_fingerprint", "train_loss_raw", "learning_rate", "grad_global_norm"):
            assert after[name] == before[name]


def test_a_checkpoint_that_the_trainer_cannot_go_on_from_is_refused(library_pair, tmp_path):
    (tmp_path / "half").mkdir()
    script = TRAINER.replace("ARGUMENTS", "").replace("num_train_epochs=2", "max_steps=2")
    for name, why in (("gone", "there is no such folder"), ("half", "no trainer_state.json")):
        order = {"how": "library", "path": str(tmp_path / name)}
        job = library_pair.probed.run(script, resume=order, attempt=1, first_step=100)
        told = [notice for notice in job.notices if notice.kind == "resume-refused"]
        assert len(told) == 1 and why in told[0].message
        assert [f["step"] for f in job.frames] == [0, 1] and "resumed" not in job.kinds()


def test_lightning_goes_on_between_two_epochs(library_pair):
    """Counters, schedule and optimizer are put back: the same weights, where nothing is random."""
    whole, saved = ordered(library_pair, LIGHTNING, at=3)
    assert saved["path"] == str(whole.folder / "saved" / "supervise-4.ckpt")
    resumed, inexact = go_on(library_pair, LIGHTNING, whole, saved["path"], 4)

    assert inexact == "random state is not put back"
    assert resumed.output[-1] == whole.output[-1]
    for before, after in zip(whole.frames[4:], resumed.frames, strict=True):
        for name in ("batch_fingerprint", "train_loss_raw", "learning_rate"):
            assert after[name] == before[name]


def test_lightning_begins_an_epoch_anew(library_pair):
    """What it does not put back is told: here the first batch comes again, and the last never."""
    whole = library_pair.probed.run(LIGHTNING)
    path = str(whole.folder / "saved" / "step=5.ckpt")
    resumed, inexact = go_on(library_pair, LIGHTNING, whole, path, 5)

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
