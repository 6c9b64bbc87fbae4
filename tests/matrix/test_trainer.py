"""Hugging Face `Trainer`, with a model of random weights."""

import pytest

TRAIN = """
from transformers import (
    LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
)

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
))

def sample(i):
    ids = torch.randint(0, 64, (16,))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(16) < 3 + i % 7, -100)}

data = [sample(i) for i in range(76)]                  # 9 updates of 2 x 4, and one of 1 x 4

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
arguments = TrainingArguments(
    "saved", per_device_train_batch_size=4, per_device_eval_batch_size=4,
    gradient_accumulation_steps=2, num_train_epochs=2, learning_rate=1e-2, warmup_steps=4,
    lr_scheduler_type="cosine", max_grad_norm=0.8, logging_steps=1, eval_strategy="steps",
    eval_steps=6, save_strategy="steps", save_steps=8, report_to=[], disable_tqdm=True,
    use_cpu=True, seed=3,
)
trainer = Counting(model, arguments, train_dataset=data, callbacks=[Book()],
                   eval_dataset=data[:8])
trainer.remove_callback(__import__("transformers").PrinterCallback)
trainer.train()
for row in trainer.state.log_history:
    emit(note={k: v for k, v in row.items() if not k.endswith(("_runtime", "_per_second"))})
finish(model)
"""


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


RESUMED = TRAIN.replace(
    "eval_dataset=data[:8]", 'eval_dataset={"code": data[:8], "text": data[8:16]}'
).replace(
    "trainer.train()",
    """trainer.train()
library = __import__("sys").modules["_supervise_probe"]._probe.parts.wired.framework
emit(note={"total": library.total_steps, "before": library.steps_before})
trainer.train(resume_from_checkpoint="saved/checkpoint-16")
emit(note={"total": library.total_steps, "before": library.steps_before})
""",
)


def test_a_trainer_that_resumes(library_pair):
    """The epoch goes on where the checkpoint was, and so does the count of steps; each evaluation
    set has a column of its own."""
    job = library_pair.probed.run(RESUMED)
    library_pair.compare(job)
    assert len(job.frames) == 24
    notes = [row["note"] for row in job.output if "note" in row]
    assert notes[0] == {"total": 20, "before": 0} and notes[1] == {"total": 20, "before": -4}
    assert job.frames[20]["epoch"] == pytest.approx(31 / 19)  # 12 of 19 batches of the second
    log = {row["step"]: row for row in notes[2:] if "eval_code_loss" in row}
    for row in (row for row in notes[2:] if "eval_text_loss" in row):
        log[row["step"]] = {**log[row["step"]], **row}
    for step in (6, 12, 18):
        frame = job.frames[step]
        assert frame["slice_val_loss.code"] == log[step]["eval_code_loss"]
        assert frame["slice_val_loss.text"] == log[step]["eval_text_loss"]
