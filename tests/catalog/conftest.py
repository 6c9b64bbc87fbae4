"""Policies from text, and a pack's own scenarios run through the engine."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from supervise.catalog import PolicyErrors, load_policy
from supervise.catalog.problems import Problem
from supervise.core import engine
from supervise.core.rule import Policy
from supervise.core.values import Announced, Beat, Decision, Event, Frame, Launched, Tick

STEP_NS = 100_000_000  # a step takes a tenth of a second in a scenario
SECOND_NS = 1_000_000_000

Loader = Callable[..., Policy]

# A policy that is right, for tests that make one thing wrong.
GOOD = """\
version: supervise/v1
mode: enforce
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 12.0}
  wild: {kind: threshold, metric: grad_global_norm, gt: 100.0}
rules:
  - {id: spike, when: high and wild, sev: SEV1, run: calm}
  - {id: dead, when: high, sev: SEV0, for: 3}
runbooks:
  calm: [snapshot, {lr_scale: {set: 0.5}}, verify]
budgets: {all: {max: 6}, lr_scale: {max: 2, per: 5000}}
"""


@pytest.fixture
def good() -> str:
    return GOOD


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    """Return a function that loads a policy from text, with other files beside it."""

    def load(
        text: str,
        files: Mapping[str, str] | None = None,
        *,
        mode: str | None = None,
        warnings: list[Problem] | None = None,
    ) -> Policy:
        for name, content in {**(files or {}), "p.yaml": text}.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, "utf-8")
        return load_policy(tmp_path / "p.yaml", mode=mode, warnings=warnings)

    return load


@pytest.fixture
def mistakes(load: Loader) -> Callable[..., list[str]]:
    """Return a function that loads a wrong policy and lists `line:col: message (hint)`."""

    def mistakes(text: str, files: Mapping[str, str] | None = None) -> list[str]:
        with pytest.raises(PolicyErrors) as raised:
            load(text, files)
        found = raised.value.problems
        said = [f"{p.message} ({p.hint})" if p.hint else p.message for p in found]
        return [f"{p.line}:{p.col}: {text}" for p, text in zip(found, said, strict=True)]

    return mistakes


# ── scenarios ─────────────────────────────────────────────────────────────────────────────────────

_PIECE = re.compile(r"(_|nan|inf|-?[0-9.]+(?:e-?[0-9]+)?)([+-][0-9.]+)?(?:x([0-9]+))?")


def series(text: str) -> list[float | None]:
    """`2.4x300 5.0-0.1x20 _x5 nan` -> samples; `_` is absent."""
    samples: list[float | None] = []
    for piece in text.split():
        match = _PIECE.fullmatch(piece)
        assert match is not None, piece
        start, slope, count = match.groups()
        times = range(int(count or 1))
        samples += [None if start == "_" else float(start) + i * float(slope or 0) for i in times]
    return samples


@pytest.fixture
def play(load: Loader) -> Callable[..., Mapping[str, list[tuple[int, bool]]]]:
    """Return a function that runs a scenario: rule -> `(step, fired)` of every change."""

    def play(pack: str, scenario: Mapping[str, Any]) -> Mapping[str, list[tuple[int, bool]]]:
        text = f"version: supervise/v1\nmode: observe\nuse: [{pack}]\n"
        policy = load(text)
        changes: dict[str, list[tuple[int, bool]]] = {rule.id: [] for rule in policy.rules}
        state = engine.start(policy)
        for step, event in _events(scenario):
            state, made = engine.step(policy, state, event)
            for rule, fired in _changes(made):
                changes[rule].append((step, fired))
        return changes

    return play


def _events(scenario: Mapping[str, Any]) -> Iterable[tuple[int, Event]]:
    chance = random.Random(scenario.get("seed", 0))
    noise = scenario.get("noise", {})
    columns = {name: series(text) for name, text in scenario["series"].items()}
    names = tuple(columns)
    lengths = {len(samples) for samples in columns.values()}
    assert len(lengths) == 1, f"series of different lengths: {lengths}"
    yield 0, Launched(0, 1, 0)
    yield 0, Announced(0, 0, 1, 1, names)
    heard = 0
    for step in range(lengths.pop()):
        at = (step + 1) * STEP_NS
        values = tuple(
            None
            if (value := columns[name][step]) is None
            else chance.gauss(value, noise.get(name, 0))
            for name in names
        )
        if any(value is not None for value in values):
            heard = at
            yield step, Frame(at, 0, 0, step, values)
        if at % SECOND_NS == 0:
            yield step, Tick(at, (Beat(0, heard, "step"),))


def _changes(made: Iterable[Decision]) -> Iterable[tuple[str, bool]]:
    for decision in made:
        if decision.kind == "rule" and decision.rule is not None:
            yield decision.rule, decision.data["what"] == "fired"
