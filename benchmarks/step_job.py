"""Jobs that alternate between bare and watched steps in one process; `overhead.py` times them.

    supervise run -- python benchmarks/step_job.py KIND [--rounds 400] [--sequences 12] [--light]
                                                        [--floor] [--baton IN OUT]

First come WARM_UP and STEADY steps with the probe on. Then, in each round, IN_A_ROW steps are made
in each way, in random order: with the probe switched off ("bare"), switched on ("probe"), and with
`--floor` bare but for the barest probe there can be (`floor.py`). The last one counts: after a step
that it did not see, the probe has more to do. The last line on stdout is JSON: `rounds`, each
`{way: [CPU, wall]}` in seconds, CPU of the training thread; and `floor_own`, what the floor took
itself in each of its steps.

A probe that is off by its own switch makes no frame and counts no step; its hooks return at once,
which costs some microseconds in every way alike. Several ranks draw the same order.

Kinds: `nano` has the steps of `examples/nano/train.py`; `bf16` has its forward under autocast;
`compile` compiles the model; `ddp` is one of two ranks under torchrun, of which rank 0 answers;
`trainer` is a tiny GPT-2 under Hugging Face's Trainer. `--light` leaves out the norm of the update.
With `--baton` two jobs train by turns, LEG steps each: a byte from the FIFO IN begins them, and one
to OUT lets the other job begin.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.nn  # imported later, its default arguments would hold the group for good
from floor import Floor

EXAMPLE = Path(__file__).parents[1] / "examples" / "nano" / "train.py"
STEPS = 100_000  # of the learning-rate schedule; no run gets there
RISEN = 50  # of them lie behind: while a rate rises, the policy asks for denser samples
WARM_UP = 100  # steps; collectors that cost too much or cannot work are off after these
STEADY = 400  # steps whose frames tell the probe's own time; one in four does
IN_A_ROW = 2  # steps
SEQUENCES = 12  # of the example
LEG = 10  # steps


def load_example() -> ModuleType:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("nano_train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def nano_step(
    kind: str, sequences: int = SEQUENCES, floor: Floor | None = None
) -> Callable[[int], None]:
    """Return what trains the example by one step; `floor` is put around its calls."""
    nano = load_example()
    training, _ = nano.load_text()
    shape = nano.Shape()
    model = nano.GPT(shape)
    optimizer = nano.make_optimizer(model, 2e-3)
    if floor is not None:
        floor.install(model, optimizer)
    call: Any = model
    if kind == "compile":
        call = torch.compile(model, backend="aot_eager")
    elif kind == "ddp":
        call = torch.nn.parallel.DistributedDataParallel(model)

    def step(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = nano.learning_rate(number + RISEN, STEPS, 2e-3, 50)
        starts = torch.randint(len(training) - shape.context, (sequences,))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "bf16"):
            loss = call(*nano.windows(training, starts, shape.context))
        loss.backward()
        loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def enough_sequences(seconds: float) -> int:
    """Return with how many sequences the quickest of some bare steps takes so much CPU time."""
    torch.set_num_threads(1)
    sequences = SEQUENCES
    while True:
        step, took = nano_step("nano", sequences), []
        for number in range(20):
            began = time.thread_time()
            step(number)
            took.append(time.thread_time() - began)
        if min(took) >= seconds:
            return sequences
        sequences = math.ceil(sequences * max(1.05, seconds / min(took)))


class Turns:
    """Switches the probe and the floor for each step, and takes the time of it."""

    def __init__(
        self, rounds: int, floor: Floor | None, baton: Sequence[str] = (), steady: int = STEADY
    ) -> None:
        """`steady`: steps whose frames tell the probe's own time, behind WARM_UP others."""
        self._baton = [os.open(path, os.O_RDWR) for path in baton]
        self._number = 0
        probe = sys.modules["_supervise_probe"]._probe
        self._gate = getattr(probe, "gate", probe)  # the probe itself in older trees
        self._floor = floor
        ways = ["bare", "probe"] if floor is None else ["bare", "probe", "floor"]
        draw = random.Random(0)  # all ranks draw the same
        order = [way for _ in range(rounds) for way in draw.sample(ways, len(ways))]
        turns = [way for way in order for _ in range(IN_A_ROW)]
        self._first = WARM_UP + steady
        self._left = iter([*["probe"] * self._first, *turns])
        self._took: list[tuple[str, float, float]] = []
        self._each = len(ways)

    def begin(self) -> bool:
        """The next step begins here; false: there is none."""
        if self._baton and self._number % LEG == 0:
            if self._number:
                os.write(self._baton[1], b".")
            os.read(self._baton[0], 1)
        self._number += 1
        way = next(self._left, None)
        self._gate.on = way in ("probe", None)
        if self._floor is not None:
            self._floor.on = way == "floor"
        self._way = str(way)
        self._began = time.thread_time(), time.perf_counter()
        return way is not None

    def end(self) -> None:
        """The step ends here."""
        cpu, wall = time.thread_time(), time.perf_counter()
        self._took.append((self._way, cpu - self._began[0], wall - self._began[1]))
        if self._way == "probe" and not self._gate.on:
            raise SystemExit("step_job.py: the probe switched itself off")

    def answer(self) -> None:
        """Print the times of the rounds."""
        took, each = self._took[self._first :][IN_A_ROW - 1 :: IN_A_ROW], self._each
        rounds = [
            {way: times for way, *times in took[at : at + each]} for at in range(0, len(took), each)
        ]
        own = self._floor.own if self._floor is not None else []
        print(json.dumps({"rounds": rounds, "floor_own": own}), flush=True)


def loop(kind: str, sequences: int, turns: Turns, floor: Floor | None) -> None:
    """Train with a loop of our own."""
    if kind == "ddp":
        torch.distributed.init_process_group("gloo")
    step, number = nano_step(kind, sequences, floor), 0
    while turns.begin():
        step(number)
        turns.end()
        number += 1
    if kind == "ddp":
        torch.distributed.barrier()  # gloo may abort a process that leaves while others are at work
        del step  # the model in it holds on to the group, whose threads must end before Python does
        torch.distributed.destroy_process_group()


def trainer(turns: Turns) -> None:
    """Train with a Trainer. A step is all from one end to the next, the loading too."""
    import transformers

    class Switching(transformers.TrainerCallback):  # type: ignore[misc]
        """Begins and ends the turns."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.end()
            control.should_training_stop = not turns.begin()

    rows = torch.randint(0, 256, (4096, 96))
    data = [{"input_ids": row, "labels": row} for row in rows]
    shape = transformers.GPT2Config(
        vocab_size=256,
        n_positions=96,
        n_embd=128,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=12,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        model = transformers.GPT2LMHeadModel(shape)
        transformers.Trainer(
            model=model, args=settings, train_dataset=data, callbacks=[Switching()]
        ).train()


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=["nano", "bf16", "compile", "ddp", "trainer"])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="per step; not trainer")
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--floor", action="store_true", help="nano only")
    parser.add_argument("--baton", nargs=2, default=(), metavar=("IN", "OUT"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.light:
        sys.modules["_supervise_probe"]._probe.guard.part("updates").on = False
    floor = Floor() if args.floor else None
    rank = os.environ.get("RANK", "0")
    turns = Turns(args.rounds, floor, args.baton if rank == "0" else ())
    if args.kind == "trainer":
        trainer(turns)
    else:
        loop(args.kind, args.sequences, turns, floor)
    if rank == "0":
        turns.answer()


if __name__ == "__main__":
    main()
