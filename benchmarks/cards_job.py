"""Small programs of seven kinds, each with a fault of its own at one step; for `cards.py`.

    python benchmarks/cards_job.py KIND [--fault NAME[:SIZE]] [--at STEP] [--steps N] [--out DIR]

The faults are made by the program itself: nothing in it says so. Without one, all steps before
`--at` are those of the run with it, bit by bit.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LENGTH, WIDTH = 64, 24, 48
LASTS = {"rate": 20, "bad_batch": 1, "bad_batches": 25, "heals": 3, "slow_input": 60}
Batch = tuple[Tensor, Tensor]


class Decoder(nn.Module):
    """A decoder of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 128, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places
        mask = torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """A GRU over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.gru = nn.GRU(WIDTH, 96, batch_first=True)
        self.head = nn.Linear(96, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.tokens(tokens))[0])


class Coder(nn.Module):
    """A variational autoencoder of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 16)
        )
        self.decode = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 256))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(pictures).chunk(2, dim=-1)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decode(code), mean, spread


def chain(seed: int) -> Callable[[int, torch.Generator], Batch]:
    """Return a source of token sequences of a Markov chain."""
    table = torch.softmax(
        3 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed)), -1
    )
    stream = [0]
    numbers = torch.Generator().manual_seed(seed + 1)
    draws = torch.multinomial(table, 2000, True, generator=numbers)
    for n in range(40_000):
        stream.append(int(draws[stream[-1], n % 2000]))
    tokens = torch.tensor(stream)

    def batch(rows: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(tokens) - LENGTH - 1, (rows, 1), generator=generator)
        spans = tokens[starts + torch.arange(LENGTH + 1)]
        return spans[:, :-1], spans[:, 1:]

    return batch


def pictures(rows: int, generator: torch.Generator) -> Batch:
    """Return bars (rows, 1, 16, 16) of ten angles, with noise."""
    labels = torch.randint(10, (rows,), generator=generator)
    line = torch.linspace(-1, 1, 16)
    y, x = torch.meshgrid(line, line, indexing="ij")
    angle = labels[:, None, None] * math.pi / 10
    bars = torch.exp(-((x * torch.cos(angle) + y * torch.sin(angle)) * 4).square())
    return (bars + 1.2 * torch.randn(rows, 16, 16, generator=generator))[:, None], labels


def curves(rows: int, generator: torch.Generator) -> Batch:
    """Return points (rows, 8) and a smooth function of them (rows, 1)."""
    x = torch.randn(rows, 8, generator=generator)
    return x, 0.1 * torch.sin(x).sum(1, keepdim=True)


def entropy(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1))


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def evidence(model: nn.Module, batch: Batch) -> Tensor:
    out, mean, spread = model(batch[0])
    prior = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
    return F.mse_loss(out, batch[0].flatten(1), reduction="none").sum(1).mean() + prior


@dataclass
class Kind:
    """One kind of program: its parts, and `rows` of a batch."""

    model: Callable[[], nn.Module]
    source: Callable[[], Callable[[int, torch.Generator], Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    rows: int
    clip: float = 0.0
    schedule: Callable[[int, int], float] = lambda step, steps: 1.0


def cosine(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / 30)
    return warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))


def conv() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1)]
    return nn.Sequential(*layers, nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


def dense() -> nn.Module:
    layers = [nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)]
    return nn.Sequential(*layers)


def adamw(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)


LM = Kind(Decoder, lambda: chain(1), entropy, adamw(3e-3), 16, 1.0, cosine)
KINDS = {
    "lm": LM,
    "lm_flat": Kind(Decoder, lambda: chain(1), entropy, adamw(1e-3), 16),  # no clip, no schedule
    "mlp": Kind(dense, lambda: curves, squares, adamw(2e-3), 256),
    "conv": Kind(
        conv,
        lambda: pictures,
        entropy,
        lambda model: torch.optim.SGD(model.parameters(), 0.02, momentum=0.9),
        32,
    ),
    "vae": Kind(Coder, lambda: pictures, evidence, adamw(1e-3), 64),
    "rnn": Kind(Recurrent, lambda: chain(1), entropy, adamw(4e-3), 16, 1.0),
    "ddp": LM,
}


