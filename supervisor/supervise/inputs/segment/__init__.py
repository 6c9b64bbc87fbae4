"""The probes' segments as events: one rank (`Segment`), or all ranks of a run (`Segments`)."""

from .cursor import ReadCursor
from .directory import Segments
from .exit_record import recorded_end
from .reader import Ack, Segment

__all__ = ["Ack", "ReadCursor", "Segment", "Segments", "recorded_end"]
