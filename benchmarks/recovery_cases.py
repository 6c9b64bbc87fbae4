"""The faults of recovery.py, and what must come of each."""

from __future__ import annotations

from dataclasses import dataclass

FAULT_STEP = 150


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        drills: as `supervise --drill` takes them.
        wants: `recovered`: the loss of the undisturbed run within 1 %, by itself or by our doing;
            `held`: stopped or held with evidence, for a person; `told`: a word and nothing
            destructive; `healthy`: nothing at all.
        ranks: processes of the job. steps: of the run. options: of the example.
    """

    name: str
    drills: tuple[str, ...]
    wants: str
    ranks: int = 1
    steps: int = 600
    options: tuple[str, ...] = ()


def _at(fault: str, step: int = FAULT_STEP) -> tuple[str, ...]:
    return (f"{fault}@{step}",)


CASES = (
    Case("healthy", (), "healthy"),
    Case("rate x30", _at("lr_spike"), "recovered"),
    Case("batch cut to 1/8", _at("batch_cut"), "told"),
    Case("random tokens", _at("bad_batch"), "recovered"),
    Case("repeated tokens", _at("repeated_tokens"), "recovered"),
    Case("shuffled labels", _at("shuffled_labels"), "recovered"),
    Case("bit of a gradient", _at("bit_flip"), "recovered"),
    Case("bit of a weight", _at("bit_flip:target=weight"), "recovered"),
    Case("second moments / 10000", _at("moments"), "recovered"),
    Case("moments lost", _at("moments:how=restart"), "recovered"),
    Case("noise on a matrix", _at("weight_noise"), "recovered"),
    Case("overflow storm", _at("overflow_storm:steps=100"), "recovered"),
    Case("NaN in a gradient", _at("nan_grad"), "recovered"),
    Case("biased attention", _at("attention_bias"), "told"),
    Case("slow input", _at("slow_input"), "recovered"),
    Case("hang", _at("hang"), "recovered"),
    Case("crash", _at("crash"), "recovered"),
    Case(
        "bad checkpoint, then a crash",
        ("bad_checkpoint@140", f"crash@{FAULT_STEP + 20}"),
        "recovered",
    ),
    Case("silent probe", _at("blackout"), "told"),
    Case("memory creep", _at("memory_creep"), "told"),
    Case("healthy, 2 ranks", (), "healthy", 2, 400),
    Case("rank 1 reads garbage", _at("bad_batch:rank=1,steps=100000"), "recovered", 2, 400),
    Case("same batch on all ranks", _at("same_batch"), "told", 2, 400),
    Case("rank 1 is slow", _at("slow_compute:rank=1,steps=100000"), "told", 2, 400),
    Case("rank 1 drifts apart", _at("weight_noise:rank=1,target=vector"), "recovered", 2, 400),
    Case("rank 1 crashes", _at("crash:rank=1"), "recovered", 2, 400),
)
