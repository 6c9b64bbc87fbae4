"""Healthy series on which no shipped rule says a word: noise of many kinds, and ends of schedules.

`test_noisy` asks the same of trainings; these are simulated, so that each names what it is about.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable

import numpy as np
import pytest
from click.testing import CliRunner

from supervise.cli import group

pytestmark = pytest.mark.slow

ROWS = 4000
Columns = dict[str, np.ndarray]
rng = np.random.default_rng


def autoregression(noise: np.ndarray, share: float = 0.9) -> np.ndarray:
    """Return noise of the same spread in which each value keeps a share of the one before."""
    made = [noise[0]]
    for each in noise[1:]:
        made.append(share * made[-1] + np.sqrt(1 - share**2) * each)
    return np.array(made)


def smoothed(noise: np.ndarray, share: float = 0.9) -> np.ndarray:
    """Return the exponential mean of noise, as a progress bar shows a loss."""
    return autoregression(noise, share) * np.sqrt((1 - share) / (1 + share))


def falling(noise: np.ndarray, spread: float) -> Columns:
    return {"train_loss_raw": 2.4 + 2.0 / np.sqrt(40 + np.arange(len(noise))) + spread * noise}


def apart(losses: list[np.ndarray]) -> Columns:
    return {"loss_dispersion": 0.1 * np.std(losses, axis=0)}


def t3(seed: int) -> np.ndarray:
    return rng(seed).standard_t(3, ROWS) / np.sqrt(3)


def wandering(seed: int) -> Columns:
    """Return every fourth update of a model that has nothing to learn; correlations 0.7 and on."""
    noise = rng(seed).standard_normal((3, ROWS))
    logs = 0.06 * autoregression(noise[0], 0.6) + 0.06 * autoregression(noise[1], 0.99)
    return {"train_loss_raw": 2.8 + 0.05 * noise[2], "update_norm": 0.02 * np.exp(logs)}


HEALTHY: dict[str, tuple[str, Callable[[], Columns]]] = {
    "a loss of an autoregression": (
        "harm.established",
        lambda: falling(autoregression(rng(1).standard_normal(ROWS)), 0.05),
    ),
    "such a loss with heavy tails": (
        "harm.established",
        lambda: falling(autoregression(t3(2)), 0.05),
    ),
    "a smoothed loss": (
        "harm.established",
        lambda: falling(smoothed(rng(3).standard_normal(ROWS)), 0.1),
    ),
    "a tiny loss that varies by factors": (
        "loss_spike.minor",
        lambda: {"train_loss_raw": 1e-8 * np.exp(rng(7).standard_normal(30))},
    ),
    "a second step that missed": (
        "loss_spike.minor",
        lambda: {"train_loss_raw": np.array([2.4, 4.1, *np.linspace(2.4, 2.2, 28)])},
    ),
    "updates with a long memory": ("update_scale.creeping", lambda: wandering(10)),
    "losses of two ranks": ("ranks.outlier_rank", lambda: apart([*rng(4).normal(size=(2, ROWS))])),
    "such losses with heavy tails": ("ranks.outlier_rank", lambda: apart([t3(5), t3(6)])),
}


@pytest.mark.parametrize(("rule", "make"), HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_series_is_left_alone(rule, make, tmp_path):
    columns = make()
    path = tmp_path / "healthy.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerow(["step", *columns])
        csv.writer(file).writerows(zip(range(ROWS), *columns.values(), strict=False))

    result = CliRunner().invoke(group, ["backtest", "--policy", "observe", "--json", str(path)])

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["fired"].get(rule, 0) == 0
