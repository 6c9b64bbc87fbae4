"""The objects that nearly every part of the probe needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config
    from .runtime.gate import Gate
    from .runtime.guard import Guard
    from .runtime.reporter import Position, Reporter
    from .runtime.scalars import Scalars
    from .torch_state.registry import Registry


@dataclass(eq=False)
class ProbeContext:
    """One for each process: a forked child gets another.

    Attributes:
        torch: the job's module of that name.
        config: what the supervisor asked for.
        guard: runs pieces of the probe, and switches them off.
        gate: whether a hook must keep still.
        registry: which objects of the job are alive.
        scalars: brings numbers to the host.
        position: rank, step and attempt.
        reporter: beats, notices, status.
    """

    torch: Any
    config: Config
    guard: Guard
    gate: Gate
    registry: Registry
    scalars: Scalars
    position: Position
    reporter: Reporter
