"""Fold a story through a shipped policy and print the sha256 of all its decisions.

    python story_digest.py SEED

The seed shuffles the order in which the modules are imported, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import pkgutil
import random
import sys
from importlib import import_module

SECOND = 1_000_000_000
FRAMES = 700


def shuffled_imports(seed: int) -> None:
    names = []
    for package in ("supervise.core", "supervise.detectors", "supervise.actions"):
        path = import_module(package).__path__
        names += [info.name for info in pkgutil.walk_packages(path, f"{package}.")]
    random.Random(seed).shuffle(names)
    for name in names:
        import_module(name)


def row(chance: random.Random, step: int, names: tuple[str, ...]) -> tuple[float | None, ...]:
    """Return healthy noise, a spike that heals, a level that stays, NaN and gaps."""
    values: list[float | None] = [1.0 + 0.02 * chance.gauss(0.0, 1.0) for _ in names]
    for place in range(0, len(names), 3):
        if 300 <= step < 304 or step >= 500:
            values[place] = (values[place] or 0.0) * 9.0
        if step == 400:
            values[place] = math.nan
        if step == 450:
            values[place] = None
    return tuple(values)


def decisions() -> list[dict]:
    """Return the decision records of the whole story; every action succeeds at once."""
    from supervise.catalog.assembly.policy_loader import load_policy
    from supervise.core import engine
    from supervise.core.model.events import (
        Announced,
        Beat,
        Exited,
        Finished,
        Frame,
        Launched,
        OperatorCommand,
        Tick,
    )
    from supervise.core.replay import record

    policy = load_policy("nano", mode="enforce")
    names = tuple(sorted({m for d in policy.detectors.values() for m in d.metrics}))
    chance, state, made = random.Random(7), engine.start(policy), []

    def send(event) -> None:
        nonlocal state
        state, said = engine.step(policy, state, event)
        made.extend(record(decision) for decision in said)
        for decision in said:
            if decision.kind == "intent":
                action = decision.data["action"]["id"]
                send(Finished(event.at_ns, action, True, {"ack_step": state.step}))

    send(Launched(0, 1, 0))
    for rank in (0, 1):
        send(Announced(0, rank, 2, 1 + rank, names))
    for step in range(FRAMES):
        at_ns = step * SECOND
        for rank in (0, 1):
            send(Frame(at_ns, rank, state.attempt, step, row(chance, step, names)))
        send(Tick(at_ns, (Beat(0, at_ns, "step"), Beat(1, at_ns, "step"))))
        if step % 150 == 149:
            send(OperatorCommand(at_ns, "somebody", "release"))
    send(Exited(FRAMES * SECOND, 0))
    return made


if __name__ == "__main__":
    shuffled_imports(int(sys.argv[1]))
    told = decisions()
    text = json.dumps(told, sort_keys=False, allow_nan=False)
    print(len(told), hashlib.sha256(text.encode()).hexdigest())
