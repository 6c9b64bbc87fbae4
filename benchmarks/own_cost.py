"""What the supervisor itself costs: its share of a core beside a job, and its start-up.

    python benchmarks/own_cost.py [--seconds 60] [--runs 1] [--kinds plain experts Trainer]

The CPU share is that of the whole supervisor process with all of its threads, seen from outside by
psutil, under the policy `nano` as it is, beside jobs that train small models at a fixed rate with
the probe in them: all metrics, rules, savepoints, the journal, the status and the search for
checkpoints. It is taken behind the first SETTLE_S seconds of steps. The start-up is the time from
`supervise` to the first instruction of the job, beside that of `python -c pass`. Each number is the
least of its runs: whatever else the machine does only adds. Cold means that the files that Python
reads were dropped from the page cache, as far as the kernel agrees to it. Linux only.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

SETTLE_S = 10.0  # of steps, with the first looks at the machine and the first savepoints
RATES = (1, 160)  # steps per second
HERE = Path(__file__).resolve()
SUPERVISE = [sys.executable, "-m", "supervise"]
CLASSES, WIDTH, BATCH = 16, 16, 64


def job(kind: str, rate: int, seconds: float) -> None:
    """Train a small model at `rate` steps a second; say when the first step is done."""
    import torch

    torch.set_num_threads(1)
    began, steps = time.monotonic(), 0

    def pace() -> bool:
        nonlocal began, steps
        if not steps:
            print("trains", flush=True)
            began = time.monotonic()
        steps += 1
        time.sleep(max(0.0, began + steps / rate - time.monotonic()))
        return time.monotonic() < began + seconds

    if kind == "Trainer":
        with_trainer(pace)
        return
    model = Experts() if kind == "experts" else torch.nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    while True:
        classes = torch.randint(CLASSES, (BATCH,))
        loss = torch.nn.functional.cross_entropy(model(torch.randn(BATCH, WIDTH)), classes)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not pace():
            return


def Experts() -> Any:  # noqa: N802, a class that is made when torch is there
    """Return a mixture of four experts, of which each row goes through the best two."""
    import torch

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = torch.nn.Linear(WIDTH, 4)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, CLASSES) for _ in range(4))

        def forward(self, x: Any) -> Any:
            weights, chosen = self.router(x).softmax(-1).topk(2, -1)
            outputs = torch.stack([expert(x) for expert in self.experts], 1)
            picked = outputs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, CLASSES))
            return (weights.unsqueeze(-1) * picked).sum(1)

    return Mixture()


def with_trainer(pace: Callable[[], bool]) -> None:
    """Train a tiny GPT-2 with Hugging Face's Trainer."""
    import torch
    import transformers

    class Pace(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not pace()

    shape = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    rows = torch.randint(0, 64, (4096, 16))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=10**6,
            per_device_train_batch_size=4,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        transformers.Trainer(
            transformers.GPT2LMHeadModel(shape),
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[Pace()],
        ).train()


def cpu_share(kind: str, rate: int, seconds: float) -> float:
    """Return the supervisor's share of a core beside a job of that many steps a second."""
    with tempfile.TemporaryDirectory() as folder:
        lasts = str(SETTLE_S + seconds + 30)
        command = [sys.executable, str(HERE), "--job", kind, str(rate), lasts]
        supervisor = psutil.Popen(
            [*SUPERVISE, "-q", "--policy", "nano", "--", *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            while supervisor.stdout.readline() != "trains\n":
                if supervisor.poll() is not None:
                    raise SystemExit(f"own_cost.py: the job {kind} does not train")
            time.sleep(SETTLE_S)
            before, began = supervisor.cpu_times(), time.monotonic()
            time.sleep(seconds)
            after, took = supervisor.cpu_times(), time.monotonic() - began
        finally:
            supervisor.terminate()
            supervisor.wait()
    return float(after.user + after.system - before.user - before.system) / took


def until_job_s() -> float:
    """Return the time from the start of `supervise` until its job runs."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time_ns()
        command = [*SUPERVISE, "-q", "--policy", "nano", "--", "date", "+%s%N"]
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True)
        return (int(done.stdout) - began) / 1e9


def bare_python_s() -> float:
    """Return how long `python -c pass` takes."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.monotonic() - began


def drop_from_page_cache() -> None:
    """Let the kernel forget the files of Python, of its packages and of this project."""
    os.sync()
    import supervise

    roots = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}
    for root in (*roots, str(Path(supervise.__file__).parents[2])):
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in ("torch", ".git", "runs")]
            for name in names:
                if not name.endswith((".py", ".pyc", ".so", ".yaml", ".txt", "METADATA")):
                    continue
                try:
                    fd = os.open(os.path.join(folder, name), os.O_RDONLY)  # noqa: PTH118
                except OSError:
                    continue
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def cold(measure: Callable[[], float]) -> float:
    """Measure with the files dropped from the page cache first."""
    drop_from_page_cache()
    return measure()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=["plain", "experts", "Trainer"])
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job[0], int(args.job[1]), float(args.job[2]))
        return
    load = os.getloadavg()[0]
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f}\n")
    head = f"share of a core, {args.seconds:.0f} s"
    print(f"{head:24}" + "".join(f"{f'{rate} steps/s':>14}" for rate in RATES))
    for kind in args.kinds:
        shares = [min(cpu_share(kind, r, args.seconds) for _ in range(args.runs)) for r in RATES]
        print(f"{kind:24}" + "".join(f"{share:14.2%}" for share in shares), flush=True)
    print(f"\n{'start-up':24}{'python':>12}{'supervise':>12}{'difference':>12}")
    runs = 15 * args.runs
    until_job_s()
    for name, take in (("warm", lambda measure: measure()), ("cold", cold)):
        bare, ours = (
            min(take(measure) for _ in range(runs if name == "warm" else 3 * args.runs))
            for measure in (bare_python_s, until_job_s)
        )
        row = "".join(f"{value * 1e3:9.0f} ms" for value in (bare, ours, ours - bare))
        print(f"{name:24}{row}", flush=True)


if __name__ == "__main__":
    main()
