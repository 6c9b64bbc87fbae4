"""A job of `canary.py`: a program with a chosen initialization and a constant on its loss.

    python benchmarks/canary_job.py SCRIPT INIT SHIFT ARGUMENTS_OF_THE_SCRIPT...

INIT 0 leaves the weights as they are. With another one the elements of each weight change places,
when the optimizer is made: another initialization of the same distribution, over the same batches.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional


def shuffle(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Let the elements of each weight change places."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for weight in group["params"]:
                order = torch.randperm(weight.numel(), generator=generator)
                weight.copy_(weight.flatten()[order].view_as(weight))


def main() -> None:
    """Train."""
    script, init, shift = sys.argv.pop(1), int(sys.argv.pop(1)), float(sys.argv.pop(1))
    make, cross_entropy = torch.optim.Optimizer.__init__, functional.cross_entropy

    def made(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if init:
            shuffle(self, init)

    def shifted(*args: Any, **kwargs: Any) -> torch.Tensor:
        return cross_entropy(*args, **kwargs) + shift

    torch.optim.Optimizer.__init__, functional.cross_entropy = made, shifted
    sys.argv[0] = script
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
