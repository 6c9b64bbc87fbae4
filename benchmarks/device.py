"""What the probe does on an accelerator, in at most 8 minutes, as one table.

    python benchmarks/device.py [--device cuda] [--quick]

Jobs of one small GPT train under `supervise` with the policy `nano` as it is:

- overhead: steps of about 10, 50 and 500 ms, in blocks of 20 with the probe on and off by turns,
  the device waited for behind each block: the wall time of a step, and the probe's own CPU time;
- synchronisation: the calls by which the host waits for the device, in 20 steps with the probe and
  in 20 without it, as torch's profiler counts them; the loop itself makes none;
- rollback: weights and moments behind a rollback, by their bytes, against those of earlier steps;
- BF16: the drill `attention_bias` under autocast, and how many steps after its start a rule fires.

`--device cpu --quick` goes the same way with tiny sizes: that says whether this script works, and
nothing about a device. Exit code 1 when a part does not keep its promise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from step_job import load_example

from supervise.report import read_records
from supervise.store import RunDir, read_rows

HERE = Path(__file__).resolve()
SUPERVISE = [sys.executable, "-m", "supervise"]
CONTEXT = 64  # bytes of a sequence
SHARE, LONGER = 0.01, 1.02  # of a step's time: own CPU time; wall time, which is noisier
WAITS = "Synchronize"  # in the names of calls by which the host waits for a device


class Sizes(NamedTuple):
    """How much is done.

    Attributes:
        steps_ms: of the parts on overhead. blocks: of each way. rollback, fault: steps.
        block, warm_up: steps. rows: sequences of a step, of the first try and of the other parts.
    """

    steps_ms: tuple[int, ...] = (10, 50, 500)
    blocks: tuple[int, ...] = (30, 12, 3)
    rollback: int = 400
    fault: int = 600
    block: int = 20
    warm_up: int = 100
    rows: int = 16


QUICK = Sizes((0,), (2,), 60, 60, block=4, warm_up=20, rows=2)


class Loop:
    """The example's GPT on a device, which trains on random windows of its text."""

    def __init__(self, device: str, rows: int, bf16: bool = False) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        nano = load_example()

        class Model(nano.GPT):  # type: ignore[misc, name-defined]
            def forward(self, inputs: Any, targets: Any) -> Any:
                x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
                for block in self.blocks:
                    x = block(x)
                logits = self.head(self.norm(x))
                return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        self.text = nano.load_text()[0].to(device)
        self.model = Model(nano.Shape()).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.device, self.rows, self.bf16 = device, rows, bf16
        self.offsets = torch.arange(CONTEXT + 1, device=device)

    def step(self) -> None:
        """Make one step; the host waits for nothing."""
        starts = torch.randint(len(self.text) - CONTEXT - 1, (self.rows, 1), device=self.device)
        spans = self.text[starts + self.offsets].long()
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.bf16):
            loss = self.model(spans[:, :-1], spans[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def steps_s(self, steps: int) -> float:
        """Return the wall time of each of so many steps."""
        self.wait()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait()
        return (time.perf_counter() - began) / steps

    def digest(self) -> str:
        """Return a hash of weights and moments."""
        states = self.optimizer.state.values()
        held = [*self.model.state_dict().values(), *(v for s in states for v in s.values())]
        checksum = hashlib.sha256()
        for tensor in held:
            flat = tensor.detach().cpu().contiguous().view(-1)
            checksum.update(flat.view(torch.uint8).numpy().tobytes())
        return checksum.hexdigest()[:16]


# ── inside the jobs ───────────────────────────────────────────────────────────────────────────────


def gate() -> Any:
    """Return what switches the probe of this process on and off."""
    return sys.modules["_supervise_probe"]._probe.gate


def rows_for(device: str, step_ms: int, sizes: Sizes) -> int:
    """Return how many sequences a step of so many milliseconds has, at least."""
    rows = sizes.rows
    while True:
        loop = Loop(device, rows)
        took_ms = 1e3 * min(loop.steps_s(sizes.block // 2) for _ in range(2))
        if took_ms >= step_ms or rows >= 1 << 16:
            return rows
        rows = max(rows + 1, int(rows * min(8.0, 1.1 * step_ms / took_ms)))


def overhead(device: str, sizes: Sizes, step_ms: int, blocks: int) -> dict[str, Any]:
    """Train with the probe on and off by turns; return the wall times of a step of each block."""
    loop = Loop(device, rows_for(device, step_ms, sizes))
    loop.steps_s(sizes.warm_up)
    took: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(2 * blocks):
        gate().on = number % 2 == 0
        loop.step()  # the first behind a switch has more to do
        took["on" if gate().on else "off"].append(loop.steps_s(sizes.block))
    gate().on = True
    return took


def waits(device: str, sizes: Sizes) -> dict[str, int]:
    """Return how often the host waited for the device in a block, with the probe and without."""
    loop, found = Loop(device, sizes.rows), {}
    loop.steps_s(sizes.warm_up)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for way in ("on", "off"):
        gate().on = way == "on"
        loop.wait()
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(sizes.block):
                loop.step()
        names = [(event.key, event.count) for event in profile.key_averages()]
        found[way] = sum(count for name, count in names if WAITS in name)
    gate().on = True
    return found


def rolled_back(device: str, sizes: Sizes) -> dict[str, Any]:
    """Train until a rollback came; return which step's state came back, and whether one did."""
    loop, digests, since = Loop(device, sizes.rows), [], time.monotonic()
    while time.monotonic() < since + 120:
        digest = loop.digest()
        if digest in digests:
            return {"back": len(digests) - digests.index(digest), "exact": True}
        digests.append(digest)
        if len(digests) == sizes.rollback:
            print("ready", flush=True)
        loop.step()
        time.sleep(0.0 if len(digests) < sizes.rollback else 0.02)
    return {"back": 0, "exact": False}


def fault(device: str, sizes: Sizes) -> dict[str, Any]:
    """Train under BF16."""
    Loop(device, 2 * sizes.rows, bf16=True).steps_s(sizes.fault)
    return {}


# ── outside them ──────────────────────────────────────────────────────────────────────────────────


def run(
    part: str, device: str, folder: Path, *numbers: int, quick: bool, drill: str = ""
) -> dict[str, Any]:
    """Run a job of this file under `supervise`; return its answer, the last line that it prints."""
    flags = ["--policy", "nano", "--run-dir", str(folder / part)]
    flags += ["--drill", drill] if drill else []
    job = [sys.executable, str(HERE), "--device", device, *["--quick"] * quick]
    job += ["--job", part, *map(str, numbers)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [*SUPERVISE, "run", "-q", *flags, "--", *job],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
    )
    assert child.stdout is not None
    answer = "{}"
    for line in child.stdout:
        answer = line if line.startswith("{") else answer
        if line == "ready\n":
            order = [*SUPERVISE, "rollback", str(folder / part)]
            subprocess.run(order, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    if child.wait():
        raise SystemExit(f"device.py: the job {part} ended with {child.returncode}")
    return dict(json.loads(answer))


def row(subject: str, found: str, promised: str, kept: bool | None) -> bool:
    """Print a row of the table; `kept` is None where nothing is promised."""
    verdict = "" if kept is None else "PASS" if kept else "FAIL"
    print(f"{subject:34}{found:44}{promised:22}{verdict}", flush=True)
    return kept is not False


def measure(device: str, quick: bool, folder: Path) -> bool:
    """Print the table; return whether all promises are kept, of a device alone."""
    claims, sizes = device != "cpu", QUICK if quick else Sizes()
    kept = True
    for step_ms, blocks in zip(sizes.steps_ms, sizes.blocks, strict=True):
        place = folder / str(step_ms)
        place.mkdir()
        took = run("overhead", device, place, step_ms, blocks, quick=quick)
        on, off = median(took["on"]), median(took["off"])
        rows = read_rows(RunDir.open(place / "overhead"))
        own = [v for r in rows if (v := r.values.get("probe_self_time")) is not None]
        share = median(own) / off
        text = (
            f"{1e3 * off:.1f} ms, own {1e6 * median(own):.0f} us: {share:.2%}, wall x{on / off:.3f}"
        )
        is_small = share <= SHARE and on / off <= LONGER if claims else None
        kept &= row(f"overhead, steps of {step_ms} ms", text, "1 %, wall x1.02", is_small)
    found = run("waits", device, folder, quick=quick)
    text = f"{found['on']} with the probe, {found['off']} without, in {sizes.block} steps"
    kept &= row("host waits", text, "no more", found["on"] <= found["off"] if claims else None)
    back = run("rollback", device, folder, quick=quick)
    text = f"the bytes of {back['back']} steps before" if back["exact"] else "no state of before"
    kept &= row("rollback", text, "bit-exact", bool(back["exact"]))
    start = sizes.fault // 3
    run("fault", device, folder, quick=quick, drill=f"attention_bias@{start}")
    steps = [
        record.step
        for record in read_records(RunDir.open(folder / "fault"))
        if record.decision and str(record.decision.rule).startswith("attention.")
    ]
    late = min((step - start for step in steps if step >= start), default=None)
    text = (
        "no rule fired"
        if late is None
        else f"a rule of attention fired {late} steps behind its start"
    )
    kept &= row("attention fault, BF16", text, "fires", late is not None if claims else None)
    return kept


def main() -> None:
    """Print the table, or be one of the jobs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does this script work?")
    parser.add_argument("--job", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    jobs = {"overhead": overhead, "waits": waits, "rollback": rolled_back, "fault": fault}
    if args.job:
        part, *numbers = args.job
        sizes = QUICK if args.quick else Sizes()
        print(json.dumps(jobs[part](args.device, sizes, *map(int, numbers))), flush=True)
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("device.py: torch sees no such device here; nothing is measured")
    name = "cpu" if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {name}, load {os.getloadavg()[0]:.1f}\n")
    with tempfile.TemporaryDirectory(prefix="supervise-device-") as folder:
        kept = measure(args.device, args.quick, Path(folder))
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
