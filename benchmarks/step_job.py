"""Jobs that train in blocks, when told to: the things that `overhead.py` times.

    python benchmarks/step_job.py KIND

For each line `n` on stdin it runs n optimizer steps and answers with one line of JSON: per step the
wall time and the CPU time of the training thread, both in seconds. Kinds: `nano` has the steps of
`examples/nano/train.py`; `bf16` has its forward under autocast; `compile` compiles the model;
`ddp` is one of two ranks under torchrun, of which rank 0 reads and answers; `trainer` is a tiny
GPT-2 under Hugging Face's Trainer. With or without a probe is the caller's choice; `--light` asks a
probe that is there to leave out the norm of the update.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "nano" / "train.py"
STEPS = 100_000  # of the learning-rate schedule; no run gets there


def load_example() -> ModuleType:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("nano_train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def nano_step(kind: str) -> Callable[[int], None]:
    """Return what trains the example by one step."""
    nano = load_example()
    training, _ = nano.load_text()
    shape = nano.Shape()
    model = nano.GPT(shape)
    optimizer = nano.make_optimizer(model, 2e-3)
    call: Any = model
    if kind == "compile":
        call = torch.compile(model, backend="aot_eager")
    elif kind == "ddp":
        call = torch.nn.parallel.DistributedDataParallel(model)

    def step(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = nano.learning_rate(number, STEPS, 2e-3, 50)
        starts = torch.randint(len(training) - shape.context, (12,))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "bf16"):
            loss = call(*nano.windows(training, starts, shape.context))
        loss.backward()
        loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def orders(ranks: bool) -> Iterator[int]:
    """Yield the numbers on stdin; with several ranks all of them get what rank 0 reads."""
    if not ranks:
        yield from map(int, sys.stdin)
        return
    while True:
        line = sys.stdin.readline() if torch.distributed.get_rank() == 0 else ""
        order = torch.tensor([int(line or -1)])
        torch.distributed.broadcast(order, 0)
        if order.item() < 0:
            return
        yield int(order.item())


def loop(kind: str) -> None:
    """Answer blocks until stdin ends, with a loop of our own."""
    ranks = kind == "ddp"
    if ranks:
        torch.distributed.init_process_group("gloo")
    step, number = nano_step(kind), 0
    for count in orders(ranks):
        took = []
        for _ in range(count):
            wall, cpu = time.perf_counter(), time.thread_time()
            step(number)
            took.append((time.perf_counter() - wall, time.thread_time() - cpu))
            number += 1
        if not ranks or torch.distributed.get_rank() == 0:
            print(json.dumps(took), flush=True)
    if ranks:
        torch.distributed.destroy_process_group()


def trainer() -> None:
    """Answer blocks until stdin ends, from inside a Trainer."""
    import transformers

    class Blocks(transformers.TrainerCallback):  # type: ignore[misc]
        """Waits for an order where a block begins, and answers where it ends."""

        def __init__(self) -> None:
            self.left = 0
            self.took: list[tuple[float, float]] = []
            self.began = 0.0, 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not self.left:
                self.left = int(sys.stdin.readline() or 0)
            self.began = time.perf_counter(), time.thread_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            wall, cpu = self.began
            self.took.append((time.perf_counter() - wall, time.thread_time() - cpu))
            self.left -= 1
            if self.left < 0:
                control.should_training_stop = True
            elif not self.left:
                print(json.dumps(self.took), flush=True)
                self.took.clear()

    rows = torch.randint(0, 256, (4096, 96))
    data = [{"input_ids": row, "labels": row} for row in rows]
    shape = transformers.GPT2Config(
        vocab_size=256, n_positions=96, n_embd=128, n_layer=3, n_head=4, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=12, report_to=[],
            save_strategy="no", logging_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(shape)
        transformers.Trainer(
            model=model, args=settings, train_dataset=data, callbacks=[Blocks()]
        ).train()


def main() -> None:
    """Train as the command line says."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "--light" in sys.argv:
        probe = getattr(sys.modules.get("_supervise_probe"), "_probe", None)
        if probe is not None:
            probe.guard.part("updates").on = False
    if sys.argv[1] == "trainer":
        trainer()
    else:
        loop(sys.argv[1])


if __name__ == "__main__":
    main()
