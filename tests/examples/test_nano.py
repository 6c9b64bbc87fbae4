"""The embedded example keeps its promises by itself, without anybody watching it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.supervised_run import FAST_TORCH

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

TRAIN = Path(__file__).parents[2] / "examples" / "nano" / "train.py"
# Says of the script behind it how many threads it leaves to the end of Python.
LEAVES = """
import atexit, os, runpy, sys
atexit.register(lambda: os.write(1, b"leaves %d\\n" % len(os.listdir("/proc/self/task"))))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": FAST_TORCH}
SMALL = ("--batch-size", "4", "--warmup", "10", "--log-every", "10")


def command(*args: object, processes: int = 1, script: Sequence[Path] = (TRAIN,)) -> list[str]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        launcher += [str(processes)]
    return [*launcher, *map(str, script), *SMALL, *map(str, args)]


def train(*args: object, **how: Any) -> str:
    done = subprocess.run(
        command(*args, **how), capture_output=True, text=True, timeout=240, env=ENVIRON
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def assert_same(a: dict, b: dict) -> None:
    """Bit for bit, all the way down."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Sixty steps without a break; returns the output and the folder of checkpoints."""
    out = tmp_path_factory.mktemp("straight")
    return train("--steps", 60, "--checkpoint-every", 30, "--out", out, "--resume"), out


def test_it_knows_nothing_of_the_supervisor():
    """The job of the demo is an ordinary script: no import, no word, no hook of ours."""
    assert "supervis" not in TRAIN.read_text(encoding="utf-8").lower()


def test_the_loss_falls_and_the_last_line_is_the_held_out_loss(straight):
    """Below 4 nats after 60 small steps, from ln 256 = 5.5; the last line is read by programs."""
    text, _ = straight
    losses = [float(value) for value in re.findall(r"^step +\d+ +loss ([\d.]+)", text, re.M)]

    assert len(losses) == 6
    assert losses[-1] < 4.0
    assert losses[-1] < losses[0]
    assert re.fullmatch(r"val_loss \d\.\d{4}", text.splitlines()[-1])


def test_a_resumed_run_is_bit_identical(straight, tmp_path):
    text, out = straight
    again = train("--steps", 60, "--resume", out / "ckpt_000030.pt", "--out", tmp_path)

    assert "from step 30" in again
    assert again.splitlines()[-1] == text.splitlines()[-1]
    assert_same(load(out / "ckpt_000060.pt"), load(tmp_path / "ckpt_000060.pt"))


def test_a_bare_resume_takes_the_newest_checkpoint_or_starts_from_scratch(straight):
    """A relaunch only has to append `--resume`, also when nothing was saved yet."""
    text, out = straight

    assert "from step 0\n" in text
    assert "from step 60\n" in train("--steps", 60, "--resume", "--out", out)


@pytest.mark.chaos
def test_two_ranks_train_one_model_and_resume_bit_identically(tmp_path):
    """Both ranks' random states are in the checkpoint; only rank 0 speaks.

    No thread of gloo is there when Python ends, which now and then aborts the process.
    """
    args = ("--steps", 8, "--checkpoint-every", 4, "--log-every", 4, "--accum", 2)
    (tmp_path / "leaves.py").write_text(LEAVES)
    script = (tmp_path / "leaves.py", TRAIN)
    text = train(*args, "--out", tmp_path / "a", processes=2, script=script)
    train(
        *args, "--out", tmp_path / "b", "--resume", tmp_path / "a" / "ckpt_000004.pt", processes=2
    )

    assert text.count("leaves 1\n") == 2
    assert text.count("val_loss") == 1
    assert len(load(tmp_path / "a" / "ckpt_000008.pt")["rng"]) == 2
    assert_same(load(tmp_path / "a" / "ckpt_000008.pt"), load(tmp_path / "b" / "ckpt_000008.pt"))


def test_a_checkpoint_is_whole_or_absent(tmp_path):
    """Killed in the middle of saving after every step, it leaves only checkpoints that load."""
    with subprocess.Popen(
        command("--steps", 10_000, "--checkpoint-every", 1, "--out", tmp_path),
        stdout=subprocess.DEVNULL,
        env=ENVIRON,
    ) as job:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ckpt_*.pt"))) < 5 or not list(tmp_path.glob("*.partial")):
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        job.send_signal(signal.SIGKILL)

    saved = sorted(tmp_path.glob("ckpt_*.pt"))
    assert [load(path)["step"] for path in saved] == list(range(1, len(saved) + 1))
