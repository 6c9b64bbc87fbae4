"""The probes' segments as events: one rank (`Segment`), or all ranks of a run (`Segments`)."""

from .directory import Segments
from .ending import recorded_end
from .reader import Ack, Segment
from .taken import Taken

__all__ = ["Ack", "Segment", "Segments", "Taken", "recorded_end"]
