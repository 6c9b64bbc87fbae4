"""Products that are known: right on a device that is well, and one wrong bit is seen."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from supervise_offline import devices

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow
PROGRAM = Path(devices.__file__)


@pytest.fixture
def ticking(monkeypatch):
    """A clock that each look moves on by 0.02 s: a busy machine makes no fewer products."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 0.02 * next(ticks))
    monkeypatch.setattr(devices, "time", clock)


class Faulty:
    """torch on a device that flips the lowest bit of one number in its second product."""

    def __init__(self, raised=None):
        self.count = 0
        self.raised = raised

    def __getattr__(self, name):
        return getattr(torch, name)

    def mm(self, left, right, out):
        torch.mm(left, right, out=out)
        self.count += 1
        if self.count == 2 and self.raised:
            raise self.raised
        if self.count == 2:
            out.view(torch.int32)[7, 11] ^= 1


def test_one_wrong_bit_is_found(ticking):
    first, second = devices.multiply_matrices(Faulty(), ["cpu", "cpu"], 0.1)

    assert (first["wrong"], second["wrong"]) == (0, 1)
    assert min(first["products"], second["products"]) >= 2
    assert first["error"] == second["error"] == ""


@pytest.mark.parametrize(
    ("error", "text", "no_memory"),
    [
        (RuntimeError("CUDA error: ECC error\nCompile with ..."), "CUDA error: ECC error", False),
        (torch.cuda.OutOfMemoryError("out of memory"), "out of memory", True),
    ],
)
def test_a_device_that_fails_is_left_alone(ticking, error, text, no_memory):
    first, second = devices.multiply_matrices(Faulty(error), ["cpu", "cpu"], 0.1)

    assert (second["products"], second["error"], second["no_memory"]) == (0, text, no_memory)
    assert first["products"] > 1 and first["error"] == ""


def test_it_runs_in_the_jobs_interpreter():
    (row,) = json.loads(subprocess.check_output([sys.executable, "-I", PROGRAM, "0"]))["devices"]
    assert (row["device"], row["products"], row["wrong"]) == ("cpu", 1, 0)
