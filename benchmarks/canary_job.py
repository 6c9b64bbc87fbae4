"""The job of `canary.py`: the example with a chosen initialization and a constant on its loss.

    python benchmarks/canary_job.py INIT SHIFT ARGUMENTS_OF_THE_EXAMPLE...

The batches are those of the example's `--seed` whatever INIT is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "nano"))


def main() -> None:
    """Train."""
    import train

    init, shift = int(sys.argv.pop(1)), float(sys.argv.pop(1))

    class Changed(train.GPT):
        def __init__(self, shape: train.Shape) -> None:
            with torch.random.fork_rng():
                torch.manual_seed(init)
                super().__init__(shape)

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs, targets) + shift

    train.GPT = Changed
    train.main()


if __name__ == "__main__":
    main()
