"""What the probe costs steps of 5 to 500 ms in jobs of four kinds, under `nano` as it is.

    python benchmarks/step_lengths.py [--kinds plain trainer lightning moe] [--ms 5 10 20 50 500]

One small GPT trains in a loop of its own, under Hugging Face's Trainer, under Lightning, and with
experts in place of its MLPs; the number of sequences makes the length of a step. As in
`step_job.py` the probe is on and off by turns, in pairs of random order, and `plain` has the floor
of `floor.py` in the same rounds. Own time is what the probe weighs itself, from its frames; median,
and mean with samples and savepoints. Exit code 1 when a row is above its limit: 1 % of the CPU time
of a step of 20 ms and more, one and a half floors below.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from floor import Floor
from step_job import WARM_UP, Turns, load_example

from supervise.store import RunDir, read_rows

HERE = Path(__file__).resolve()
SHARE, FLOORS, SHORT_MS = 0.01, 1.5, 20
EXPERTS, CONTEXT = 4, 64
LENGTH = 60.0  # seconds of steps of a job, at most
CPU = 0  # column of what a step took


def sizes(step_ms: int) -> tuple[int, int]:
    """Return the steps whose frames tell the probe's own time, and the rounds behind them."""
    steps = int(1e3 * LENGTH / step_ms)
    return min(400, steps // 3), min(200, steps // 12)


def make_model(kind: str, step_ms: int) -> tuple[Any, Any]:
    """Return the model, which answers with its loss, and its optimizer."""
    nano = load_example()
    small = {"layers": 1, "width": 32, "heads": 2} if step_ms < SHORT_MS else {}
    shape = nano.Shape(**small)
    model = nano.GPT(shape)
    if kind == "moe":
        for block in model.blocks:
            block.mlp = Experts(block.mlp, shape.width)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


class Experts(torch.nn.Module):
    """Four copies of an MLP, of which each token goes through the best two."""

    def __init__(self, mlp: Any, width: int) -> None:
        super().__init__()
        import copy

        self.router = torch.nn.Linear(width, EXPERTS, bias=False)
        self.experts = torch.nn.ModuleList(copy.deepcopy(mlp) for _ in range(EXPERTS))

    def forward(self, x: Any) -> Any:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        share = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, chosen, weights)
        return sum(e(x) * share[..., i : i + 1] for i, e in enumerate(self.experts))


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Windows of the example's text."""

    def __init__(self) -> None:
        self.text = load_example().load_text()[0].long()

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, number: int) -> dict[str, Any]:
        start = number * 7919 % (len(self.text) - CONTEXT - 1)
        span = self.text[start : start + CONTEXT + 1]
        return {"inputs": span[:-1], "targets": span[1:]}


def batches(rows: int) -> Callable[[], tuple[Any, Any]]:
    """Return what draws a batch of so many sequences."""
    text, offsets = Data().text, torch.arange(CONTEXT + 1)

    def draw() -> tuple[Any, Any]:
        spans = text[torch.randint(len(text) - CONTEXT - 1, (rows, 1)) + offsets]
        return spans[:, :-1], spans[:, 1:]

    return draw


def step_of(model: Any, optimizer: Any, rows: int) -> Callable[[], None]:
    """Return what makes one step of a loop."""
    draw = batches(rows)

    def step() -> None:
        loss = model(*draw())
        loss.backward()
        loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def rows_for(kind: str, step_ms: int) -> int:
    """Return with how many sequences a bare step takes so much CPU time."""
    gate = sys.modules["_supervise_probe"]._probe.gate
    gate.on, rows = False, 1
    while True:
        step, took = step_of(*make_model(kind, step_ms), rows), []
        for _ in range(8):
            began = time.thread_time()
            step()
            took.append(1e3 * (time.thread_time() - began))
        if min(took) >= step_ms:
            gate.on = True
            return rows
        rows = max(rows + 1, int(rows * min(4.0, step_ms / min(took))))


