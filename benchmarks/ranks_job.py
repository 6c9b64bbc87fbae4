"""One rank of a small GPT on text, in twelve ways of spreading it, for `ranks.py`.

    torchrun --nproc-per-node 2 benchmarks/ranks_job.py SHAPE FOLDER STEPS

It knows nothing of the supervisor. The loops of the libraries are the libraries' own. Writes
FOLDER/bits.RANK, a line `step digest digest` for the weights and the moments behind each step, as
this rank holds them, and FOLDER/loss.RANK, the mean of its last `TAIL` losses.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent / "proving" / "programs"))

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, its default arguments would hold the group
from common import ByteGPT, text, warmup_cosine, windows
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

SHARDED = ("fsdp1", "fsdp2", "tensor")
LIBRARIES = ("accelerate", "Trainer", "Lightning", "Fabric")
TAIL, ROWS, LENGTH, RATE = 50, 8, 48, 2e-3


def _digest(tensors: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().numpy())
    return found.hexdigest()[:8]


class Ledger:
    """Writes down what this rank holds behind each step, and its losses."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._bits = (folder / f"bits.{rank}").open("w")
        self._step = 0
        self.losses: list[float] = []

    def stepped(self, model: Any, optimizer: Any) -> None:
        """Behind a step, with whatever happened at its end."""
        states = getattr(optimizer, "optim", optimizer).state.values()
        held = [value for state in states for value in state.values() if torch.is_tensor(value)]
        parts = (getattr(each.detach(), "_local_tensor", each.detach()) for each in held)
        weights = (getattr(p.detach(), "_local_tensor", p.detach()) for p in model.parameters())
        print(self._step, _digest(weights), _digest(parts), file=self._bits, flush=True)
        self._step += 1

    def follow(self, model: Any) -> None:
        """Look at a model whose loop is a library's: before each forward but the first.

        A step whose update is skipped is one, too.
        """
        newest: list[Any] = []
        register_optimizer_step_post_hook(lambda optimizer, *_: newest.append(optimizer))

        def before(*_: Any) -> None:
            if newest:
                newest[:-1] = []
                self.stepped(model, newest[0])

        model.register_forward_pre_hook(before)

    def end(self) -> None:
        """Write the loss and end; FSDP2 keeps gloo's threads, which may abort Python."""
        last = [loss for loss in self.losses[-TAIL:] if loss is not None]
        (self._folder / f"loss.{self._rank}").write_text(str(sum(last) / max(1, len(last))))
        self._bits.close()
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)


def spread(shape: str, model: Any) -> tuple[Any, Any]:
    """Return the model as the ranks hold it, and its optimizer."""
    adamw = torch.optim.AdamW
    if shape in ("ddp", "zero"):
        model = nn.parallel.DistributedDataParallel(model)
    elif shape == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif shape == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import parallel

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {"blocks.*.mlp.0": parallel.ColwiseParallel()}
        plan["blocks.*.mlp.2"] = parallel.RowwiseParallel()
        parallel.parallelize_module(model, mesh, plan)
    if shape == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=adamw, lr=RATE)
    return model, adamw(model.parameters(), lr=RATE)


def schedule_of(optimizer: Any, steps: int) -> Any:
    """Return a warm-up and a cosine."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: warmup_cosine(s, steps))


def loop(shape: str, ledger: Ledger, steps: int) -> None:
    """A `for` loop of the job's own."""
    # Under tensor parallelism all ranks read the same batch.
    own = torch.Generator().manual_seed(0 if shape == "tensor" else dist.get_rank())
    source = text()
    model, optimizer = spread(shape, ByteGPT())
    schedule = schedule_of(optimizer, steps)
    for _ in range(steps):
        inputs, targets = windows(source, ROWS, LENGTH, own)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        if shape == "fsdp1":
            model.clip_grad_norm_(1.0)
        elif shape != "tensor":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        ledger.stepped(model, optimizer)
        ledger.losses.append(loss.item())


