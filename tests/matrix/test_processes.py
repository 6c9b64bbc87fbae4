"""Odd ways to start a process, to leave it, and to have others: the training is the same to the
bit, each process that trains has one segment, and all others are silent."""

import json
import os
import subprocess
import sys
import time

import pytest

from supervise.core.model import Frame
from supervise.runtime import Segments
from tests.support import supervised_run
from tests.support.probed_job import check_frames, job_environment, rank_jobs

TRAIN = """
import hashlib, json, math, os, sys

def train(steps=8, told=None, report=None):
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if report is not None:
            report(val_loss=step)
        true = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()))
        optimizer.step()
        rows.append(dict(train_loss_raw=loss.item(), grad_global_norm=true, tokens_per_update=6))
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    if told is not None:
        with open(told, "w") as file:
            json.dump([digest.hexdigest(), rows], file)
    return digest.hexdigest()
"""

PACKAGE = """
import gc, sys
from .lib import train
gc.freeze()
train(told="told")
gc.freeze()
"""

IN_A_THREAD = (
    TRAIN
    + """
import threading
assert "torch" not in sys.modules
thread = threading.Thread(target=lambda: __import__("torch"))
thread.start()
thread.join()
train(told="told")
"""
)

FROM_STDIN = (
    TRAIN
    + """
import tempfile, threading
home = os.getcwd()
os.environ.pop("SUPERVISE_PROBE", None)     # it is known since the start
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    thread = threading.Thread(target=train, args=(8, home + "/told"))
    thread.start()
    thread.join()
    os.chdir(home)
"""
)

STARTS = {
    "-m": (["-m", "job.train"], None),
    "-c": (["-c", IN_A_THREAD], None),
    "stdin": (["-"], FROM_STDIN),
}


@pytest.fixture(scope="module")
def expected(pair):
    job = pair.bare.run(TRAIN + "train(told='told')")
    return json.loads((job.folder / "told").read_text())


def check(job, expected):
    """All frames of a training that is over are as it told, and its weights as without us."""
    digest, rows = json.loads((job.folder / "told").read_text())
    assert [digest, rows] == expected
    assert job.column("step") == list(range(len(rows)))
    check_frames(job.frames, rows, rel=1e-5)
    assert set(job.segment().status()["collectors"].values()) == {"on"}


def test_however_python_is_started(make_folder, expected):
    """As a module; as a string, torch imported late in a thread; from stdin, elsewhere."""
    running = []
    for argv, stdin in STARTS.values():
        folder = make_folder()
        (folder / "job").mkdir()
        for name, text in (("__init__", ""), ("lib", TRAIN), ("train", PACKAGE)):
            (folder / "job" / f"{name}.py").write_text(text)
        environ = {**os.environ, **job_environment(folder)}
        environ["PYTHONPATH"] += os.pathsep + supervised_run.FAST_TORCH
        with (folder / "out").open("wb") as out:
            pipes = {"stdin": subprocess.PIPE, "stdout": out, "stderr": out}
            argv = [sys.executable, *argv]
            process = subprocess.Popen(argv, cwd=folder, env=environ, **pipes)
        running.append((folder, process, stdin))
    for folder, process, stdin in running:
        process.communicate(stdin.encode() if stdin else None)
        assert (process.returncode, (folder / "out").read_text()) == (0, "")
        (job,) = rank_jobs(folder)
        check(job, expected)


EXEC = (
    TRAIN
    + """
os.environ["SUPERVISE_PROBE"] = os.path.abspath("probe.json")
if "again" not in sys.argv:
    train(3)
    os.execv(sys.executable, [sys.executable, os.path.abspath("train.py"), "again"])
train(told="told")
"""
)


def test_a_program_that_replaces_itself_is_watched_again(pair, expected):
    """The pid is the same, the segment is a new one; the supervisor reads both, one by one."""
    job = pair.probed.run(EXEC)
    first, second = rank_jobs(job.folder)
    assert first.column("step") == [0, 1, 2] and job.err == ""
    assert first.segment().pid == second.segment().pid
    assert "off" not in job.marks
    check(second, expected)
    read = Segments(job.folder / "shm", job.folder / "probe", time.monotonic_ns)
    events = [event for _ in range(8) for event in read.poll()]
    read.close()
    assert [e.step for e in events if isinstance(e, Frame)] == [0, 1, 2, *range(8)]


WORKERS = """
import sys

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        probe = sys.modules.get("_supervise_probe")
        silent = probe is None or probe._probe.parts.context.reporter.writer is None
        return torch.randn(8), torch.tensor(i % 4), silent


def main():
    os.environ["SUPERVISE_PROBE"] = os.path.abspath("probe.json")
    os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "") + ":{fast_torch}"
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    method, workers, epochs, persistent = {how}
    loader = torch.utils.data.DataLoader(Data(), batch_size=6, shuffle=True, num_workers=workers,
        multiprocessing_context=method, persistent_workers=persistent)
    for epoch in range(epochs):
        for x, y, silent in loader:
            assert silent.all()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            emit(train_loss_raw=loss.item(), grad_global_norm=norm(
                p.grad for p in model.parameters()), tokens_per_update=6)
            optimizer.step()
    finish(model)


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("how", [("fork", 2, 2, False), ("spawn", 1, 1, False)], ids=str)
def test_loader_workers_are_silent_and_draw_the_same(pair, how):
    """Their seeds come from the job's generator, which nobody else has touched."""
    script = WORKERS.replace("{how}", repr(how))
    job = pair.run(script.replace("{fast_torch}", supervised_run.FAST_TORCH))
    assert all(frame["input_time"] > 0 for frame in job.frames[1:])
