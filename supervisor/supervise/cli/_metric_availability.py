"""For each standard metric: whether a job's frames will contain it, and if not, why.

The answer follows from three sources: the metrics that arrived in the probe check, what the
collectors declare, and the conditions below, which depend on the job and which no check can settle.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from supervise_probe import collectors

from ..catalog import metrics
from ..checkpoints import registry
from ..runtime import frame_enrichment, hardware
from ._probe_check import ProbeCheck

SUPERVISOR_METRICS = (
    *frame_enrichment.CROSS_RANK_METRICS,
    *hardware.METRICS,
    *registry.METRICS,
    *frame_enrichment.RUN_METRICS,
)

# Patterns of ids, the condition on the job, and whether the job of the probe check meets it.
CONDITIONS = (
    ("loss_scale overflow overflow_rate", "under a torch.amp.GradScaler", False),
    (
        "input_time dataloader_stall_frac",
        "where batches come from a DataLoader; else it is part of other_time",
        True,
    ),
    (
        "batch_fingerprint",
        "where the batch passes a DataLoader or the model's own call",
        True,
    ),
    ("batch_shard batch_offset", "where the job or its data set reports the shard", False),
    ("batch_*", "where the model is given indices of tokens", True),
    ("forward_time", "where the model is called as a torch.nn.Module", True),
    (
        "tokens_per_update",
        "where cross_entropy or nll_loss is called, or the job reports it",
        True,
    ),
    (
        "train_loss train_ppl",
        "where cross_entropy or nll_loss is called unweighted, outside torch.compile",
        True,
    ),
    ("tokens_*", "with tokens_per_update", True),
    ("comm_time*", "where the job calls torch.distributed's collectives by name", False),
    ("grad_clip_rate clip_threshold", "where the job clips by torch's functions", True),
    ("learning_rate.<i> grad_global_norm.<i> update_to_weight.<i>", "with several groups", True),
    ("grad_noise_scale gsnr", "with gradient accumulation or several ranks, and tokens", False),
    ("grad_sketch.<i>", "with several ranks, of replicated weights", False),
    ("param_digest.<i>", "with several ranks, under DistributedDataParallel", False),
    ("clip_bound", "while `clip` is active", False),
    ("lr_hold", "while `hold_rate` is in force", False),
    ("lr_rewarm", "during the re-warm after a rollback or a relaunch", False),
    ("guard_active", "where the job clips, or the policy orders guards", False),
    ("update_clip_rate", "while `update_clip` is active", False),
    ("gradients_zeroed", "while `zero_nonfinite` is armed", False),
    ("adam_rms_ratio", "with an optimizer of the Adam family", True),
    ("opt_state_finite", "with an optimizer that keeps state", True),
    ("learning_rate_expected", "once a torch scheduler has changed the rate", False),
    ("learning_rate_initial", "where a schedule keeps it in the group", False),
    ("lr_phase", "once the learning rate changes", False),
    ("epoch", "under Trainer of transformers or Lightning", False),
    (
        "val_loss train_val_gap",
        "where Trainer or Lightning evaluates, or the model in eval mode without gradients",
        False,
    ),
    ("slice_val_loss checkpoint_time", "where Trainer, Lightning or the job reports it", False),
    ("mfu", "on a device whose peak is known, or with job.peak_flops", True),
    ("gpu_mem_allocated gpu_mem_reserved gpu_alloc_retries", "on a CUDA device", False),
    ("max_attn_logit* attn_*", "where attention is computed by torch's own functions", True),
    ("residual_rms* activation_*", "where the model repeats a block", True),
    ("logz_mean", "where output logits are seen", True),
    ("moe_drop_rate", "where a router of experts has a capacity", True),
    ("moe_* router_*", "where the model has a router of experts", True),
)

REPORTED = "only where the job reports it"
WITH_CHECKPOINTS = "only where the job saves checkpoints that are found (job.checkpoints)"
# Cross-rank metrics that need a metric of each rank.
PER_RANK = {
    "param_digest_mismatch": "param_digest.<i>",
    "grad_direction_consistency": "grad_sketch.<i>",
}
# Launchers, and their options for the number of processes on a machine.
_LAUNCHERS = re.compile(r"torchrun|accelerate|deepspeed|mpirun|mpiexec|orterun|srun")
_PYTHON = re.compile(r"(python|pypy)[\d.]*t?")
_LAUNCHER_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
)
_COUNTS = re.compile(
    r"--?(nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus|ntasks|np|n)(?:=(.*))?"
)


def availability(check: ProbeCheck | None, reason: str | None, world: int | None) -> dict[str, str]:
    """Return for each metric `yes`, or when, or under which condition, or why not.

    Args:
        check: None if none was made.
        reason: why the probe cannot run, None if it can.
        world: number of ranks that the command starts; None if unknown.
    """
    if check is not None and reason is None and not check.names:
        reason = "there is no torch" if len(check.lines) == 1 else "the probe did not report"
    everything = metrics.everything()
    if check is None or reason is not None:
        return dict.fromkeys(everything, f"no: {reason or 'the command cannot be started'}")
    found = {name: _of_probe(name, check, arrived(check)) for name in metrics.known()}
    across = {1: "no: one rank", None: "only with several ranks"}.get(world, "yes: of all ranks")
    found |= dict.fromkeys(frame_enrichment.CROSS_RANK_METRICS, across)
    for together, own in PER_RANK.items():
        if world == 1 and own in found:
            found[own] = across
        found[together] = found.get(own, across)
    found |= _hardware()
    found |= dict.fromkeys(registry.METRICS, WITH_CHECKPOINTS)
    found |= {
        frame_enrichment.RESTARTS: "only once it was started again",
        frame_enrichment.ERRORS: "only once a rank or a thread ended with an error",
        frame_enrichment.LAG: "yes",
        frame_enrichment.MISSING: across,
    }
    return found | {name: REPORTED for name in everything if name not in found}


def arrived(check: ProbeCheck) -> set[str]:
    """Return the ids, or families of ids, that the probe announced."""
    specs = [(name, metrics.spec_of(name)) for name in check.names]
    return {name if spec is None else spec.id for name, spec in specs}


def _of_probe(metric: str, check: ProbeCheck, seen: set[str]) -> str:
    spec = metrics.known()[metric]
    often = f"every {spec.every} steps" if spec.every > 1 else ""
    if spec.sparsest:
        often = f"every step, up to every {spec.sparsest} where steps are short"
    condition, met = _condition(metric)
    if metric not in seen and (met or not condition):
        return f"no: {_why_absent(metric, check)}"
    if condition:
        return ", ".join(filter(None, (often, f"only {condition}")))
    return f"yes, {often}" if often else "yes"


def _condition(metric: str) -> tuple[str, bool]:
    for patterns, condition, met in CONDITIONS:
        if any(fnmatchcase(metric, pattern) for pattern in patterns.split()):
            return condition, met
    return "", False


def _why_absent(metric: str, check: ProbeCheck) -> str:
    for name, module in collectors.modules():
        if any(spec.id == metric for spec in module.METRICS):
            how = check.status.get("collectors", {}).get(name, "on")
            if how != "on":
                return f"its collector is {how}"
    return "it did not arrive in the check"


def _hardware() -> Mapping[str, str]:
    often = f"yes, every {hardware.EVERY_S:.0f} s"
    driver = hardware.driver()
    why = "no: nvidia-ml-py is not installed" if driver is None else ""
    if driver is not None:
        try:
            driver.nvmlInit()
            why = "" if driver.nvmlDeviceGetCount() else "no: no NVIDIA device"
        except driver.NVMLError:
            why = "no: no NVIDIA driver"
    found = dict.fromkeys(hardware.HOST, often) | dict.fromkeys(hardware.DEVICE, why or often)
    wait_s = hardware.FIRST * hardware.EVERY_S
    return {**found, "host_mem_growth": f"{often}, {wait_s:.0f} s after the first step"}


def world_size(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int | None:
    """Return how many ranks the command starts; None if a launcher decides."""
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    args = list(_until_script(argv))
    if not any(
        _LAUNCHERS.fullmatch(Path(each).name) or "torch.distributed" in each for each in args
    ):
        return 1
    for place, each in enumerate(args):
        match = _COUNTS.fullmatch(each)
        if match:
            count = match[2] or "".join(args[place + 1 : place + 2])
            return int(count) if count.isdigit() and not _several_nodes(args) else None
    return None


def script_of(argv: Sequence[str]) -> str | None:
    """Return the Python script that the command names, None if it is not certain.

    A shell, a container or `-c` may run any script; so may a module that is not here (`-m`).
    """
    name, args = Path(argv[0]).name, list(argv[1:])
    if _PYTHON.fullmatch(name):
        while args and args[0][:1] == "-" and args[0] not in ("-c", "-m"):
            del args[: 2 if args[0] in ("-X", "-W") else 1]
        if args[:1] != ["-m"]:
            return args[0] if args and args[0].endswith(".py") else None
        if "".join(args[1:2]) not in _LAUNCHER_MODULES:
            return _module_file("".join(args[1:2]))
        args = args[2:]
    elif name not in ("torchrun", "accelerate", "deepspeed"):
        return None
    for place, each in enumerate(args):
        if each in ("-m", "--module"):
            return _module_file("".join(args[place + 1 : place + 2]))
        if each.endswith(".py"):
            return each
    return None


def _module_file(module: str) -> str | None:
    """Return the file that `-m` runs, None if it is in none of the job's own directories."""
    path = Path(*module.split("."))
    for folder in ("", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))):
        for file in (Path(folder, path).with_suffix(".py"), Path(folder, path, "__main__.py")):
            if module and file.is_file():
                return str(file)
    return None


def _several_nodes(args: Sequence[str]) -> bool:
    return any(each.startswith(("--nnodes", "--num_machines", "--hostfile")) for each in args)


def _until_script(argv: Sequence[str]) -> Iterator[str]:
    """Yield the arguments before the job's script or module: what follows belongs to that."""
    for each, following in zip(argv, [*argv[1:], ""], strict=True):
        module = each == "-m" and "." in following and following not in _LAUNCHER_MODULES
        if each.endswith(".py") or module:
            return
        yield each
