"""A rollback in loops that cannot be rewound: a library's, and `for` statements."""

import pytest

from .test_lightning import BEGIN

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
TRAINER = """
from transformers import (
    LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
)

class Watch(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.kept = Kept(model, optimizer)

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.kept.before()

    def on_optimizer_step(self, *args, **kwargs):
        self.kept.after()

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
))
rows = [torch.randint(0, 64, (16,)) for _ in range(48)]
arguments = TrainingArguments(
    "saved", per_device_train_batch_size=4, num_train_epochs=2, learning_rate=1e-2, report_to=[],
    save_strategy="no", disable_tqdm=True, use_cpu=True, logging_strategy="no",
)
trainer = Trainer(
    model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    callbacks=[Watch()],
)
trainer.remove_callback(__import__("transformers").PrinterCallback)
trainer.train()
"""
LIGHTNING = (
    BEGIN
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

trainer = pl.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False,
    enable_checkpointing=False, enable_model_summary=False,
)
trainer.fit(Module(), loader(4))
"""
)
JOBS = {
    "for": FOR + LOOP.replace("BACKWARD", "loss.backward()"),
    "accelerate": ACCELERATE + LOOP.replace("BACKWARD", "accelerator.backward(loss)"),
    "fabric": FABRIC + LOOP.replace("BACKWARD", "fabric.backward(loss)"),
    "trainer": TRAINER,
    "lightning": LIGHTNING,
}


@pytest.mark.parametrize("name", JOBS)
def test_the_weights_go_back_and_the_loop_goes_on(library_pair, name):
    """Bit for bit, at the boundary behind step 17; no step is made twice, none is left out."""
    job = library_pair.probed.start(
        KEPT + JOBS[name],
        environ={"BACK_AT": "17"},
        savepoints={"every": 3, "keep": 4, "max_bytes": 1 << 26},
    )
    order = {"before_step": 13, "rewarm": {"start": 0.5, "steps": 4}}
    answer = job.order("rollback", **order, barrier="back")
    assert answer.ok, answer.error
    library_pair.probed.wait(job)
    at, to = answer.result["from_step"], answer.result["step"]
    assert (at, to) == (17, 12)
    same = [row["note"]["same"] for row in job.output if "note" in row]
    assert [i for i, earlier in enumerate(same) if len(earlier) > 1 or earlier != [i - 1]] == [
        0,
        18,
    ]
    assert same[18] == [to, at]  # behind its step, step 17 has the weights of step 12
    assert job.column("step") == list(range(len(same)))
    assert [f["attempt"] for f in job.frames] == [0] * 18 + [1] * (len(same) - 18)
    rates = [f["learning_rate"] / f["learning_rate_scheduled"] for f in job.frames[18:24]]
    assert rates == pytest.approx([0.5, 0.625, 0.75, 0.875, 1.0, 1.0])
