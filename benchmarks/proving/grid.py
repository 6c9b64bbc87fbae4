"""What is recorded: programs x faults x seeds, and healthy runs.

A fault is a drill of the probe, at one row of the run that the seed chooses. Whether it did harm is
not written here: it is to be measured against the undisturbed run of the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

TOKENS = ("random_batch", "random_batches", "repeated_batches", "shuffled_batches")
BATCHES = ("batch_cut", "shuffled_batches")  # need targets that are inputs of the model
MOMENTS = ("variance_lost", "moments_lost")
ATTENTION = ("biased_attention",)
ONLY = {"sharp_router": ("moe_gpt",)}  # the programs that have what it acts on
HEALTHY = "healthy"

# name -> drill and its parameters; without a size it has its default one
FAULTS: dict[str, str] = {
    "rate_x3": "lr_spike:factor=3,steps=20",
    "rate_x10": "lr_spike:factor=10,steps=20",
    "rate_x30": "lr_spike",
    "rate_x10_for_good": "lr_spike:factor=10,steps=100000",
    "random_batch": "bad_batch:steps=1",
    "random_batches": "bad_batch:steps=30",
    "repeated_batches": "repeated_tokens:steps=30",
    "shuffled_batches": "shuffled_labels:steps=30",
    "variance_lost": "moments",
    "moments_lost": "moments:how=zero",
    "weight_bit": "bit_flip:target=weight",
    "weight_noise": "weight_noise",
    "nan_gradient": "nan_grad",
    "overflow_storm": "overflow_storm:steps=60",
    "batch_cut": "batch_cut",
    "gradient_exponent": "bit_flip",
    "biased_attention": "attention_bias",
    "sharp_router": "router",
    "slow_compute": "slow_compute:steps=20",
    "slow_input": "slow_input:steps=20",
    # Harmless twins: to be left alone.
    "rate_x1.2": "lr_spike:factor=1.2,steps=20",
    "gradient_bit": "bit_flip:target=grad,bit=12",
}
HARMLESS = ("rate_x1.2", "gradient_bit")
# Drills that replace the batches of their steps, and that change nothing but the rate.
DATA_DRILLS = ("bad_batch", "repeated_tokens", "shuffled_labels")
RATE_DRILLS = ("lr_spike",)


@dataclass(frozen=True)
class Program:
    """One training script.

    Attributes:
        kind: the number of the kind of job.
        steps: length of a recorded run, optimizer steps.
        ranks: above 1 it runs under torchrun.
        without: faults that cannot act on it, with no tokens, moments or scaler to act on.
        healthy_only: its losses say nothing about harm.
        kept_aside: opened only before a release, so that nothing is tuned on it.
    """

    name: str
    kind: int
    steps: int
    ranks: int = 1
    without: tuple[str, ...] = ()
    healthy_only: bool = False
    kept_aside: bool = False

    def faults(self) -> list[str]:
        """Return the faults that are recorded of it."""
        if self.healthy_only:
            return []
        named = (name for name in FAULTS if self.name in ONLY.get(name, (self.name,)))
        return [name for name in named if name not in self.without]


PROGRAMS = [
    Program("byte_gpt", 1, 400, without=BATCHES),
    Program("byte_gpt_noisy", 2, 800, without=BATCHES),
    Program("lstm_sgd", 3, 600, without=(*BATCHES, *MOMENTS, *ATTENTION)),
    Program("moe_gpt", 4, 500, without=BATCHES),
    Program("vit", 5, 500, without=(*TOKENS, "batch_cut")),
    Program("cnn_batchnorm", 6, 600, without=(*TOKENS, *MOMENTS, *ATTENTION, "batch_cut")),
    Program("memorize", 7, 600, without=BATCHES),
    Program("preference", 8, 400, without=(*BATCHES, *MOMENTS)),
    Program("gan", 9, 500, healthy_only=True),
    Program("ppo", 10, 480, healthy_only=True),
    Program("accumulate_amp", 11, 300, without=BATCHES),
    Program("muon", 12, 400, without=(*BATCHES, *MOMENTS)),
    Program("hf_trainer", 13, 400, without=ATTENTION),
    Program("lightning_fit", 13, 400, without=BATCHES),
    Program("ddp", 14, 300, ranks=2, without=BATCHES),
    Program("diffusion", 15, 400, without=TOKENS, kept_aside=True),
    Program("masked_seq2seq", 16, 450, kept_aside=True),
    Program("curriculum", 17, 600, kept_aside=True),
]


@dataclass(frozen=True)
class Cell:
    """One run to record. `row`: the step at which the fault begins, -1 of a healthy run."""

    program: Program
    fault: str
    seed: int
    row: int

    @property
    def name(self) -> str:
        """The name of its recording."""
        return f"{self.fault}-{self.seed}"


def cells(program: Program, seeds: int, healthy_seeds: int) -> Iterator[Cell]:
    """Yield the runs of one program; the undisturbed ones first."""
    for seed in range(max(seeds, healthy_seeds)):
        yield Cell(program, HEALTHY, seed, -1)
    for fault in program.faults():
        for seed in range(seeds):
            row = random.Random(f"{program.name} {fault} {seed}").choice(
                [60, program.steps * 2 // 5, program.steps * 3 // 5]
            )
            yield Cell(program, fault, seed, row)
