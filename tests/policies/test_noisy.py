"""Healthy trainings whose loss varies by a large share of itself: no shipped policy acts on them.

Each is trained here, on random data, and its numbers are back-tested as a recording.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional as F

from supervise.cli.backtest import command

pytestmark = pytest.mark.slow

STEPS = 1500
POLICIES = ("nano", "medium", "moe", "large", "canary")
COLUMNS = ("step", "train_loss_raw", "grad_global_norm", "update_norm", "learning_rate")

Batch = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def _classes(size: int, margin: float = 0.0) -> Batch:
    """Return batches of ten classes; `margin` leaves out what is near a border between two."""
    teacher = torch.randn(16, 10)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(16 * size, 16)
        best = (x @ teacher).topk(2).values
        x = x[best[:, 0] - best[:, 1] > margin][:size]
        return x, (x @ teacher).argmax(1)

    return batch


def _regression(size: int, freedom: float) -> Batch:
    """Return batches of one number with Student's t as noise; 3 has no fourth moment."""
    weights, noise = torch.randn(16), torch.distributions.StudentT(freedom)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(size, 16)
        return x, (torch.tanh(x @ weights) + 0.3 * noise.sample((size,))).unsqueeze(1)

    return batch


def _mse(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x, y)


TRAININGS: dict[str, Callable[[], tuple[Batch, Callable[..., torch.Tensor], int, bool]]] = {
    "64-samples": lambda: (_classes(64), F.cross_entropy, 10, True),
    "8-samples": lambda: (_classes(8), F.cross_entropy, 10, True),
    "one-sample": lambda: (_classes(1), F.cross_entropy, 10, True),
    "plain-sgd": lambda: (_classes(8), F.cross_entropy, 10, False),
    "learned-by-heart": lambda: (_classes(16, 2.0), F.cross_entropy, 10, True),
    "heavy-tails": lambda: (_regression(8, 3.0), _mse, 1, True),
}


def _train(name: str) -> list[tuple[float, ...]]:
    torch.manual_seed(0)
    batch, criterion, outputs, adam = TRAININGS[name]()
    layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, outputs)
    model = torch.nn.Sequential(*layers)
    weights = list(model.parameters())
    made = torch.optim.AdamW(weights, lr=3e-3) if adam else torch.optim.SGD(weights, lr=0.05)
    rows: list[tuple[float, ...]] = []
    for step in range(STEPS):
        x, y = batch()
        loss = criterion(model(x), y)
        made.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        before = torch.nn.utils.parameters_to_vector(weights).detach().clone()
        made.step()
        moved = torch.nn.utils.parameters_to_vector(weights).detach() - before
        rows.append((step, loss.item(), norm.item(), moved.norm().item(), 3e-3))
    return rows


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a CSV file of each training."""
    folder = tmp_path_factory.mktemp("noisy")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in TRAININGS:
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *_train(name)])
    torch.set_num_threads(threads)
    return folder


def _backtest(policy: str, recordings: Path) -> list[dict[str, Any]]:
    args = ["--policy", policy, "--json", *map(str, sorted(recordings.glob("*.csv")))]
    result = CliRunner().invoke(command, args)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_small_noisy_training_is_left_alone(policy: str, recordings: Path) -> None:
    """Its batches go far beyond the shares of a loss that a large one's never come to."""
    runs = _backtest(policy, recordings)

    assert [run["rows"] for run in runs] == [STEPS] * len(TRAININGS)
    acts = [(run["run"], act) for run in runs for act in run["actions"]]
    assert [(run, act) for run, act in acts if act["touches_job"] or act["stops"]] == []
