"""A job that trains the example in blocks, when told to: the thing that `overhead.py` times.

For each line `n` on stdin it runs n optimizer steps and answers with one line of JSON: per step the
wall time and the CPU time of the training thread, both in seconds. Its steps are those of
`examples/nano/train.py`. Knows nothing of `supervise`: with or without a probe is the caller's
choice.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "nano" / "train.py"
STEPS = 10_000  # of the learning-rate schedule; no run gets there


def load_example() -> ModuleType:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("nano_train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Answer blocks until stdin ends."""
    nano = load_example()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    training, _ = nano.load_text()
    shape = nano.Shape()
    model = nano.GPT(shape)
    optimizer = nano.make_optimizer(model, 2e-3)
    step = 0
    for line in sys.stdin:
        took = []
        for _ in range(int(line)):
            wall, cpu = time.perf_counter(), time.thread_time()
            for group in optimizer.param_groups:
                group["lr"] = nano.learning_rate(step, STEPS, 2e-3, 50)
            starts = torch.randint(len(training) - shape.context, (12,))
            loss = model(*nano.windows(training, starts, shape.context))
            loss.backward()
            loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            took.append((time.perf_counter() - wall, time.thread_time() - cpu))
            step += 1
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
