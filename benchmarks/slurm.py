"""Whether a job under a real Slurm ends with a checkpoint; writes `slurm.md`.

    apt-get install slurm-wlm munge
    python benchmarks/slurm.py [--only TEXT] [--at-once 2]

As root: it starts a Slurm of its own with one node in a temporary folder, and ends it. Each row is
a job under `supervise` with `job.preempt` that Slurm ends in one of its ways, while the job trains,
warms its learning rate up, evaluates, or compiles for inputs of another shape. It counts when the
file with the step that was under way loads, was written once, and the exit code is the right one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from supervise.store import read_audit

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "slurm.md"
PATIENCE_S = 240.0
LATE_STEPS = 10  # trained behind the checkpoint until the signal arrived
REACTION_S = 0.7  # at most, from the phase to the signal

CONFIG = """\
ClusterName=one
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=localhost CPUs={cores} State=UNKNOWN
PartitionName=low Nodes=localhost Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=localhost State=UP PriorityTier=10 PreemptMode=OFF
"""
POLICY = """\
version: supervise/v1
policy: slurm
extends: nano
job: {preempt: {grace: 25s, margin: 30s}}
"""
# It tells in `phase` where it is, and stays a while in each.
JOB = """
import sys, time, torch
phase = sys.argv[1]
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
forward = torch.compile(model, dynamic=False) if phase == "compile" else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
warm = 4000 if phase == "warm-up" else 5
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
step, width = 0, 4
while step < 4000:
    if step == 10:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(), "step": step}, "ckpt.pt")
    if step >= 60 and step % 20 == 0:
        open("phase", "w").write(phase)
        if phase == "compile":
            width += 1
        if phase == "evaluation":
            with torch.no_grad():
                for _ in range(50):
                    model(torch.randn(64, 32))
                    time.sleep(0.1)
    loss = forward(torch.randn(width, 32)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    step += 1
    time.sleep(0.03)
"""
TRAINER = """
import time, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.03)
        if state.global_step >= 60:
            open("phase", "w").write("training")
sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (320, 8))]
arguments = TrainingArguments("out", per_device_train_batch_size=8, max_steps=4000, save_steps=500,
                              report_to=[], disable_tqdm=True, use_cpu=True)
Trainer(model, arguments, train_dataset=data, callbacks=[Slow()]).train()
"""
LIGHTNING = """
import time, torch, lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 8)
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def on_train_batch_end(self, outputs, batch, index):
        time.sleep(0.03)
        if self.trainer.global_step >= 60:
            open("phase", "w").write("training")
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
trainer = pl.Trainer(max_steps=400, accelerator="cpu", logger=False, enable_progress_bar=False,
                     default_root_dir="out")
trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(1280, 16)), batch_size=32))
"""
END = 'export SLURM_JOB_END_TIME=$(date -d "$(squeue -h -j $SLURM_JOB_ID -o %e)" +%s)\n'


@dataclass(frozen=True)
class Way:
    """How Slurm ends a job.

    Attributes:
        does: what people read.
        send: words of the command that ends it, "" for none; `{id}` is the job's.
        code: the exit code of `supervise`. step: started by `srun`, else it is the batch script.
        options: of sbatch. before: lines of the batch script.
    """

    does: str
    send: str
    code: int
    step: bool = True
    options: tuple[str, ...] = ()
    before: str = ""


MINUTE = ("--time=1",)
TERM = Way("scancel --signal=TERM", "scancel --signal=TERM {id}", 143)
USR1 = Way("scancel --signal=USR1", "scancel --signal=USR1 {id}", 138)
ALONE = ("--no-requeue", "--ntasks=1")  # its own handler asks for a start
OWN = replace(USR1, options=ALONE)
OWN_BATCH = Way(
    "--batch --signal=USR1, exec", "scancel --batch --signal=USR1 {id}", 0, False, ALONE
)
CANCEL = Way("scancel", "scancel {id}", 143)
BATCH = Way("scancel --batch, exec", "scancel --batch --signal=USR2 {id}", 140, step=False)
LIMIT = Way("time limit, SLURM_JOB_END_TIME", "", 75, options=MINUTE, before=END)
WARNED = Way("time limit, --signal=USR1@20", "", 138, options=(*MINUTE, "--signal=USR1@20"))
HIT = Way("time limit alone", "", 143, options=MINUTE)
HIGH = "sbatch -W -p high --exclusive -o /dev/null --wrap true"
PREEMPTED = Way("preempted by a partition", HIGH, 143, options=("--exclusive", "--no-requeue"))


@dataclass(frozen=True)
class Case:
    """One job: when Slurm ends it, and how."""

    phase: str
    way: Way
    script: str = JOB
    of: str = "own loop"


def cases() -> list[Case]:
    ways = (TERM, USR1, CANCEL, BATCH)
    found = [Case(p, way) for p in ("training", "warm-up", "evaluation", "compile") for way in ways]
    found += [Case("training", LIMIT), Case("evaluation", LIMIT), Case("training", WARNED)]
    found += [Case("training", HIT), Case("training", TERM, TRAINER, "Trainer")]
    found += [Case("training", way, LIGHTNING, "Lightning") for way in (OWN, OWN_BATCH)]
    found += [Case("training", PREEMPTED)]
    return found


# ── Slurm ─────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Run a Slurm of our own; its commands find it by `SLURM_CONF`."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    config = folder / "slurm.conf"
    ports = [free_port(), free_port()]
    config.write_text(CONFIG.format(folder=folder, ports=ports, cores=os.cpu_count()))
    os.environ["SLURM_CONF"] = str(config)
    files = ("socket", "pid-file", "log-file", "seed-file")
    munged = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munged += [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in files]
    started = []
    try:
        for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "localhost"]):
            path = shutil.which(command[0], path="/usr/sbin:/usr/bin:/sbin") or command[0]
            log = (folder / f"{command[0]}.out").open("wb")
            started.append(subprocess.Popen([path, *command[1:]], stdout=log, stderr=log))
            time.sleep(1)
        wait_for(lambda: "idle" in said("sinfo", "-h"), "the node", 60)
        yield
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(60)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def wait_for(check: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> Any:
    until = time.monotonic() + within_s
    while not (found := check()):
        assert time.monotonic() < until, f"{what} did not come within {within_s:g} s"
        time.sleep(0.1)
    return found


# ── one job ───────────────────────────────────────────────────────────────────────────────────────


def attempt(case: Case, folder: Path, seed: int) -> tuple[str, str]:
    """Return the verdict, and what there is to say about it."""
    folder.mkdir()
    try:
        number = submit(case, folder)
        wait_for(lambda: read(folder / "run" / "state.json").count('"ready"'), "a saved layout")
        (folder / "phase").unlink(missing_ok=True)
        wait_for(lambda: read(folder / "phase"), case.phase)
        time.sleep(random.Random(seed).uniform(0, REACTION_S))
        if case.way.send:
            said(*case.way.send.format(id=number).split())
        wait_for(lambda: not said("squeue", "-h", "-j", number).strip(), "the end")
        return "yes", judged(case, folder)
    except (AssertionError, OSError) as error:
        return "**no**", str(error)


def submit(case: Case, folder: Path) -> str:
    (folder / "job.py").write_text(case.script)
    (folder / "policy.yaml").write_text(POLICY)
    words = [sys.executable, "-m", "supervise", "--policy", "policy.yaml", "--run-dir", "run", "--"]
    words += [sys.executable, "job.py", case.phase]
    start = ("srun " if case.way.step else "exec ") + " ".join(words)
    script = folder / "batch.sh"
    script.write_text(f"#!/bin/bash\nexport OMP_NUM_THREADS=1\n{case.way.before}{start}\n")
    options = ("--parsable", "-D", str(folder), "-o", "out.txt", *case.way.options)
    return said("sbatch", *options, str(script)).strip()


def judged(case: Case, folder: Path) -> str:
    """Return what was written; fail where it is not what was promised."""
    records = list(read_audit(folder / "run" / "audit.log"))
    (end,) = (each["data"] for each in records if each["kind"] == "run_end")
    if case.script is LIGHTNING:  # it handles USR1 itself: ours would be a second one
        own, ours = sorted(folder.rglob("hpc_ckpt*")), sorted(folder.rglob("*supervise-*"))
        assert (len(own), ours) == (1, []), f"{len(own)} of its handler's, {len(ours)} of ours"
        return f"its own handler wrote {own[0].name}, we wrote none"
    notes = [each["data"]["details"] for each in records if each["data"].get("what") == "preempt"]
    saved = [each for each in notes if each["phase"] == "saved"]
    assert len(saved) == 1, f"{[each['phase'] for each in notes]}: {reason(notes)}"
    step = saved[0]["step"]
    code = end["exit_code"] if "exit_code" in end else end["returncode"]
    assert code == case.way.code, f"exit code {code}, not {case.way.code}"
    if case.script is TRAINER:
        state = json.loads(read(folder / "out" / f"checkpoint-{step}" / "trainer_state.json"))
        assert state["global_step"] == step, state["global_step"]
    else:
        (written,) = folder.glob("ckpt.supervise-*.pt")
        found = torch.load(written, weights_only=True)["step"]
        assert found == step, f"step {found} is in it, not {step}"
    last = json.loads(read(folder / "run" / "state.json"))["step"] + 1
    assert 0 <= last - step <= LATE_STEPS, f"step {step} of {last}"
    return f"step {step} of {last}, code {code}"


def reason(notes: list[dict[str, Any]]) -> str:
    return "; ".join(str(each.get("why") or each.get("refusal") or "") for each in notes)


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows with this text")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for what the jobs write")
    asked = parser.parse_args()
    home = asked.keep or Path(tempfile.mkdtemp(prefix="supervise-slurm-"))
    home.mkdir(exist_ok=True)
    chosen = [c for c in cases() if asked.only in f"{c.of} {c.phase} {c.way.does}"]
    alone = [c for c in chosen if c.way is PREEMPTED]
    rows: dict[int, tuple[str, str]] = {}
    with cluster(home):
        version = said("sinfo", "--version").strip()
        with ThreadPoolExecutor(asked.at_once) as pool:

            def run(number: int) -> None:
                rows[number] = attempt(chosen[number], home / f"job-{number}", number)
                print(chosen[number].phase, chosen[number].way.does, *rows[number], flush=True)

            list(pool.map(run, (n for n, c in enumerate(chosen) if c not in alone)))
        for number in (n for n, c in enumerate(chosen) if c in alone):
            run(number)
    kept = sum(rows[n][0] == "yes" for n in rows)
    lines = [
        "# Jobs that Slurm ends\n",
        "Written by `python benchmarks/slurm.py`, whose docstring says what counts.",
        f"{version}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}.\n",
        "| job | while it is in | ended by | checkpoint | what came of it |",
        "|---|---|---|---|---|",
        *(
            f"| {c.of} | {c.phase} | {c.way.does} | {' | '.join(rows[n])} |"
            for n, c in enumerate(chosen)
        ),
        f"\n{kept} of {len(chosen)} ended with their checkpoint.",
    ]
    text = re.sub(r"/\S*/(job-\d+)", r"\1", "\n".join(lines))
    if not asked.only:
        TABLE.write_text(text + "\n", encoding="utf-8")
    print(text)
    if asked.keep is None:
        shutil.rmtree(home, ignore_errors=True)
    return 0 if kept == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
