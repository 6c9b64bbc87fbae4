"""Train a tiny model for a few steps in the job's interpreter, with the probe injected as in a run.

This shows which metrics the probe can measure there. It starts no job and leaves no file.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .. import system
from ..catalog.forms.file_forms import SamplingForm
from ..core.model.events import Announced, Frame
from ..runtime import environment
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
    for each in argv:
        if re.fullmatch(r"(python|pypy)[\d.]*t?", Path(each).name) and shutil.which(each):
            return str(shutil.which(each))
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
        memory = environment.make(environment.base(os.environ), run_id)
    except OSError as error:
        return ProbeCheck(error=f"no shared memory: {error.strerror}")
    sampled = [each.name for each in fields(SamplingForm)]
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
            environment.remove(memory)
    return check


def _train(interpreter: str, environ: dict[str, str]) -> ProbeCheck:
    check = ProbeCheck()
    try:
        done = system.run_tool(
            [interpreter, "-c", SCRIPT],
            within_s=TIMEOUT_S,
            env={**environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        out, error = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
        check.lines = out.split()
        check.error = (error.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
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
        check.status = segments.ranks[0].status()
    segments.close()
    check.entered = any(marks.glob("boot.*"))
    for mark in marks.glob("off.*"):
        check.error = mark.read_text().strip()
