"""The supervisor of one run, its parts put together.

`settings` is what a run is started with, `launcher` starts the job, `event_processor` turns events
into decisions and these into deeds, `loop` reads everything in its turn for as long as the job
lives, `foreground` is what the main thread does meanwhile.
"""

from .foreground import Foreground
from .loop import App
from .run_status import closed
from .settings import Settings

__all__ = ["App", "Foreground", "Settings", "closed"]
