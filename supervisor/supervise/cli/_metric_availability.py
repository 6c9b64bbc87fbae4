"""For each metric that has a name: whether a job's frames will hold it, and if not, why.

What is told follows from three things: what arrived in a trial, what the collectors say of their
own metrics, and the conditions below, which no trial settles because the job decides. A metric
that none of the three knows about is told as it was seen, never promised.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from supervise_probe import collectors

from ..catalog.inventory import metrics, standard_metrics
from ..checkpoints import notifications
from ..inputs import cross_rank_metrics, hardware, memory_growth
from ._probe_check import Trial

# What a job has or has not: patterns of ids, the condition, and whether the trial's job meets it.
CONDITIONS = (
    ("loss_scale overflow_rate", "under a torch.amp.GradScaler", False),
    ("input_time dataloader_stall_frac", "where batches come from a DataLoader", True),
    (
        "batch_fingerprint",
        "where the batch passes a DataLoader or the model's own call",
        True,
    ),
    ("batch_shard batch_offset", "where the job or its data set tells the shard", False),
    ("batch_*", "where the model is given indices of tokens", True),
    ("forward_time", "where the model is called as a torch.nn.Module", True),
    (
        "tokens_per_update",
        "where cross_entropy or nll_loss is called, or the job reports it",
        True,
    ),
    ("tokens_*", "with tokens_per_update", True),
    ("comm_time*", "where the job calls torch.distributed's collectives by name", False),
    ("grad_clip_rate clip_threshold", "where the job clips by torch's functions", True),
    ("learning_rate.<i> grad_global_norm.<i> update_to_weight.<i>", "with several groups", True),
    ("grad_noise_scale gsnr", "with gradient accumulation or several ranks, and tokens", False),
    ("grad_sketch.<i>", "with several ranks, of replicated weights", False),
    ("param_digest.<i>", "with several ranks, under DistributedDataParallel", False),
    ("clip_bound", "while `clip` is in force", False),
    ("lr_rewarm", "while a re-warm after a rollback or a relaunch rises", False),
    ("update_clip_rate", "while `update_clip` is in force", False),
    ("gradients_zeroed", "while `zero_nonfinite` is armed", False),
    ("adam_rms_ratio", "with an optimizer of Adam's kind", True),
    ("opt_state_finite", "with an optimizer that keeps state", True),
    ("lr_phase", "once the learning rate changes", False),
    ("epoch", "under Trainer of transformers or Lightning", False),
    ("*val_loss checkpoint_time", "where Trainer, Lightning or the job itself tells it", False),
    ("mfu", "on a device whose peak is known, or with job.peak_flops", True),
    ("gpu_mem_allocated gpu_mem_reserved gpu_alloc_retries", "on a CUDA device", False),
    ("max_attn_logit* attn_*", "where attention is computed by torch's own functions", True),
    ("residual_rms* activation_*", "where the model repeats a block", True),
    ("logz_mean", "where output logits are seen", True),
    ("moe_drop_rate", "where a router of experts has a capacity", True),
    ("moe_* router_*", "where the model has a router of experts", True),
)

REPORTED = "only where the job reports it"
GUARDED = "only where the job saves checkpoints that the guard finds (job.checkpoints)"
NOBODY = "no: nothing measures it yet, and the job cannot know it"
# What several ranks tell together is there when each of them has its own part of it.
PARTS = {
    "param_digest_mismatch": "param_digest.<i>",
    "grad_direction_consistency": "grad_sketch.<i>",
}
# A launcher's words for how many processes it starts on a machine.
_LAUNCHERS = re.compile(r"torchrun|accelerate|deepspeed|mpirun|mpiexec|orterun|srun")
_PYTHON = re.compile(r"(python|pypy)[\d.]*t?")
_COUNTS = re.compile(
    r"--?(nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus|ntasks|np|n)(?:=(.*))?"
)


def outlook(trial: Trial | None, reason: str | None, world: int | None) -> dict[str, str]:
    """Return for each metric `yes`, or when, or under which condition, or why not.

    Args:
        trial: what came of trying; None if nothing was tried.
        reason: why there can be no probe, None if there can.
        world: how many ranks the command starts; None if it does not tell.
    """
    if trial is not None and reason is None and not trial.names:
        reason = "there is no torch" if len(trial.lines) == 1 else "the probe did not report"
    everything = metrics.everything()
    if trial is None or reason is not None:
        return dict.fromkeys(everything, f"no: {reason or 'the command cannot be started'}")
    found = {name: _of_probe(name, trial, arrived(trial)) for name in metrics.known()}
    across = {1: "no: one rank", None: "only with several ranks"}.get(world, "yes: of all ranks")
    found |= dict.fromkeys(cross_rank_metrics.METRICS, across)
    for together, own in PARTS.items():
        if world == 1 and own in found:
            found[own] = across
        found[together] = found.get(own, across)
    found |= _hardware()
    found |= dict.fromkeys(notifications.METRICS, GUARDED)
    found |= dict.fromkeys(standard_metrics.AROUND, NOBODY)
    return found | {name: REPORTED for name in everything if name not in found}


def arrived(trial: Trial) -> set[str]:
    """Return the ids, or families of ids, of what the trial's probe announced."""
    specs = [(name, metrics.spec_of(name)) for name in trial.names]
    return {name if spec is None else spec.id for name, spec in specs}


