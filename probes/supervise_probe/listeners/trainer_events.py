"""What an adapter may say of the library whose loop trains."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Optional, Protocol, Tuple


class TrainerEvents(Protocol):
    """The port of the adapters. All is called between two steps, in the thread that trains."""

    def trained_by(self, name: str, names_saves: bool = False) -> None:
        """The loop of this library begins, or ends (""); it may name its checkpoints itself."""

    def length(self, total: float, done: int) -> None:
        """Training begins: `total` steps are planned (0 or less: unknown), `done` are made."""

    def epoch(self, epoch: float) -> None:
        """A batch begins, at so many passes over the data."""

    def report(self, name: str, value: Any) -> None:
        """An evaluation gave this loss, a number or a one-element tensor."""

    def take_order(self) -> Optional[str]:
        """The step is over: return where to save what was ordered, None if nothing was."""

    def steer(
        self,
        call: Callable[[], inspect.BoundArguments],
        parameter: str,
        unfit: Callable[[str], str],
    ) -> Optional[Tuple[Tuple[Any, ...], Dict[str, Any]]]:
        """A call that trains is about to be made: return other arguments for it, None for its own.

        Args:
            call: binds the arguments of the job.
            parameter: the one that names a checkpoint to go on from.
            unfit: why the library cannot go on from this path, "" where it can.
        """

    def began(self, step: int, inexact: str) -> None:
        """The library begins to train, at `step` of its own count.

        Args:
            inexact: what it does not put back of a checkpoint, "" for nothing.
        """
