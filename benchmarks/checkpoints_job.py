"""A job of `checkpoints.py`: a small language model of bytes that evaluates and saves.

    python benchmarks/checkpoints_job.py --model byte|llama --steps 240 --every 40 --out FOLDER

`byte` is the GPT of the proving ground, `llama` that of transformers. Every so many steps it takes
its loss on held-out windows, then saves weights, optimizer, schedule and random state.
"""

import sys
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parent / "proving" / "programs"))
from common import ByteGPT, arguments, text, warmup_cosine, windows

CONTEXT, CALIBRATION = 48, 12345


def make_model(name: str) -> torch.nn.Module:
    """Return an untrained model."""
    if name == "byte":
        return ByteGPT()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes, **heads))


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of windows."""
    output = model(inputs)
    logits = output.logits if hasattr(output, "logits") else output
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    options = arguments(240, rows=16, rate=2e-3, every=40, model="byte")
    generator = torch.Generator().manual_seed(options.seed)
    source, model = text(), make_model(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, options.steps)
    )
    held_out = windows(source, 128, CONTEXT, torch.Generator().manual_seed(CALIBRATION))
    for step in range(1, options.steps + 1):
        loss = loss_of(model, *windows(source, options.rows, CONTEXT, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % options.every:
            continue
        model.eval()
        with torch.no_grad():
            print(f"step {step} val_loss {loss_of(model, *held_out):.4f}", flush=True)
        model.train()
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            parts = {"model": model, "optimizer": optimizer, "scheduler": schedule}
            content = {name: part.state_dict() for name, part in parts.items()}
            content |= {"rng": torch.get_rng_state(), "step": step}
            torch.save(content, options.out / f"ckpt-{step:05d}.pt")


if __name__ == "__main__":
    main()
