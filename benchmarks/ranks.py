"""Two ranks whose rate jumps, in five ways of spreading a model, under `nano` as it is shipped.

    python benchmarks/ranks.py [--only ddp fsdp1 fsdp2 zero tensor]

Each job trains 450 steps, whose rate is 1000 times too high for ten from step 300 on; beside
it runs one that is only observed. `back to`, `at`: the step whose state the ranks took back, and
the one at whose end they did. `same`: ranks whose weights and moments are then, bit by bit, those
that they had behind that step; all must be. `loss`: mean of the last 50, beside an undisturbed run.

Writes `benchmarks/ranks.md`. Exit code 1 when a rank has other bits, or no rollback came.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from supervise.store import audit

HERE = Path(__file__).resolve()
TABLE = HERE.with_name("ranks.md")
SHAPES = ("ddp", "fsdp1", "fsdp2", "zero", "tensor")
STEPS, FAULT, LASTS, TIMES, TAIL = 450, 300, 10, 1000.0, 50
HEAD = ("shape", "nobody", "supervised", "undisturbed", "back to", "at", "same")


def spread(torch: Any, shape: str, model: Any) -> tuple[Any, Any]:
    """Return the model as the ranks hold it, and its optimizer."""
    distributed, adamw = torch.distributed, torch.optim.AdamW
    if shape in ("ddp", "zero"):
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif shape == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif shape == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import parallel

        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        plan = {"2": parallel.ColwiseParallel(), "4": parallel.RowwiseParallel()}
        parallel.parallelize_module(model, mesh, plan)
    if shape == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=adamw, lr=1e-3)
    return model, adamw(model.parameters(), lr=1e-3)


def digest(torch: Any, model: Any, optimizer: Any) -> str:
    """Return what this rank holds of weights and moments, as eight digits."""
    states = getattr(optimizer, "optim", optimizer).state.values()
    held = [value for state in states for value in state.values() if torch.is_tensor(value)]
    parts = (getattr(each.detach(), "_local_tensor", each.detach()) for each in held)
    weights = (getattr(p.detach(), "_local_tensor", p.detach()) for p in model.parameters())
    whole = b"".join(part.numpy().tobytes() for part in (*weights, *parts))
    return hashlib.sha256(whole).hexdigest()[:8]


def train(shape: str, folder: Path, times: float) -> None:
    """Train as one of the ranks, and write a line `step digest` behind each step."""
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    nn = torch.nn
    layers = nn.Embedding(64, 32), nn.Flatten(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 64)
    model, optimizer = spread(torch, shape, nn.Sequential(*layers))
    # Under tensor parallelism all ranks read the same batch.
    own = torch.Generator().manual_seed(0 if shape == "tensor" else rank)
    losses = []
    with (folder / f"bits.{rank}").open("w") as bits:
        for step in range(STEPS):
            x = torch.randint(0, 64, (16, 8), generator=own)
            wrong = FAULT <= step < FAULT + LASTS
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (times if wrong else 1.0)
            loss = nn.functional.cross_entropy(model(x), x[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(step, digest(torch, model, optimizer), file=bits, flush=True)
            losses.append(loss.item())
            time.sleep(0.01)
    (folder / f"loss.{rank}").write_text(str(sum(losses[-TAIL:]) / TAIL))
    torch.distributed.barrier()
    os._exit(0)  # FSDP2 keeps gloo's threads, which may abort Python as it ends


def run(shape: str, policy: str, times: float, folder: Path) -> float:
    """Train two ranks under `policy`; return the mean loss at the end."""
    folder.mkdir()
    supervise = [sys.executable, "-m", "supervise", "-q", "--policy", policy]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    job = [str(HERE), "--rank", shape, str(folder), str(times)]
    command = [*supervise, "--run-dir", str(folder / "run"), "--", *torchrun, *job]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environ, check=True, capture_output=True, timeout=300)
    return sum(float((folder / f"loss.{rank}").read_text()) for rank in range(2)) / 2


def row_of(shape: str, folder: Path) -> tuple[str, ...]:
    """Run a shape three times; return its row."""
    undisturbed = run(shape, "observe", 1.0, folder / "undisturbed")
    nobody = run(shape, "observe", TIMES, folder / "nobody")
    supervised = run(shape, "nano", TIMES, folder / "supervised")
    results = [
        record["data"]["result"]
        for record in audit.read(folder / "supervised" / "run" / "audit.log")
        if record["kind"] == "commit"
    ]
    back = next((each for each in results if each.get("loop") == "keep"), None)
    same = 0
    if back is not None:
        for rank in range(2):
            lines = (folder / "supervised" / f"bits.{rank}").read_text().splitlines()
            bits = {int(line.split()[0]): line.split()[1] for line in lines}
            same += bits[back["step"]] == bits[back["ack_step"]]
    told = ("-", "-") if back is None else (str(back["step"]), str(back["ack_step"]))
    losses = (f"{loss:.4f}" for loss in (nobody, supervised, undisturbed))
    return (shape, *losses, *told, f"{same}/2")


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        train(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=SHAPES)
    wanted = parser.parse_args()
    rows = []
    for shape in wanted.only:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row_of(shape, Path(folder)))
        print("  ".join(f"{cell:11}" for cell in rows[-1]), flush=True)
    if wanted.only == SHAPES:
        lines = ["# Two ranks whose rate jumps", "", "Written by `python benchmarks/ranks.py`.", ""]
        lines += [f"| {' | '.join(row)} |" for row in (HEAD, ("---",) * len(HEAD), *rows)]
        TABLE.write_text("\n".join(lines) + "\n")
    return int(any(row[-1] != "2/2" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
