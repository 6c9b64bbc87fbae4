"""Healthy trainings that look like trouble: no shipped policy acts on them.

Their losses vary by a large share of themselves, come in several sizes by turns, or are negative;
or their layers, rates or optimizers change by plan. Each is trained here, on random data, and its
numbers are back-tested as a recording.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from supervise.cli import group

torch = pytest.importorskip("torch")
F = torch.nn.functional

pytestmark = pytest.mark.slow

STEPS = 500
POLICIES = ("nano", "moe", "canary")  # `moe` is `large`, `medium`, and more
COLUMNS = (
    *("step", "train_loss_raw", "grad_global_norm", "update_norm"),
    *("learning_rate", "learning_rate.1"),
)

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


class Healthy:
    """A model of two layers in two groups, and what a subclass does to it by plan."""

    rates = (3e-3, 3e-3)

    def __init__(self) -> None:
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU())
        self.head = torch.nn.Linear(64, self.outputs)
        self.batch = self.data()
        self.made = self.optimizer(*self.rates)

    outputs = 10

    def data(self) -> Batch:
        return _classes(64)

    def optimizer(self, head: float, body: float) -> torch.optim.Optimizer:
        groups = [{"params": self.head.parameters(), "lr": head}]
        return torch.optim.AdamW([*groups, {"params": self.body.parameters(), "lr": body}])

    def plan(self, step: int) -> None:
        """Change what this training changes before a step."""

    def loss(self, step: int) -> torch.Tensor:
        x, y = self.batch()
        return F.cross_entropy(self.head(self.body(x)), y)


class Regression(Healthy):
    """Of one number with Student's t as noise; with 3 it has no fourth moment."""

    outputs = 1

    def data(self) -> Batch:
        weights, noise = torch.randn(16), torch.distributions.StudentT(3.0)

        def batch() -> tuple[torch.Tensor, torch.Tensor]:
            x = torch.randn(8, 16)
            return x, (torch.tanh(x @ weights) + 0.3 * noise.sample((8,))).unsqueeze(1)

        return batch

    def loss(self, step: int) -> torch.Tensor:
        x, y = self.batch()
        return F.mse_loss(self.head(self.body(x)), y)


class Few(Healthy):
    def data(self) -> Batch:
        return _classes(8)


class PlainSgd(Few):
    def optimizer(self, head: float, body: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.head.parameters(), *self.body.parameters()], lr=0.05)


class ByHeart(Healthy):
    def data(self) -> Batch:
        return _classes(16, 2.0)


class Turns(Healthy):
    """Five steps of each of two tasks; the second has a loss some forty times as large."""

    outputs = 11

    def second(self, step: int) -> bool:
        return step // 5 % 2 == 0

    def loss(self, step: int) -> torch.Tensor:
        x, y = self.batch()
        out = self.head(self.body(x))
        if self.second(step):
            return F.mse_loss(out[:, 10], 3.0 * x[:, 0] + 3.0 * torch.randn(len(x)))
        return F.cross_entropy(out[:, :10], y)


class HardBatches(Healthy):
    """A set learned by heart, with two new samples in a row every 97 steps."""

    def data(self) -> Batch:
        inputs, labels = torch.randn(64, 16), torch.randint(0, 10, (64,))

        def batch() -> tuple[torch.Tensor, torch.Tensor]:
            chosen = torch.randint(64, (16,))
            return inputs[chosen], labels[chosen]

        return batch

    def loss(self, step: int) -> torch.Tensor:
        x, y = self.batch()
        if step > 200 and step % 97 < 2:
            x[0], y[0] = torch.randn(16), (y[0] + 1) % 10
        return F.cross_entropy(self.head(self.body(x)), y)


