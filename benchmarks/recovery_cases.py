"""The faults of recovery.py, and the promised result of each."""

from __future__ import annotations

from dataclasses import dataclass

FAULT_STEP = 150


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        drills: as `supervise --drill` takes them.
        wants: `recovered`: the loss of the undisturbed run within 1 %, by itself or by our doing;
            `held`: held with evidence for a person and nothing destructive, or stopped with it;
            `told`: a word and nothing destructive; `told, evidence`: this and a bundle, for what
            a hold would only make worse; `healthy`: nothing at all.
        by: the rule whose word counts; empty: any.
        ranks: processes of the job. steps: of the run. options: of the example.
        slows: the fault is one of time. In all others what the rules of `throughput` say is no word
            of the fault: on a machine that does other things too they speak of those. Nor is what
            is said of the memory and the disk of all of the machine.
    """

    name: str
    drills: tuple[str, ...]
    wants: str
    ranks: int = 1
    steps: int = 600
    options: tuple[str, ...] = ()
    slows: bool = False
    by: str = ""


def _at(fault: str, step: int = FAULT_STEP) -> tuple[str, ...]:
    return (f"{fault}@{step}",)


CASES = (
    Case("healthy", (), "healthy"),
    Case("rate x30", _at("lr_spike"), "recovered"),
    Case("batch cut to 1/8", _at("batch_cut"), "held", by="data.smaller"),
    Case("one batch of random tokens", _at("bad_batch:steps=1"), "recovered"),
    Case("random tokens", _at("bad_batch"), "recovered"),
    Case("repeated tokens", _at("repeated_tokens"), "recovered"),
    Case("shuffled labels", _at("shuffled_labels"), "recovered"),
    Case("bit of a gradient", _at("bit_flip"), "recovered"),
    Case("bit of a weight", _at("bit_flip:target=weight"), "recovered"),
    Case("second moments / 10000", _at("moments"), "recovered"),
    Case("moments lost", _at("moments:how=restart"), "recovered"),
    Case("noise on a matrix", _at("weight_noise:std=0.5"), "recovered"),
    Case("overflow storm", _at("overflow_storm:steps=100"), "recovered"),
    Case("NaN in a gradient", _at("nan_grad"), "recovered"),
    Case("biased attention", _at("attention_bias:bits=32"), "held", by="attention.growth"),
    Case("slow input", _at("slow_input"), "recovered", slows=True),
    Case("hang", _at("hang"), "recovered", slows=True),
    Case("crash", _at("crash"), "recovered"),
    Case(
        "bad checkpoint, then a crash",
        ("bad_checkpoint@140", f"crash@{FAULT_STEP + 20}"),
        "recovered",
    ),
    Case("silent probe", _at("blackout"), "told"),
    # The first report takes 24 samples of the memory, one in 2 s: 600 steps may be too few.
    # 4 MiB a step are 30 GB/h even with steps of half a second: 24 GB last less than two hours.
    # It is not held: the run is intact, and a hold would block the repair of later faults.
    Case("healthy, 1500 steps", (), "healthy", steps=1500),
    Case(
        "memory creep",
        _at("memory_creep:megabytes=4,steps=100000"),
        "told, evidence",
        steps=1500,
        by="hardware.host_creep",
    ),
    Case("healthy, 2 ranks", (), "healthy", 2, 400),
    Case("healthy, 2 ranks, 600 steps", (), "healthy", 2),
    # The rate recovers over 50 steps: of 400 that is an eighth, and the loss shows it.
    Case("rank 1 reads garbage", _at("bad_batch:rank=1,steps=100000"), "recovered", 2),
    Case("same batch on all ranks", _at("same_batch"), "held", 2, 400, by="ranks.duplicated"),
    Case("rank 1 is slow", _at("slow_compute:rank=1,steps=100000"), "told", 2, 400, slows=True),
    Case(
        "rank 1 drifts apart", _at("weight_noise:rank=1,target=vector,std=0.5"), "recovered", 2, 400
    ),
    Case("rank 1 crashes", _at("crash:rank=1"), "recovered", 2, 400),
)
