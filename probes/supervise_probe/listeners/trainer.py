"""The events of a trainer, on their way to those who want them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..checkpoints.resume import Resume
    from ..collectors.framework import Collector as FrameworkCollector


class TrainerListener:
    """One for each process: implements `TrainerEvents`."""

    def __init__(self, library: FrameworkCollector, resume: Resume) -> None:
        self.trained_by, self.length = library.trained_by, library.length
        self.epoch, self.report = library.epoch, library.report
        self.take_order = library.take_order
        self.steer, self.began = resume.steer, resume.began
