"""13a: transformers' Trainer on a tiny GPT-2, unmodified; it owns the loop."""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from common import arguments, text, windows
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

options = arguments(400, rows=16, rate=2e-3)
generator = torch.Generator().manual_seed(options.seed)
inputs, _ = windows(text(), 4000, 48, generator)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, use_cache=False)
)
out = str(options.out or tempfile.mkdtemp())
trainer = Trainer(
    model,
    TrainingArguments(
        out,
        max_steps=options.steps,
        per_device_train_batch_size=options.rows,
        learning_rate=options.rate,
        warmup_steps=40,
        lr_scheduler_type="cosine",
        logging_steps=10,
        save_steps=100,
        save_strategy="steps" if options.out else "no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=options.seed,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in inputs],
)
trainer.train()

held_out, _ = windows(text(), 128, 48, torch.Generator().manual_seed(12345))
with torch.no_grad():
    final = model.eval()(input_ids=held_out, labels=held_out).loss
print(f"final_loss {final:.5f}")
