"""The probe without torch, on every Python from 3.9 on that this machine has."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervise.core.model import Frame
from supervise.runtime import Segment
from tests.support.supervised_run import interpreters

PROBES = Path(__file__).parents[3] / "probes"

IMPORT_ALL = """
import importlib, pkgutil, supervise_probe
for module in pkgutil.walk_packages(supervise_probe.__path__, "supervise_probe."):
    if not module.name.startswith("supervise_probe.inject"):
        importlib.import_module(module.name)
        print(module.name)
"""
ONE_RANK = """
import sys, time
from supervise_probe.ipc.segment import Mailbox, Writer

writer = Writer.create(sys.argv[1], "run-7", 0, 1, slots=8, capacity=4)
writer.announce(["train_loss_raw", "grad_global_norm"])
for step in range(3):
    writer.publish(step, 0, [step + 0.25, None], 10 + step)
mailbox = Mailbox(writer)
for _ in range(1000):
    for command in mailbox.poll():
        mailbox.ack(command, 2, True, command.args)
        sys.exit()
    time.sleep(0.01)
sys.exit("no command came")
"""
# `torch` here is an empty module: there is nothing to patch, and the job must not notice.
JOB = """
import os, sys
open("torch.py", "w").close()
sys.path.insert(0, os.getcwd())
import torch
print("hello from the job", *sys.version_info[:2])
sys.exit(3)
"""


VERSIONS = sorted(interpreters(), key=lambda version: int(version.partition(".")[2]))


@pytest.fixture(params=dict.fromkeys((VERSIONS[0], VERSIONS[-1])))
def python(request: pytest.FixtureRequest) -> str:
    """The path of an interpreter."""
    return interpreters()[request.param]


def environment() -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SUPERVISE"))}
    return own | {"PYTHONPATH": str(PROBES), "PYTHONDONTWRITEBYTECODE": "1"}


def test_every_module_can_be_imported(python: str):
    """Syntax and standard library of the oldest Python suffice, and nothing warns."""
    done = subprocess.run(
        [python, "-W", "error", "-c", IMPORT_ALL], env=environment(), capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert len(done.stdout.split()) > 50


def opened(folder: Path) -> Iterator[Segment]:
    """Yield the segment once it has its name and its metrics."""
    for _ in range(1000):
        for path in folder.glob("rank-0.*.seg"):
            yield Segment.open(str(path), time.monotonic_ns)
            return
        time.sleep(0.01)
    raise AssertionError("no segment was written")


def test_frames_and_commands_cross_between_versions(python: str, tmp_path: Path):
    """A probe on any Python writes frames that the supervisor reads, and answers its command."""
    job = subprocess.Popen([python, "-c", ONE_RANK, str(tmp_path)], env=environment())
    try:
        (segment,) = opened(tmp_path)
        segment.send("inc-1/lr", "lr_scale", {"value": 0.5})
        assert job.wait(30) == 0
        frames = [event for event in segment.poll() if isinstance(event, Frame)]
        (answer,) = segment.acks()
        segment.close()
    finally:
        job.kill()
        job.wait()

    assert [(frame.step, frame.values) for frame in frames] == [
        (step, (step + 0.25, None)) for step in range(3)
    ]
    assert (answer.key, answer.ok, answer.result) == ("inc-1/lr", True, {"value": 0.5})


@pytest.mark.slow
def test_a_job_without_torch_does_not_notice(python: str, tmp_path: Path):
    """The probe's way in and a `torch` that is none leave output and exit code alone."""
    supervise = [sys.executable, "-m", "supervise", "--run-dir", "run", "--"]
    done = subprocess.run(
        [*supervise, python, "-c", JOB], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("hello from the job 3 ")
    assert "Traceback" not in done.stderr