class Fault:
    """What goes wrong, and when."""

    def __init__(self, name: str, at: int, rank: int) -> None:
        self.name, _, size = name.partition(":")
        self.size = float(size or 0.0)
        self.at, self.rank = at, rank

    def now(self, step: int, *names: str) -> bool:
        """Return whether one of these faults is there in a step."""
        return self.name in names and self.at <= step < self.at + LASTS.get(self.name, 10**9)

    def once(self, step: int, *names: str) -> bool:
        return self.name in names and step == self.at

    def input(self, step: int, batch: Batch, generator: torch.Generator) -> Batch:
        x, y = batch
        if self.now(step, "slow_input"):
            time.sleep(self.size)
        if self.once(step, "hang"):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if self.now(step, "dark"):
            x = torch.zeros_like(x)
        if self.now(step, "one_token"):
            x, y = torch.full_like(x, 7), torch.full_like(y, 7)
        if self.now(step, "bad_batch", "bad_batches", "heals"):
            own = torch.Generator().manual_seed(step)
            if x.dtype == torch.int64:
                y = torch.randint(WORDS, y.shape, generator=own)
                x = x if self.name == "heals" else torch.cat([x[:, :1], y[:, :-1]], 1)
            elif y.dtype == torch.int64:
                y = torch.randint(10, y.shape, generator=own)
            else:
                y = y + (self.size or 30.0) * torch.randn(y.shape, generator=own)
            if x.dtype != torch.int64 and self.size:
                x = x + self.size * torch.randn(x.shape, generator=own)
        if self.once(step, "nan_loss"):
            if x.dtype == torch.int64:
                y = torch.full_like(y, -100)  # no target is left
            else:
                x = x.clone()
                x.view(-1)[5] = math.nan
        return x, y

    def backward(self, step: int, model: nn.Module) -> None:
        if self.once(step, "nan_grad"):
            next(model.parameters()).grad.view(-1)[3] = math.nan  # type: ignore[union-attr]

    def rate(self, step: int) -> float:
        """Return what the rate is multiplied by."""
        if self.now(step, "rate", "rate_stays"):
            return self.size
        return self.size ** (step - self.at) if self.now(step, "creep") else 1.0

    def state(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Damage the weights or the moments behind the update before `step`."""
        with torch.no_grad():
            weight = [p for p in model.parameters() if p.dim() > 1][-1]
            if self.once(step, "bit"):
                weight.view(torch.int32).view(-1)[77] ^= 1 << 30  # of the exponent
            if self.once(step, "moments"):
                for state in optimizer.state.values():
                    state["exp_avg_sq"] /= self.size
            if self.once(step, "drift") and self.rank == 1:
                weight += 0.3 * torch.randn_like(weight)

    def end(self, step: int) -> None:
        """End the process."""
        if self.once(step, "kill") or (self.once(step, "dead_rank") and self.rank == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.once(step, "full_disk"):
            with Path("/dev/full").open("wb") as file:
                torch.save({"step": step}, file)


def scheduler(
    optimizer: torch.optim.Optimizer, fault: str, kind: Kind, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the schedule of the kind, or the healthy one that the fault is."""
    schedules = torch.optim.lr_scheduler
    if fault == "restarts":
        return schedules.CosineAnnealingWarmRestarts(optimizer, 60)
    if fault == "decays":
        return schedules.StepLR(optimizer, 60, 0.1)
    return schedules.LambdaLR(optimizer, lambda s: kind.schedule(s, steps))


def evaluate(kind: Kind, model: nn.Module, batch: Batch) -> None:
    """Evaluate for two seconds."""
    model.eval()
    with torch.no_grad():
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            kind.loss(model, batch)
    model.train()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--fault", default="none")
    parser.add_argument("--at", type=int, default=120)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pace", type=float, default=0.008, help="seconds added to each step")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def load(file: Path, fault: str, parts: dict[str, Any]) -> int:
    """Go on from a checkpoint, but for what is not restored; return its step."""
    kept = torch.load(file)
    for name, part in parts.items():
        if fault != f"resume_{name}":
            (part.set_state if name == "generator" else part.load_state_dict)(kept[name])
    return int(kept["step"])


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank = 0
    if options.kind == "ddp":
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
    kind, fault = KINDS[options.kind], Fault(options.fault, options.at, rank)
    model, batches = kind.model(), kind.source()
    trained = nn.parallel.DistributedDataParallel(model) if options.kind == "ddp" else model
    optimizer = kind.optimizer(model)
    schedule = scheduler(optimizer, fault.name, kind, options.steps)
    generator = torch.Generator().manual_seed(11 + rank)
    parts = {"model": model, "moments": optimizer, "schedule": schedule, "generator": generator}
    files = sorted(options.out.glob("*.pt")) if options.out and options.resume else []
    first = load(files[-1], fault.name, parts) if files else 0
    other = chain(5) if fault.name == "new_data" else None
    for step in range(first, options.steps):
        fault.state(step, model, optimizer)
        source = other if other is not None and step >= options.at else batches
        batch = fault.input(step, source(kind.rows, generator), generator)
        loss = kind.loss(trained, batch)
        time.sleep(options.pace)
        optimizer.zero_grad()
        loss.backward()
        if kind.clip:
            nn.utils.clip_grad_norm_(model.parameters(), kind.clip)
        fault.backward(step, model)
        factor = fault.rate(step)
        for group in optimizer.param_groups:
            group["lr"] *= factor
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] /= factor
        schedule.step()
        fault.end(step)
        if options.out and rank == 0 and (step + 1) % 40 == 0:
            options.out.mkdir(parents=True, exist_ok=True)
            state = {"step": step + 1, "generator": generator.get_state()}
            state |= {n: part.state_dict() for n, part in parts.items() if n != "generator"}
            torch.save(state, options.out / f"ck_{step + 1:05d}.pt")
        if fault.name == "evaluates" and step % 60 == 59:
            evaluate(kind, model, source(64, torch.Generator().manual_seed(step)))
        if fault.name.startswith("resume") and step == options.at and not options.resume:
            raise RuntimeError("connection closed by remote host")
    model.eval()
    with torch.no_grad():
        final = kind.loss(model, batches(512, torch.Generator().manual_seed(7)))
    print(f"final_loss {final:.5f}", flush=True)
    if options.kind == "ddp":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
