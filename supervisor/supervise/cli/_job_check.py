"""Checks of a job before it runs: its script, its interpreter, and which metrics it will have."""

from __future__ import annotations

import ast
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from supervise_probe import collectors

from .. import system
from ..catalog import metrics
from ..checkpoints import registry
from ..checkpoints.discovery import find_matches
from ..core.job_recipes import Recipe, ScriptCode, recognise_recipe
from ..core.model.events import Announced, Frame
from ..core.model.policy import Sampling
from ..runtime import environment, frame_enrichment, hardware, mechanisms, run_course
from ..runtime.launcher import CAPACITY
from ..runtime.segments import Segments

COST = "probe_self_time"
STEPS, SAMPLE_EVERY = 41, 8
TIMEOUT_S = 120  # a first import of torch from a network disk may take a minute

# Prints a line per stage that worked: interpreter, torch, training. The model has most of what a
# metric can depend on: a loader, blocks, attention, experts, micro-batches, a clip.
SCRIPT = """
import sys
print("%d.%d.%d" % sys.version_info[:3], flush=True)
import torch
print(torch.__version__, flush=True)
import torch.nn.functional as F
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.pack, self.out = 2, nn.Linear(16, 48), nn.Linear(16, 16)
    def forward(self, x):
        q, k, v = self.pack(x).view(2, 12, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(2, 12, 16))

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.top_k, self.num_experts, self.capacity_factor = 1, 4, 1.5
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    def forward(self, x):
        share, chosen = self.gate(x).softmax(-1).max(-1)
        y = sum((chosen == i).unsqueeze(-1) * one(x) for i, one in enumerate(self.experts))
        return share.unsqueeze(-1) * y

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mixture = Attention(), Experts()
    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mixture(x)

model = nn.Sequential(nn.Embedding(16, 16), nn.Sequential(Block(), Block()), nn.Linear(16, 16))
groups = [{"params": list(part.parameters())} for part in model]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
step = 0
while step < STEPS:  # a `for` over a range or a loader cannot be rewound
    for _ in range(2):
        batch = next(iter(torch.utils.data.DataLoader(torch.randint(16, (2, 12)), batch_size=2)))
        F.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
print("trained", flush=True)
""".replace("STEPS", str(STEPS))


@dataclass
class ProbeCheck:
    """The result of the steps.

    Attributes:
        lines: the interpreter's version, torch's version, `trained`: as far as the script got.
        error: the last line of stderr, or why the probe gave up.
        entered: whether `sitecustomize` of the probe ran.
        names: the announced metrics.
        cost_s: the probe's CPU time in each measured step.
        status: as the probe reports it, see wire.
    """

    lines: list[str] = field(default_factory=list)
    error: str = ""
    entered: bool = False
    names: tuple[str, ...] = ()
    cost_s: list[float] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)


def find_interpreter(argv: tuple[str, ...]) -> str:
    """Return the Python that the command names, in its arguments or in the program's first line."""
    for argument in argv:
        if re.fullmatch(r"(python|pypy)[\d.]*t?", Path(argument).name) and shutil.which(argument):
            return str(shutil.which(argument))
    program = shutil.which(argv[0])
    with Path(program or os.devnull).open("rb") as file:
        line = file.readline(512).decode("utf-8", "replace")
    parts = [part for part in shlex.split(line[2:]) if part != "-S"] if line[:2] == "#!" else []
    if parts and Path(parts[0]).name == "env":
        parts = parts[1:]
    return str(shutil.which(parts[0]) or parts[0]) if parts else str(shutil.which("python3"))


def check_probe(interpreter: str) -> ProbeCheck:
    """Run `SCRIPT` in `interpreter` with the probe injected, and read what it published."""
    run_id = f"doctor-{secrets.token_hex(3)}"
    try:
        memory = environment.make_environment(environment.shared_memory_base(os.environ), run_id)
    except OSError as error:
        return ProbeCheck(error=f"no shared memory: {error.strerror}")
    sampled = list(Sampling.__struct_fields__)
    with tempfile.TemporaryDirectory(prefix="supervise-doctor-") as folder:
        marks = Path(folder, "probe")
        marks.mkdir()
        config = {
            "run": run_id,
            "package": str(environment.inject_dir().parent),
            "shm": str(memory),
            "marks": str(marks),
            "slots": environment.LEAST_SLOTS,
            "capacity": CAPACITY,
            "savepoints": {"every": 4, "keep": 1, "max_bytes": 1 << 24},
            "sampling": {**dict.fromkeys(sampled, SAMPLE_EVERY), "share": 1.0},
            "peak_flops": 1e12,
        }
        path = Path(folder, "probe.json")
        path.write_text(json.dumps(config))
        try:
            check = _train(interpreter, environment.child_environment(os.environ, path))
            _read(check, memory, marks)
        finally:
            environment.remove_environment(memory)
    return check


