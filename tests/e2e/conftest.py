"""Policies, jobs and receivers of the end-to-end tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.supervised_run import JOBS, Supervise

# The loss begins near 0.4; what the drill does to the rate takes it beyond 5 within a few steps.
HALVES = """\
version: supervise/v1
policy: halves
mode: enforce
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 1.0}}
rules: [{id: high, when: high, sev: SEV1, run: half}]
runbooks: {half: [lr_scale: {set: 0.5, rewarm: 10}, verify: {within: 30, clear_for: 5}]}
budgets: {all: {max: 8, per: 1000}, lr_scale: {max: 4, per: 1000}}
escalate: {ladder: [half, hold], reset_after: 500}
warmup: 10
probation: 20
"""
COMES_BACK = """\
version: supervise/v1
policy: comes-back
mode: enforce
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 5.0}}
rules:
  - {id: blown, when: high, sev: SEV1, run: relaunch-and-rewarm, for: 2, cooldown: 100}
job:
  on_crash: restart
  probe_batch: true
  relaunch: {args: ["--init_from=resume"]}
budgets: {all: {max: 4, per: 10000}, restart: {max: 2, per: 10000}}
escalate: {ladder: [relaunch-and-rewarm, hold], reset_after: 5000}
runbooks:
  relaunch-and-rewarm:
    steps: [snapshot, relaunch: {at_least: 10, start: 0.1, rewarm: 20}]
    verify: {within: 100, clear_for: 20}
warmup: 10
probation: 20
"""


LOOP = """\
import os, sys, time, torch
from pathlib import Path
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
"""


@pytest.fixture
def script(supervise: Supervise) -> Any:
    """A function that writes a job, behind what all of them begin with; returns its command."""

    def write(text: str) -> list[str]:
        (supervise.home / "train.py").write_text(LOOP + text)
        return [sys.executable, "train.py"]

    return write


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    command = Supervise(tmp_path)
    yield command
    command.close()


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    """A policy that halves the learning rate when the loss is high."""
    path = tmp_path / "halves.yaml"
    path.write_text(HALVES)
    return path


@pytest.fixture
def comes_back(tmp_path: Path) -> Path:
    """A file with a policy that starts `resuming.py` again from its own checkpoint."""
    path = tmp_path / "comes-back.yaml"
    path.write_text(COMES_BACK)
    return path


@pytest.fixture
def resuming_job(tmp_path: Path) -> Any:
    """Command line of the job that resumes. It goes on to where the drill comes once its first
    checkpoint was verified."""
    words = {"out_dir": tmp_path / "out", "pause_s": 0.002, "max_iters": 250}
    words |= {"wait_file": tmp_path / "run" / "audit.log"}
    job = [sys.executable, str(JOBS / "resuming.py"), *(f"--{k}={v}" for k, v in words.items())]
    return lambda *more: [*job, *more]
