"""A job that remembers what it was told, and answers what the test says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from supervise.core.model import Checkpoint, PlanContext
from supervise.errors import ActionError


@dataclass
class FakeJob:
    """Answers `command` with `answer`, or raises it; keeps every call."""

    answer: Any = field(default_factory=dict)
    world_size: int = 1
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    works: dict[str, float] = field(default_factory=lambda: {"cpu_s": 0.0, "bytes": 0})

    def command(
        self, verb: str, args: Mapping[str, Any], *, key: str, deadline_s: float
    ) -> dict[str, Any]:
        self.calls.append((verb, dict(args), key))
        return self._answer()

    def snapshot(self, incident: str, *, key: str, deadline_s: float) -> dict[str, Any]:
        self.calls.append(("snapshot", incident, key))
        return self._answer()

    def stop(self, *, grace_s: float, term_s: float, exit_code: int) -> dict[str, Any]:
        self.calls.append(("stop", grace_s, term_s, exit_code))
        return self._answer()

    def relaunch(self, args: Mapping[str, Any], *, key: str, deadline_s: float) -> dict[str, Any]:
        self.calls.append(("relaunch", dict(args), key, deadline_s))
        return self._answer()

    def quarantine(self, args: Mapping[str, Any], *, key: str, deadline_s: float) -> dict[str, Any]:
        self.calls.append((args, key))
        return self._answer()

    def work(self, within_s: float) -> dict[str, float]:
        self.calls.append(("work", within_s))
        return self.works

    def _answer(self) -> dict[str, Any]:
        if isinstance(self.answer, ActionError):
            raise self.answer
        return dict(self.answer)


@pytest.fixture
def fake_job() -> type[FakeJob]:
    return FakeJob


@pytest.fixture
def context():
    """A plan context at an incident whose first breach was at step 150, seen at step 153."""
    steps = {"ckpt-1": 79, "ckpt-2": 119}
    usual = PlanContext(
        incident="inc-1",
        step=153,
        breach_step=150,
        attempt=0,
        world_size=1,
        severity="SEV1",
        good=tuple(
            Checkpoint(name, at, 0, f"/c/{at}.pt", True, bytes=8_000_000_000)
            for name, at in steps.items()
        ),
    )
    return lambda **changes: replace(usual, **changes)
