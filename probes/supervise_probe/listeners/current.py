"""The listeners that the patched functions call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .forward import ForwardListener
    from .loader import LoaderListener
    from .saves import SaveListener
    from .step import StepListener
    from .trainer_events import TrainerEvents


class Listeners:
    """One for the life of the process, since a patch stays; a forked child puts others in.

    Attributes:
        step: backward and the optimizer's step. forward: the outermost module, and losses.
        loader: batches. saves: checkpoints. trainer: what a training library knows.
    """

    __slots__ = ("forward", "loader", "saves", "step", "trainer")

    def __init__(
        self,
        step: StepListener,
        forward: ForwardListener,
        loader: LoaderListener,
        saves: SaveListener,
        trainer: TrainerEvents,
    ) -> None:
        self.put(step, forward, loader, saves, trainer)

    def put(
        self,
        step: StepListener,
        forward: ForwardListener,
        loader: LoaderListener,
        saves: SaveListener,
        trainer: TrainerEvents,
    ) -> None:
        """Call these from now on."""
        self.step, self.forward, self.loader = step, forward, loader
        self.saves, self.trainer = saves, trainer