class Stage(nn.Module):
    """The first or the last half of the model."""

    def __init__(self, whole: ByteGPT, first: bool) -> None:
        super().__init__()
        self.tokens, self.positions = (whole.tokens, whole.positions) if first else (None, None)
        self.block = whole.blocks[0 if first else 1]
        self.norm, self.head = (None, None) if first else (whole.norm, whole.head)

    def forward(self, x: Any) -> Any:
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        x = self.block(x)
        return x if self.head is None else self.head(self.norm(x))


def pipeline(shape: str, ledger: Ledger, steps: int) -> None:
    """Two stages that are flushed behind each step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, source = dist.get_rank(), text()
    model = Stage(ByteGPT(), rank == 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = schedule_of(optimizer, steps)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    kind = ScheduleGPipe if shape == "GPipe" else Schedule1F1B
    pipe = kind(stage, 4, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
    same = torch.Generator().manual_seed(0)
    for _ in range(steps):
        inputs, targets = windows(source, 2 * ROWS, LENGTH, same)
        losses: list[Any] = []
        if rank == 0:
            pipe.step(inputs)
        else:
            pipe.step(target=targets, losses=losses)
            ledger.losses.append(sum(part.item() for part in losses) / len(losses))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ledger.stepped(model, optimizer)


def samples(steps: int) -> TensorDataset:
    """Return enough windows for one epoch of two ranks, the same on each rank."""
    rows = steps * ROWS * int(os.environ["WORLD_SIZE"])
    return TensorDataset(*windows(text(), rows, LENGTH, torch.Generator().manual_seed(0)))


def accelerate(ledger: Ledger, steps: int) -> None:
    """The loop of accelerate's examples."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = ByteGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loader = DataLoader(samples(steps), ROWS, shuffle=True)
    ledger.follow(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    schedule = schedule_of(optimizer, steps)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        ledger.losses.append(loss.item())


def trainer(ledger: Ledger, steps: int) -> None:
    """transformers' Trainer, which owns the loop."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))
    ledger.follow(model)
    model.register_forward_hook(lambda _, args, out: ledger.losses.append(out.loss.item()))
    arguments = TrainingArguments(
        str(ledger._folder / "out"),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        learning_rate=RATE,
        warmup_steps=40,
        lr_scheduler_type="cosine",
        save_strategy="no",
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row, _ in samples(steps)]
    Trainer(model, arguments, train_dataset=data).train()


def lightning(ledger: Ledger, steps: int) -> None:
    """Lightning's `fit`, which owns the loop."""
    from lightning.pytorch import LightningModule, Trainer, seed_everything

    warnings.filterwarnings("ignore", module="lightning")
    seed_everything(0)

    class Job(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = ByteGPT()
            ledger.follow(self.model)

        def training_step(self, batch: Any, index: int) -> Any:
            inputs, targets = batch
            loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
            ledger.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
            schedule = {"scheduler": schedule_of(optimizer, steps), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    ).fit(Job(), DataLoader(samples(steps), ROWS, shuffle=True))


def fabric(ledger: Ledger, steps: int) -> None:
    """Lightning Fabric around a loop of the job's own."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    model = ByteGPT()
    ledger.follow(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(samples(steps), ROWS, shuffle=True))
    schedule = schedule_of(optimizer, steps)
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ledger.losses.append(loss.item())


def main() -> None:
    """Train as one of the ranks."""
    shape, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ledger = Ledger(folder, int(os.environ["RANK"]))
    if shape not in LIBRARIES:
        dist.init_process_group("gloo")
    if shape in ("GPipe", "1F1B"):
        pipeline(shape, ledger, steps)
    elif shape in LIBRARIES:
        owns = {"accelerate": accelerate, "Trainer": trainer, "Lightning": lightning}
        owns.get(shape, fabric)(ledger, steps)
    else:
        loop(shape, ledger, steps)
    ledger.end()


if __name__ == "__main__":
    main()