def _of_probe(metric: str, trial: Trial, seen: set[str]) -> str:
    spec = metrics.known()[metric]
    often = f"every {spec.every} steps" if spec.every > 1 else ""
    if spec.sparsest:
        often = f"every step, up to every {spec.sparsest} where steps are short"
    condition, met = _condition(metric)
    if metric not in seen and (met or not condition):
        return f"no: {_why_absent(metric, trial)}"
    if condition:
        return ", ".join(filter(None, (often, f"only {condition}")))
    return f"yes, {often}" if often else "yes"


def _condition(metric: str) -> tuple[str, bool]:
    for patterns, condition, met in CONDITIONS:
        if any(fnmatchcase(metric, pattern) for pattern in patterns.split()):
            return condition, met
    return "", False


def _why_absent(metric: str, trial: Trial) -> str:
    for name, module in collectors.modules():
        if any(spec.id == metric for spec in module.METRICS):
            how = trial.status.get("collectors", {}).get(name, "on")
            if how != "on":
                return f"its collector is {how}"
    return "it did not arrive in the trial"


def _hardware() -> Mapping[str, str]:
    often = f"yes, every {hardware.EVERY_S:.0f} s"
    driver = hardware.driver()
    why = "no: no binding of the NVIDIA driver is installed" if driver is None else ""
    if driver is not None:
        try:
            driver.nvmlInit()
            why = "" if driver.nvmlDeviceGetCount() else "no: no NVIDIA device"
        except driver.NVMLError:
            why = "no: no NVIDIA driver"
    found = dict.fromkeys(hardware.HOST, often) | dict.fromkeys(hardware.DEVICE, why or often)
    wait_s = memory_growth.FIRST * hardware.EVERY_S
    return {**found, "host_mem_growth": f"{often}, {wait_s:.0f} s after the first step"}


def world_size(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int | None:
    """Return how many ranks the command starts, as far as it tells; None if a launcher decides."""
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    words = list(_until_script(argv))
    if not any(
        _LAUNCHERS.fullmatch(Path(word).name) or "torch.distributed" in word for word in words
    ):
        return 1
    for place, word in enumerate(words):
        match = _COUNTS.fullmatch(word)
        if match:
            count = match[2] or "".join(words[place + 1 : place + 2])
            return int(count) if count.isdigit() and not _nodes(words) else None
    return None


def script_of(argv: Sequence[str]) -> str | None:
    """Return the script that Python is to run here, where the command plainly names one.

    Behind a shell, a container or `-c` it may be anywhere: None.
    """
    words = argv[1:]
    if _PYTHON.fullmatch(Path(argv[0]).name):
        if words[:1] == ("-m",) and "torch.distributed" in "".join(words[1:2]):
            words = words[2:]  # as torchrun
        else:
            first = next((word for word in words if word in ("-c", "-m") or word[:1] != "-"), "")
            return first if first.endswith(".py") else None
    elif Path(argv[0]).name not in ("torchrun", "accelerate", "deepspeed"):
        return None
    return next((word for word in words if word.endswith(".py")), None)


def _nodes(words: Sequence[str]) -> bool:
    return any(word.startswith(("--nnodes", "--num_machines", "--hostfile")) for word in words)


def _until_script(argv: Sequence[str]) -> Iterator[str]:
    """Yield the words in front of the job's own script: what follows is its own affair."""
    for word in argv:
        if word.endswith(".py"):
            return
        yield word