def job(kind: str, step_ms: int) -> None:
    """Train; print what each step took."""
    torch.set_num_threads(1)
    rows = rows_for(kind, step_ms)
    torch.manual_seed(0)
    model, optimizer = make_model(kind, step_ms)
    floor = Floor() if kind == "plain" else None
    if floor is not None:
        floor.install(model, optimizer)
    steady, rounds = sizes(step_ms)
    turns = Turns(rounds, floor, steady=steady)
    if kind == "trainer":
        with_trainer(model, rows, turns)
    elif kind == "lightning":
        with_lightning(model, optimizer, rows, turns)
    else:
        step = step_of(model, optimizer, rows)
        while turns.begin():
            step()
            turns.end()
    turns.answer()


def with_trainer(model: Any, rows: int, turns: Turns) -> None:
    """Train under Hugging Face's Trainer."""
    import transformers

    class Switching(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.end()
            control.should_training_stop = not turns.begin()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Any, targets: Any) -> dict[str, Any]:
            return {"loss": self.model(inputs, targets)}

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=100_000,
            per_device_train_batch_size=rows,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            remove_unused_columns=False,
            use_cpu=True,
            disable_tqdm=True,
        )
        transformers.Trainer(
            Model(), arguments, train_dataset=Data(), callbacks=[Switching()]
        ).train()


def with_lightning(model: Any, optimizer: Any, rows: int, turns: Turns) -> None:
    """Train under Lightning."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(batch["inputs"], batch["targets"])

        def configure_optimizers(self) -> Any:
            return optimizer

        def on_train_start(self) -> None:
            turns.begin()

        def on_train_batch_end(self, *_: Any) -> None:
            turns.end()
            self.trainer.should_stop = not turns.begin()

    loader = torch.utils.data.DataLoader(Data(), batch_size=rows)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=100_000, accelerator="cpu", enable_model_summary=False, **quiet
    )
    trainer.fit(Module(), loader)


def measure(kind: str, step_ms: int, folder: Path) -> bool:
    """Print a row; return whether it is within its limit."""
    run = folder / f"{kind}-{step_ms}"
    command = [sys.executable, str(HERE), "--job", kind, str(step_ms)]
    flags = ["-q", "--policy", "nano", "--run-dir", str(run)]
    done = subprocess.run(
        [sys.executable, "-m", "supervise", "run", *flags, "--", *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"step_lengths.py: {kind}, {step_ms} ms failed\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    steady, _ = sizes(step_ms)
    values = [r.values for r in read_rows(RunDir.open(run)) if WARM_UP < r.step < WARM_UP + steady]
    own = [1e6 * v["probe_self_time"] for v in values if "probe_self_time" in v]
    bare = median(each["bare"][CPU] for each in answer["rounds"])
    added = median(1e6 * (each["probe"][CPU] - each["bare"][CPU]) for each in answer["rounds"])
    floor = median(1e6 * value for value in answer["floor_own"]) if answer["floor_own"] else 0.0
    if floor:
        Limit.floor_us = floor
    limit = SHARE * 1e6 * bare if step_ms >= SHORT_MS else FLOORS * Limit.floor_us
    kept = median(own) <= limit
    print(
        f"{kind:12}{step_ms:5} ms{1e3 * bare:9.1f}{median(own):9.0f}{fmean(own):8.0f}"
        f"{median(own) / 1e6 / bare:9.2%}{limit:8.0f}{added:9.0f}"
        f"{f'{floor:.0f}' if floor else '':>8}  {'PASS' if kept else 'FAIL'}",
        flush=True,
    )
    return kept


class Limit:
    """What the floor took itself in the newest row that has one."""

    floor_us = 106.0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="*", default=["plain", "trainer", "lightning", "moe"])
    parser.add_argument("--ms", nargs="*", type=int, default=[5, 10, 20, 50, 500])
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job[0], int(args.job[1]))
        return
    load = os.getloadavg()[0]
    print(f"Python {platform.python_version()}, torch {torch.__version__}, load {load:.1f}\n")
    print(
        f"{'':20}{'bare':>9}{'own time, us':>14}{'of CPU':>12}{'limit':>8}{'added':>9}{'floor':>8}"
    )
    print(f"{'':20}{'CPU ms':>9}{'us':>9}{'mean':>8}{'':9}{'us':>8}{'CPU us':>9}{'us':>8}")
    with tempfile.TemporaryDirectory(prefix="supervise-lengths-") as folder:
        kept = [measure(k, ms, Path(folder)) for k in args.kinds for ms in args.ms]
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
