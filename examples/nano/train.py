"""Train a small GPT on the source code of Python's own standard library.

A byte-level decoder of 0.6 M parameters in plain PyTorch, small enough for one CPU core and a text
that every machine has:

    python train.py --steps 600
    python train.py --steps 600 --resume               # go on from the newest checkpoint in --out
    torchrun --nproc-per-node 2 train.py --steps 600   # the same on two processes

With the same arguments, a resumed run is bit-identical to one that was never interrupted. The last
line is the loss on held-out files, in nats per byte: `val_loss 1.9876`.
"""

import argparse
import contextlib
import math
import os
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, its default arguments would hold the group for good
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Shape:
    vocabulary: int = 256  # bytes
    context: int = 64
    layers: int = 3
    heads: int = 4
    width: int = 128


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # tied
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "mlp.2.weight"))
                std = 0.05 / math.sqrt(2 * shape.layers) if residual else 0.05
                nn.init.normal_(parameter, std=std)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes to train on and the bytes held out: every tenth module of the library."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob("*.py"))
    if len(modules) < 20:
        raise SystemExit(f"train.py: found no Python sources in {folder} to train on")
    held_out = b"".join(path.read_bytes() for path in modules[::10])
    del modules[::10]
    training = b"".join(path.read_bytes() for path in modules)
    return tuple(torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in (training, held_out))


def windows(
    text: torch.Tensor, starts: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, each (len(starts), length): the targets are one byte ahead."""
    spans = text[starts[:, None] + torch.arange(length + 1)].long()
    return spans[:, :-1], spans[:, 1:]


@torch.no_grad()
def validate(model: nn.Module, text: torch.Tensor, length: int) -> float:
    """Return the mean loss over 256 windows, always the same ones."""
    model.eval()
    starts = torch.linspace(0, len(text) - length - 1, 256).long()
    losses = [model(*windows(text, part, length)).item() for part in starts.split(32)]
    model.train()
    return sum(losses) / len(losses)


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Weight decay for the matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))


def save(path: Path, checkpoint: dict) -> None:
    """Write beside, then rename: a reader sees a whole checkpoint or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def random_states(world: int) -> list[torch.Tensor]:
    """Return the random generator's state of every process, in rank order."""
    mine = torch.get_rng_state()
    if world == 1:
        return [mine]
    states = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(states, mine)
    return states


def resume(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: int, rank: int
) -> int:
    """Load the checkpoint into all three, the random generator too; return its step."""
    checkpoint = torch.load(path, weights_only=True)
    if len(checkpoint["rng"]) != world:
        raise SystemExit(f"train.py: {path} is of {len(checkpoint['rng'])} processes, not {world}")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["rng"][rank])
    return checkpoint["step"]


def set_up(args: argparse.Namespace) -> tuple[int, int]:
    """Return world size and rank, as `torchrun` (or nobody) gave them."""
    torch.set_num_threads(args.threads)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed + rank)  # every process draws its own batches
    return world, rank


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for checkpoints")
    parser.add_argument("--accum", type=int, default=1, help="micro-batches per step")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="CHECKPOINT",
        help="go on from this checkpoint, or from the newest in --out",
    )
    parser.add_argument("--batch-size", type=int, default=12, help="windows per micro-batch")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=50, help="steps of warm-up")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--checkpoint-every", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    world, rank = set_up(args)
    training, held_out = load_text()
    shape = Shape()
    gpt = GPT(shape)
    optimizer = make_optimizer(gpt, args.lr)

    step = 0
    if args.resume is not None:
        newest = sorted(args.out.glob("ckpt_*.pt"))[-1:]
        for path in [Path(args.resume)] if args.resume else newest:
            step = resume(path, gpt, optimizer, world, rank)
    model = DistributedDataParallel(gpt) if world > 1 else gpt
    if rank == 0:
        size = sum(p.numel() for p in gpt.parameters())
        print(f"{size:,} parameters, {len(training):,} bytes, from step {step}", flush=True)

    started, first = time.perf_counter(), step
    while step < args.steps:
        lr = learning_rate(step, args.steps, args.lr, args.warmup)
        for group in optimizer.param_groups:
            group["lr"] = lr

        total = 0.0
        for micro in range(args.accum):
            alone = world == 1 or micro == args.accum - 1  # else the gradients are exchanged later
            with contextlib.nullcontext() if alone else model.no_sync():
                starts = torch.randint(len(training) - shape.context, (args.batch_size,))
                loss = model(*windows(training, starts, shape.context)) / args.accum
                loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1

        if rank == 0 and step % args.log_every == 0:
            ms = 1000 * (time.perf_counter() - started) / (step - first)
            print(
                f"step {step:5d}  loss {total:.4f}  norm {norm:.3f}  lr {lr:.2e}  {ms:.1f} ms",
                flush=True,
            )
        if step % args.checkpoint_every == 0 or step == args.steps:
            states = random_states(world)
            if rank == 0:
                weights, moments = gpt.state_dict(), optimizer.state_dict()
                checkpoint = {"model": weights, "optimizer": moments, "rng": states, "step": step}
                save(args.out / f"ckpt_{step:06d}.pt", checkpoint)

    if rank == 0:
        print(f"val_loss {validate(gpt, held_out, shape.context):.4f}")
    if world > 1:
        dist.barrier()  # gloo may abort a process that leaves while others are still at work
        del model  # it holds on to the group, whose threads must end before Python does
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
