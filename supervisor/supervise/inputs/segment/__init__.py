"""The probes' segments as events: one rank (`Segment`), or all ranks of a run (`Segments`)."""

from .directory import Segments
from .reader import Ack, Segment

__all__ = ["Ack", "Segment", "Segments"]
