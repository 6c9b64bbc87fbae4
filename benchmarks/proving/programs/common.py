"""What the programs share: their arguments, their data, one small transformer.

Data is made here or is the source code of Python's standard library, which every machine has.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


def arguments(steps: int, **more: object) -> argparse.Namespace:
    """Parse `--steps --seed --out --step-ms` and `more` with their defaults; seed torch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="where checkpoints go")
    parser.add_argument("--step-ms", type=float, default=0.0, help="least wall time of a step")
    for name, default in more.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    if options.step_ms:
        pad_steps(options.step_ms / 1e3)
    return options


def pad_steps(step_s: float) -> None:
    """Sleep at the end of each step until it took so long; of several optimizers in the first."""
    leading: torch.optim.Optimizer | None = None
    ended = time.monotonic()

    def pad(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal leading, ended
        leading = leading or optimizer
        if optimizer is leading:
            time.sleep(max(0.0, ended + step_s - time.monotonic()))
            ended = time.monotonic()

    register_optimizer_step_post_hook(pad)


def text() -> torch.Tensor:
    """Return the bytes of 60 modules of the standard library, shape (bytes,), int64."""
    folder = Path(sysconfig.get_path("stdlib"))
    joined = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def windows(
    source: torch.Tensor, rows: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and next-byte targets, each (rows, length)."""
    starts = torch.randint(len(source) - length - 1, (rows,), generator=generator)
    spans = source[starts[:, None] + torch.arange(length + 1)]
    return spans[:, :-1], spans[:, 1:]


def warmup_cosine(step: int, steps: int, warmup: int = 40) -> float:
    """Return the factor of the peak rate: linear warm-up, then a cosine to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block; `mlp` may be another module of the same width."""

    def __init__(self, width: int, heads: int, causal: bool = True, mlp: nn.Module | None = None):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp = mlp or nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ByteGPT(nn.Module):
    """A byte-level decoder; returns logits (rows, length, 256)."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, context: int = 128):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.05)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def images(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy pictures (rows, 1, 16, 16) of ten classes: bars, rings, corners, by place."""
    labels = torch.randint(10, (rows,), generator=generator)
    grid = torch.linspace(-1, 1, 16)
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    shift = 0.3 * torch.randn(rows, 2, 1, 1, generator=generator)
    dx, dy = x - shift[:, 0], y - shift[:, 1]
    angle = labels[:, None, None] * math.pi / 5
    along = dx * torch.cos(angle) + dy * torch.sin(angle)
    radius = (dx.square() + dy.square()).sqrt()
    picture = torch.exp(-(along * (3 + labels[:, None, None] % 3)).square()) * (radius < 0.9)
    picture = picture + 0.3 * torch.randn(rows, 16, 16, generator=generator)
    return picture[:, None], labels


def save(options: argparse.Namespace, step: int, **state: object) -> None:
    """Write a checkpoint every 100 steps where `--out` is given."""
    if options.out is not None and step and step % 100 == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        torch.save({"step": step, **state}, options.out / f"ckpt-{step}.pt")
