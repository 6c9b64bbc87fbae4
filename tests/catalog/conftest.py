"""Policies from text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from supervise.catalog import (
    PolicyErrors,
    Problems,
    Source,
    load_policy,
    parse_yaml,
    plain_yaml,
)
from supervise.core.model import Policy

HEAD = "version: supervise/v1\nmode: enforce\n"
ONE = "detectors: {a: {kind: threshold, metric: train_loss_raw, gt: 12}}\n"
MARK = "¦"  # where a message should point

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

# A policy with each of its keys.
WHOLE = """\
version: supervise/v1
policy: whole
summary: text
mode: enforce
use: []
override: {}
baseline: {window: 128, min: 64}
detectors:
  a: {kind: threshold, metric: train_loss_raw, gt: 12, for: 2}
  b: {kind: absence, after: {min: 1s, p99_multiple: 3}, grace: {eval: 1m}}
  c: {kind: join, any: [a], within: 2}
rules:
  - {id: r, when: a, sev: SEV1, run: calm, for: 3, keep: 4, cooldown: 5, unknown: breach,
     mode: shadow}
inhibit: [{by_state: [acting, probation], mute: [r]}]
budgets: {all: {max: 6}, lr_scale: {max: 2, per: 1800s}}
escalate: {ladder: [calm, hold], reset_after: 10}
runbooks:
  calm:
    meaning: what it means
    impact: what it costs
    steps: [snapshot, {lr_scale: {set: 0.5, rewarm: 20}}]
    verify: {within: 50, clear_for: 10}
    if_it_fails: hold
    diagnose: [why]
  other: [notify]
machine: null
savepoints: {every: 10, keep: 2, max_bytes: 1000}
safeguards: {skip_nonfinite: {max: 3, per: 128}}
job: {rollback: in_process}
notify: {console: {min_sev: SEV1}, webhook: {url_env: HOOK, secret_env: SECRET}}
warmup: 7
probation: 8
blind_after: {steps: 9, time: 500ms}
hold_reminder: 2h
"""

# A policy that others extend, and the pack beside it.
VERSION = "version: supervise/v1\n"
BASE = (
    VERSION
    + """\
policy: base
mode: enforce
use: [own, hang]
override: {own.loud: {gt: 9.0, clear: 3.0}}
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 12.0}}
rules: [{id: too_high, when: high, sev: SEV1}]
inhibit: [{by_rule: too_high, mute: [own.minor]}]
budgets: {all: {max: 6, per: 20000}, rollback: {max: 2}, restart: {max: 1}, lr_scale: {max: 4}}
savepoints: {every: 25, keep: 4}
escalate: {ladder: [soften, rollback-and-rewarm, hold], reset_after: 100}
notify: {console: {min_sev: SEV1}}
"""
)
PACK = (
    VERSION
    + """\
pack: own
summary: One bound.
status: experimental
source: [none]
false_alarms: [none]
detectors: {loud: {kind: threshold, metric: train_loss_raw, gt: 1.0}}
rules: [{id: minor, when: loud, sev: SEV2}, {id: major, when: loud, sev: SEV1, for: 9}]
"""
)
TEAM = {"base.yaml": BASE, "packs/own.yaml": PACK}


def plain(text: str, **parser: Any) -> Any:
    """Return what a YAML text holds. Raises PolicyErrors."""
    problems = Problems()
    root = parse_yaml(Source("x.yaml", text), problems, **parser)
    problems.raise_if_any()
    assert root is not None
    return plain_yaml(root)


def pointed(text: str) -> tuple[str, list[str]]:
    """Return the text without its marks, and `line:col: ` of each."""
    spots = []
    while MARK in text:
        before, _, after = text.partition(MARK)
        line, col = before.count("\n") + 1, len(before) - before.rfind("\n")
        spots.append(f"{line}:{col}: ")
        text = before + after
    return text, spots


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Policy]:
    """Return a function that loads a policy from text, with other files beside it."""

    def load(text: str, files: Mapping[str, str] | None = None, **options: Any) -> Policy:
        for name, content in {**(files or {}), "p.yaml": text}.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, "utf-8")
        return load_policy(tmp_path / "p.yaml", **options)

    return load


@pytest.fixture
def mistakes(load: Callable[..., Policy]) -> Callable[..., list[str]]:
    """Return a function that loads a wrong policy and lists `line:col: message (hint)`."""

    def mistakes(text: str, files: Mapping[str, str] | None = None) -> list[str]:
        with pytest.raises(PolicyErrors) as raised:
            load(text, files)
        return [
            f"{p.line}:{p.col}: {p.message}" + (f" ({p.hint})" if p.hint else "")
            for p in raised.value.problems
        ]

    return mistakes