def _train(interpreter: str, environ: dict[str, str]) -> ProbeCheck:
    check = ProbeCheck()
    try:
        process = system.run_tool(
            [interpreter, "-c", SCRIPT],
            within_s=TIMEOUT_S,
            env={**environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        out, error = (text.decode("utf-8", "replace") for text in (process.stdout, process.stderr))
        check.lines = out.split()
        check.error = (error.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        check.error = f"no answer within {TIMEOUT_S} s"
    except OSError as error:
        check.error = f"cannot be started: {error.strerror}"
    return check


def _read(check: ProbeCheck, memory: Path, marks: Path) -> None:
    """Add what the probe published."""
    segments = Segments(memory, marks, system.monotonic_ns)
    for event in segments.poll():
        if isinstance(event, Announced):
            check.names = event.names
        elif isinstance(event, Frame) and COST in check.names:
            cost = event.values[check.names.index(COST)]
            check.cost_s += [] if cost is None else [cost]
    if 0 in segments.ranks:
        check.status = dict(segments.ranks[0].status())
    segments.close()
    check.entered = any(marks.glob("boot.*"))
    for mark in marks.glob("off.*"):
        check.error = mark.read_text().strip()


MAX_BYTES = 2 << 20
DRIVING = ("Trainer", "Lightning", "litgpt", "torchtitan", "OLMo-core")  # their own code loops
_SAVES = re.compile(r"save(_state|_checkpoint|_pretrained|_model|_file)?")
_SAVERS = ("torch", "fabric", "accelerator", "dcp", "checkpointer", "manager", "model", "engine")


@dataclass
class ScriptFacts:
    """What is known of a job before it runs.

    Attributes:
        name: of the script's file, "" if the command names none.
        saves: lines on which a checkpoint may be saved.
        existing: how many files match the recipe's pattern already.
    """

    name: str = ""
    recipe: Recipe | None = None
    saves: list[int] = field(default_factory=list)
    existing: int = 0

    def check_resumability(self) -> tuple[bool, str]:
        """Return whether the job can be started again from one, and the sentence about it."""
        recipe = self.recipe
        if recipe is None:
            save_note = f"saved at {self.name}:{self.saves[0]}; " if self.saves else "none seen; "
            return False, f"{save_note}nothing says how the job resumes: see job.relaunch"
        if not recipe.works:
            return False, f"{recipe.name}: {recipe.note}"
        arguments = "" if recipe.resume == "library" else " ".join(recipe.args)
        itself = "from what it saves itself" if recipe.resume == "library" else "by itself"
        parts = [f"{recipe.name}: resumes {f'by {arguments}' if arguments else itself}"]
        if recipe.glob:
            parts.append(f"{recipe.glob}, {self.existing} there now")
        elif recipe.name not in DRIVING and not self.saves:
            return False, f"{parts[0]}; no save is seen in {self.name}"
        return True, "; ".join([*parts, *([recipe.note] if recipe.note else [])])


def inspect_script(script: str | None, argv: Sequence[str]) -> ScriptFacts:
    """Return what the script (None: the command names none) and the command say."""
    text = ""
    if script is not None:
        try:
            with Path(script).open("rb") as file:
                text = file.read(MAX_BYTES).decode("utf-8", "replace")
        except OSError:
            text = ""
    code = ScriptCode(text)
    recipe = recognise_recipe(code, argv)
    facts = ScriptFacts(Path(script).name if script else "", recipe)
    if recipe is not None and recipe.glob:
        facts.existing = len(find_matches([recipe.glob], Path.cwd()))
    facts.saves = sorted(call.lineno for call in code.calls if _saves(call))
    return facts


def _saves(call: ast.Call) -> bool:
    """Return whether a call saves a checkpoint, by the names in it."""
    func = call.func
    if isinstance(func, ast.Name):
        return bool(re.fullmatch(r"save(_\w+)?", func.id))
    if not (isinstance(func, ast.Attribute) and _SAVES.fullmatch(func.attr)):
        return False
    owner = ast.unparse(func.value).lower()
    return func.attr != "save" or any(owner.endswith(name) for name in _SAVERS)


SUPERVISOR_METRICS = (
    *frame_enrichment.CROSS_RANK_METRICS,
    *hardware.METRICS,
    *registry.METRICS,
    *mechanisms.METRICS,
    *metrics.CHECKPOINT,
    *metrics.ALSO_OF_CHECKPOINTS,
    *frame_enrichment.RUN_METRICS,
    *run_course.COURSE_METRICS,
)

# Patterns of ids, the condition on the job, and whether the job of the probe check meets it.
CONDITIONS = (
    ("loss_scale overflow overflow_rate", "under a torch.amp.GradScaler", False),
    (
        "input_time dataloader_stall_frac",
        "where batches come from a DataLoader; else it is part of other_time",
        True,
    ),
    ("batch_fingerprint", "where the batch passes a DataLoader or the model's own call", True),
    (
        "batch_shard batch_offset batch_source_shift",
        "where the job or its data set reports the shard",
        False,
    ),
    (
        "batch_pad_fraction batch_seq_len_*",
        "where a mask goes into the model by name, or the model names the id that pads",
        False,
    ),
    ("batch_ids_outside", "where the model has an nn.Embedding", True),
    ("batch_token_shift shuffle_block_skew", "after 80 looks at indices of tokens", False),
    ("batch_*", "where the model is given indices of tokens", True),
    ("forward_time", "where the model is called as a torch.nn.Module", True),
    ("tokens_per_update", "where cross_entropy or nll_loss is called, or the job reports it", True),
    (
        "train_loss train_ppl",
        "where cross_entropy or nll_loss is called unweighted, outside torch.compile",
        True,
    ),
    ("tokens_*", "with tokens_per_update", True),
    ("comm_time*", "where the job calls torch.distributed's collectives by name", False),
    ("grad_clip_rate clip_threshold clip_ratio", "where the job clips by torch's functions", True),
    ("clip_loss_scale", "where the job clips under a torch.amp.GradScaler", False),
    ("weights_rounded_away", "with 16-bit weights", False),
    ("batchnorm_rows", "with BatchNorm under DistributedDataParallel", False),
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


class Section(StrEnum):
    """When a metric is there; a heading."""

    ALWAYS = "metrics in every frame"
    SPARSE = "metrics in some frames"
    DEPENDS = "metrics that depend on the job"
    ABSENT = "not available"
    REPORTED = "if the job reports it: supervise_probe.report(id=number)"


class Availability(NamedTuple):
    """When a metric is there, and how often, under which condition, or why it is not."""

    section: Section
    text: str = ""

    def __str__(self) -> str:
        prefix = {Section.ALWAYS: "yes: ", Section.SPARSE: "yes, ", Section.ABSENT: "no: "}
        return f"{prefix.get(self.section, '')}{self.text}" if self.text else "yes"


def _absent(reason: str) -> Availability:
    return Availability(Section.ABSENT, reason)


ALWAYS = Availability(Section.ALWAYS)
REPORTED = Availability(Section.REPORTED, "only where the job reports it")
WITH_MECHANISMS = "only with `mechanisms` in the policy, beside the job, of attention's weights"
WITH_EVALUATION = "only with job.evaluate in the policy, beside the job, where it saves checkpoints"
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


def list_metric_availability(
    check: ProbeCheck | None, reason: str | None, world: int | None
) -> dict[str, Availability]:
    """Return for each metric when it is there.

    Args:
        check: None if none was made.
        reason: why the probe cannot run, None if it can.
        world: number of ranks that the command starts; None if unknown.
    """
    if check is not None and reason is None and not check.names:
        reason = "there is no torch" if len(check.lines) == 1 else "the probe did not report"
    everything = metrics.all_metrics()
    if check is None or reason is not None:
        return dict.fromkeys(everything, _absent(reason or "the command cannot be started"))
    availability = {
        name: _of_probe(name, check, announced_metrics(check))
        for name in metrics.measured_metrics()
    }
    several = Availability(Section.ALWAYS, "of all ranks")
    across = {
        1: _absent("one rank"),
        None: Availability(Section.DEPENDS, "only with several ranks"),
    }.get(world, several)
    availability |= dict.fromkeys(frame_enrichment.CROSS_RANK_METRICS, across)
    for together, single in PER_RANK.items():
        if world == 1 and single in availability:
            availability[single] = across
        availability[together] = availability.get(single, across)
    availability |= _hardware()
    conditions = {
        **dict.fromkeys(registry.METRICS, WITH_CHECKPOINTS),
        **dict.fromkeys(mechanisms.METRICS, WITH_MECHANISMS),
        **dict.fromkeys((*metrics.CHECKPOINT, *metrics.ALSO_OF_CHECKPOINTS), WITH_EVALUATION),
        **dict.fromkeys(run_course.SPIKE_METRICS, "only after a thousand steps"),
        frame_enrichment.RESTARTS: "only once it was started again",
        frame_enrichment.ERRORS: "only once a rank or a thread ended with an error",
        run_course.NEW: "only after 32 steps with batch_fingerprint",
        run_course.LOST: "every 128 steps",
        run_course.COMPUTE: "every 8 steps, only without an accelerator",
        run_course.SWING: "only after 12 samples of layer_weight_std.<i>",
        run_course.SLICES: "only after 9 evaluations of 3 slices or more",
        run_course.COLLAPSE: "only with a detector of the kind collapse in the policy",
        run_course.LAW: "only with job.scaling_law in the policy, or where the job reports it",
    }
    availability |= {name: Availability(Section.DEPENDS, text) for name, text in conditions.items()}
    availability |= {frame_enrichment.LAG: ALWAYS, frame_enrichment.MISSING: across}
    return availability | {name: REPORTED for name in everything if name not in availability}


def announced_metrics(check: ProbeCheck) -> set[str]:
    """Return the ids, or families of ids, that the probe announced."""
    specs = [(name, metrics.spec_of(name)) for name in check.names]
    return {name if spec is None else spec.id for name, spec in specs}


def _of_probe(metric: str, check: ProbeCheck, arrivals: set[str]) -> Availability:
    spec = metrics.measured_metrics()[metric]
    often = f"every {spec.every} steps" if spec.every > 1 else ""
    if spec.sparsest:
        often = f"every step, up to every {spec.sparsest} where steps are short"
    condition, is_fulfilled = _condition(metric)
    if metric not in arrivals and (is_fulfilled or not condition):
        return _absent(_why_absent(metric, check))
    if condition:
        text = ", ".join(filter(None, (often, f"only {condition}")))
        return Availability(Section.DEPENDS, text)
    return Availability(Section.SPARSE, often) if often else ALWAYS


def _condition(metric: str) -> tuple[str, bool]:
    for patterns, condition, is_fulfilled in CONDITIONS:
        if any(fnmatchcase(metric, pattern) for pattern in patterns.split()):
            return condition, is_fulfilled
    return "", False


def _why_absent(metric: str, check: ProbeCheck) -> str:
    for name, collector in collectors.collector_classes().items():
        if any(spec.id == metric for spec in collector.METRICS):
            state = check.status.get("collectors", {}).get(name, "on")
            if state != "on":
                return f"its collector is {state}"
    return "it did not arrive in the check"


def _hardware() -> Mapping[str, Availability]:
    often = f"every {hardware.EVERY_S:.0f} s"
    driver = hardware.nvidia_driver()
    reason = "nvidia-ml-py is not installed" if driver is None else ""
    if driver is not None:
        try:
            driver.nvmlInit()
            reason = "" if driver.nvmlDeviceGetCount() else "no NVIDIA device"
        except driver.NVMLError:
            reason = "no NVIDIA driver"
    sparse = Availability(Section.SPARSE, often)
    growth_text = f"{often}, {hardware.FIRST * hardware.EVERY_S:.0f} s after the first step"
    return {
        **dict.fromkeys(hardware.HOST, sparse),
        **dict.fromkeys(hardware.DEVICE, _absent(reason) if reason else sparse),
        "host_mem_growth": Availability(Section.SPARSE, growth_text),
    }


def world_size(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int | None:
    """Return how many ranks the command starts; None if a launcher decides."""
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    args = list(_until_script(argv))
    if not any(
        _LAUNCHERS.fullmatch(Path(argument).name) or "torch.distributed" in argument
        for argument in args
    ):
        return 1
    for index, argument in enumerate(args):
        match = _COUNTS.fullmatch(argument)
        if match:
            count = match[2] or "".join(args[index + 1 : index + 2])
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
    for index, argument in enumerate(args):
        if argument in ("-m", "--module"):
            return _module_file("".join(args[index + 1 : index + 2]))
        if argument.endswith(".py"):
            return argument
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
    return any(
        argument.startswith(("--nnodes", "--num_machines", "--hostfile")) for argument in args
    )


def _until_script(argv: Sequence[str]) -> Iterator[str]:
    """Yield the arguments before the job's script or module: what follows belongs to that."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        module = argument == "-m" and "." in following and following not in _LAUNCHER_MODULES
        if argument.endswith(".py") or module:
            return
        yield argument