class Thawed(Healthy):
    """The body is frozen, and trained from the middle on."""

    def plan(self, step: int) -> None:
        if step in (0, STEPS // 2):
            self.body.requires_grad_(step > 0)


class OwnRates(Healthy):
    """The body's rate goes from 1e-6 to that of the head."""

    rates = (3e-3, 1e-6)

    def plan(self, step: int) -> None:
        if step == STEPS // 2:
            self.made.param_groups[1]["lr"] = 3e-3


class Climbing(Healthy):
    """A second stage: the rate rises to thirty times within forty steps."""

    rates = (1e-4, 1e-4)

    def plan(self, step: int) -> None:
        for parameters in self.made.param_groups if 0 <= step - STEPS // 2 <= 40 else ():
            parameters["lr"] = 1e-4 * (1.0 + 29.0 * (step - STEPS // 2) / 40)


class OtherOptimizer(Healthy):
    """SGD behind AdamW."""

    rates = (3e-4, 3e-4)

    def plan(self, step: int) -> None:
        if step == STEPS // 2:
            groups = [{"params": self.head.parameters()}, {"params": self.body.parameters()}]
            self.made = torch.optim.SGD(groups, lr=0.1, momentum=0.9)


class Density(Regression):
    """The negative log-likelihood of a narrow density: from 1 to below -2."""

    outputs = 2

    def loss(self, step: int) -> torch.Tensor:
        x = torch.randn(32, 16)
        middle, width = self.head(self.body(x)).unbind(1)
        y, width = 0.5 * x.sum(1) + 0.01 * torch.randn(32), width.clamp(-4.0, 3.0)
        return (width + 0.5 * ((y - middle) / width.exp()) ** 2).mean()


NOISY: dict[str, type[Healthy]] = {
    "64-samples": Healthy,
    "8-samples": Few,
    "plain-sgd": PlainSgd,
    "learned-by-heart": ByHeart,
    "heavy-tails": Regression,
}
TRAININGS = {
    **NOISY,
    "two-tasks-by-turns": Turns,
    "hard-batches": HardBatches,
    "thawed": Thawed,
    "rates-of-its-own": OwnRates,
    "a-rate-that-climbs": Climbing,
    "another-optimizer": OtherOptimizer,
    "a-density": Density,
}
PAGES = ("loss_spike.jump", "loss_spike.startup_spike")
ORDERED = "loss_spike.ordered"  # a coupling of three signals: on no healthy run
REFUSED = ("another-optimizer", "hold-rate")  # by the probe: that one had no rate before
LOUD = 2  # of a healthy run: the first time that something rare comes, it looks like a spike


def _train(name: str) -> list[tuple[float, ...]]:
    torch.manual_seed(0)
    run = TRAININGS[name]()
    weights = [*run.head.parameters(), *run.body.parameters()]
    rows: list[tuple[float, ...]] = []
    for step in range(STEPS):
        run.plan(step)
        loss = run.loss(step)
        run.made.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        before = torch.nn.utils.parameters_to_vector(weights).detach().clone()
        run.made.step()
        moved = torch.nn.utils.parameters_to_vector(weights).detach() - before
        rates = (run.made.param_groups[0]["lr"], run.made.param_groups[-1]["lr"])
        rows.append((step, loss.item(), norm.item(), moved.norm().item(), *rates))
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


@pytest.mark.parametrize("policy", POLICIES)
def test_a_healthy_training_is_left_alone(policy, recordings):
    """Whatever its loss, updates and rates do, nothing touches it, and hardly anything pages.

    A gate, which runs on fixed shards, may stop at what changes by plan.
    """
    paths = map(str, sorted(recordings.glob("*.csv")))
    result = CliRunner().invoke(group, ["backtest", "--policy", policy, "--json", *paths])
    assert result.exit_code == 0, result.output
    runs = [json.loads(line) for line in result.stdout.splitlines()]

    assert [run["rows"] for run in runs] == [STEPS] * len(TRAININGS)
    judged = [run for run in runs if policy != "canary" or run["run"] in NOISY]
    for run in judged:
        acts = [act for act in run["actions"] if (run["run"], act["runbook"]) != REFUSED]
        assert [act for act in acts if act["touches_job"] or act["stops"]] == [], run["run"]
    pages = {run["run"]: sum(run["fired"].get(rule, 0) for rule in PAGES) for run in runs}
    assert {run: count for run, count in pages.items() if count > LOUD} == {}
    assert [run["run"] for run in judged if ORDERED in run["fired"]] == []
