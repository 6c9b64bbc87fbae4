"""The listeners that the patched functions and the adapters call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..checkpoints.resume import Resume
    from ..collectors.framework import Collector as FrameworkCollector
    from .forward import ForwardListener
    from .loader import LoaderListener
    from .saves import SaveListener
    from .step import StepListener


class TrainerListener:
    """What an adapter may report of the library whose loop trains.

    All is called between two steps, in the thread that trains.
    """

    def __init__(self, library: FrameworkCollector, resume: Resume) -> None:
        self.trained_by, self.length = library.trained_by, library.length
        self.ended = library.ended
        self.epoch, self.report = library.epoch, library.report
        self.take_order = library.take_order
        self.steer, self.began = resume.steer, resume.began


class Listeners:
    """One for the life of the process, since a patch stays; a forked child puts others in.

    Attributes:
        step: backward and the optimizer's step. forward: the outermost module, and losses.
        loader: batches. saves: checkpoints. trainer: what a training library knows.
    """

    __slots__ = ("forward", "loader", "saves", "step", "trainer")

    step: StepListener
    forward: ForwardListener
    loader: LoaderListener
    saves: SaveListener
    trainer: TrainerListener
