"""Four steps of a tiny model in the job's own interpreter, with the probe injected as in a run.

The honest way to learn what the probe can see there. Starts no job, keeps no file.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.values import Announced
from ..inputs import clock
from ..inputs.segment import Segments
from ..job import environment, shm
from .run import CAPACITY

TRIAL_S = 120  # a first import of torch from a network disk may take a minute

# Prints a line for each thing that worked: the interpreter, torch, the training.
TRIAL = """
import sys
print("%d.%d.%d" % sys.version_info[:3], flush=True)
import torch
print(torch.__version__, flush=True)
import torch.nn.functional as F
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
groups = [{"params": [p]} for p in model.parameters()]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
step = 0
while step < 4:  # a `for` over a range or a loader cannot be rewound
    rows = torch.randint(16, (2, 8))
    F.cross_entropy(model(rows).flatten(0, 1), rows.flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
print("trained", flush=True)
"""


@dataclass
class Trial:
    """What came of the four steps.

    Attributes:
        lines: of the interpreter's version, torch's version, `trained`: as many as it got to.
        error: the last thing that was said on stderr, or why the probe gave up.
        entered: whether `sitecustomize` of the probe was run.
        names: metrics that were announced; empty when none came.
        status: the probe's own, see wire.
    """

    lines: list[str] = field(default_factory=list)
    error: str = ""
    entered: bool = False
    names: tuple[str, ...] = ()
    status: dict[str, Any] = field(default_factory=dict)


def find_interpreter(argv: tuple[str, ...]) -> str:
    """Return the Python that the command names, in its words or in the program's first line."""
    for word in argv:
        if re.fullmatch(r"(python|pypy)[\d.]*t?", Path(word).name) and shutil.which(word):
            return str(shutil.which(word))
    program = shutil.which(argv[0])
    with Path(program or os.devnull).open("rb") as file:
        line = file.readline(512).decode("utf-8", "replace")
    words = [word for word in shlex.split(line[2:]) if word != "-S"] if line[:2] == "#!" else []
    if words and Path(words[0]).name == "env":
        words = words[1:]
    return str(shutil.which(words[0]) or words[0]) if words else str(shutil.which("python3"))


def attempt(interpreter: str) -> Trial:
    """Run `TRIAL` in `interpreter` with the probe injected, and read what it published."""
    run_id = f"doctor-{secrets.token_hex(3)}"
    try:
        memory = shm.make(shm.base(os.environ), run_id)
    except OSError as error:
        return Trial(error=f"no shared memory: {error.strerror}")
    with tempfile.TemporaryDirectory(prefix="supervise-doctor-") as folder:
        marks = Path(folder, "probe")
        marks.mkdir()
        config = {
            "run": run_id,
            "package": str(environment.inject_dir().parent),
            "shm": str(memory),
            "marks": str(marks),
            "slots": shm.LEAST_SLOTS,
            "capacity": CAPACITY,
            "savepoints": {"every": 1, "keep": 1, "max_bytes": 1 << 24},
        }
        path = Path(folder, "probe.json")
        path.write_text(json.dumps(config))
        try:
            trial = _train(interpreter, environment.child_environment(os.environ, path))
            _read(trial, memory, marks)
        finally:
            shm.remove(memory)
    return trial


def _train(interpreter: str, environ: dict[str, str]) -> Trial:
    trial = Trial()
    try:
        done = subprocess.run(
            [interpreter, "-c", TRIAL],
            env={**environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=TRIAL_S,
            check=False,
        )
        trial.lines = done.stdout.split()
        trial.error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        trial.error = f"no answer within {TRIAL_S} s"
    except OSError as error:
        trial.error = f"cannot be started: {error.strerror}"
    return trial


def _read(trial: Trial, memory: Path, marks: Path) -> None:
    """Add what the probe left behind."""
    segments = Segments(memory, marks, clock.monotonic_ns)
    for event in segments.poll():
        if isinstance(event, Announced):
            trial.names = event.names
    if 0 in segments.ranks:
        trial.status = segments.ranks[0].status()
    segments.close()
    trial.entered = any(marks.glob("boot.*"))
    for mark in marks.glob("off.*"):
        trial.error = mark.read_text().strip()
