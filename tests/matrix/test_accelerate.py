"""`accelerate launch`, the real command, under the supervisor itself."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervise.cli import invoke as run_cli
from tests.support import probed_job

from .conftest import PREAMBLE, QUIET

TRAIN = """
from accelerate import Accelerator

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        row = torch.randint(0, 40, (9,), generator=torch.Generator().manual_seed(i))
        return row[:-1], row[1:].masked_fill(torch.arange(8) < i % 3, -100)

accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 40))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 5))
loader = torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True, num_workers=1)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
book = Ledger(optimizer)
for epoch in range(2):                     # 7 updates of two batches, and one of the last batch
    total = count = 0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
            accelerator.backward(loss)
            total, count = total + loss.item() / 2, count + int((y != -100).sum())
            if accelerator.sync_gradients:
                true = book.gradient()
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                book.before(train_loss_raw=total, grad_global_norm=true, tokens_per_update=count)
            optimizer.step()
            if accelerator.sync_gradients:
                book.after()
                total = count = 0
            schedule.step()
            optimizer.zero_grad()
    accelerator.save_state(f"saved-{epoch}")
finish(accelerator.unwrap_model(model))
"""
OPTIONS = "--cpu --num_processes 1 --num_machines 1 --mixed_precision bf16 --dynamo_backend no"


@pytest.mark.chaos  # takes long; its loop is tested in test_libraries.py
def test_accelerate_launch(tmp_path, capsys):
    """One rank among launcher, job and worker; every number; the same weights without us."""
    script = tmp_path / "train.py"
    script.write_text(probed_job.PREAMBLE + PREAMBLE + TRAIN)
    bin_folder = Path(sys.executable).parent
    launch = [str(bin_folder / "accelerate"), "launch", *OPTIONS.split(), str(script)]
    given = ["--policy", "observe", "--quiet", "--run-dir", str(tmp_path / "run")]
    watched = [sys.executable, "-m", "supervise", *given, "--", *launch]
    environ = {**os.environ, **QUIET, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = {}
    # Without us also without the launcher, whose imports take seconds.
    for name, command in (("bare", [sys.executable, str(script)]), ("watched", watched)):
        (tmp_path / name).mkdir()
        started[name] = subprocess.Popen(command, cwd=tmp_path / name, env=environ, **pipes)
    ended = {name: process.communicate(timeout=300) for name, process in started.items()}
    assert [process.returncode for process in started.values()] == [0, 0], ended
    assert ended["watched"] == ended["bare"]

    told = [json.loads(line) for line in ended["watched"][0].splitlines()]
    rows = [row for row in told if "sha" not in row]
    assert run_cli(["export", str(tmp_path / "run"), "--csv"]) == 0
    frames = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {frame["rank"] for frame in frames} == {"0"}
    assert [int(frame["step"]) for frame in frames] == list(range(len(rows))) == list(range(16))
    for frame, row in zip(frames, rows, strict=True):
        for name, value in row.items():
            assert float(frame[name]) == pytest.approx(value, rel=1e-5), (name, frame)
    register = json.loads((tmp_path / "run" / "checkpoints.json").read_text())["checkpoints"]
    saved = [(entry["path"], entry["step"]) for entry in register]  # one of several files each
    assert saved == [(str(tmp_path / "watched" / f"saved-{n}"), 8 * n + 7) for n in (0, 1)]
    assert json.loads((tmp_path / "run" / "state.json").read_text())["tier"] == "T1"
