"""A script of Hugging Face's `Trainer` that saves and has no way to resume: `trainer.py OUT FILE`.
At step 50 it waits until FILE tells of a verified checkpoint, for two minutes at most; behind step
80 it goes slowly until it was started again."""

import sys
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

out, wait_file = sys.argv[1], Path(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)


class Waiting(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        until = time.monotonic() + (120 if state.global_step == 50 else 0)
        while time.monotonic() < until and "was verified" not in wait_file.read_text():
            time.sleep(0.05)
        if state.global_step > 80 and "was restarted" not in wait_file.read_text():
            time.sleep(0.1)


sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
rows = [(torch.arange(8) + first) % 32 for first in torch.randint(0, 32, (320,))]
arguments = TrainingArguments(
    out,
    per_device_train_batch_size=8,
    max_steps=160,
    learning_rate=1e-2,
    save_steps=40,
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Waiting()])
trainer.train()
print(f"done at {trainer.state.global_step}")
