"""Open files and queues that a job reads from: whether they have gone on.

They are not set back. A file that is written to, as a log, and a queue of words are nobody's data.
"""

import io
import queue
from typing import Any, Callable, Optional

from ..runtime.object_access import find
from .captured_values import Other
from .type_classes import Kinds

FILES = (io.BufferedReader, io.TextIOWrapper, io.FileIO)
_QUEUES = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)


class Source(Other):
    """An open file or a queue that the job reads from."""

    __slots__ = ("_is_data", "_torch")

    def __init__(self, value: Any, stamp: Callable[[Any], Any], torch: Any) -> None:
        super().__init__(value, stamp=stamp)
        self._torch = torch
        self._is_data = self._holds_data(value)

    def trouble(self, live: Any, keep: bool) -> str:
        """See `iterators.Stream.trouble`."""
        value = find(self.reference, self.id, live)
        if keep or value is None or self.stamp is None:
            return ""
        now, then = self.stamp[0](value), self.stamp[1]
        if now is None or then is None or now == then:
            return ""
        if not self._is_data and not self._holds_data(value):
            return ""
        return f"the {self.type} has gone on since the savepoint, and it cannot be rewound"

    def _holds_data(self, live: Any) -> bool:
        return type(live) in FILES or _holds_data(live, self._torch)


def source_of(value: Any, kinds: Kinds, torch: Any) -> Optional[Source]:
    """Return what is remembered of a file that is only read, or of a queue; else None."""
    if type(value) in FILES and position(value) is not None:
        return Source(value, position, torch)
    return Source(value, kinds.stamp, torch) if type(value) in _QUEUES else None


def position(file: Any) -> Optional[int]:
    """Return where a file that is only read stands; None where that cannot be told."""
    try:
        if file.writable() or not file.seekable():
            return None
        return int(file.tell())
    except OSError:  # text that is being iterated: told by the chunk
        buffer = getattr(file, "buffer", None)
        return position(buffer) if buffer is not None else None
    except Exception:  # closed, or in use by another thread
        return None


def _holds_data(live: Any, torch: Any) -> bool:
    """Whether the next thing in a queue has tensors or arrays: it is not one of words to log."""
    try:
        first = live.queue[0]
    except IndexError:
        return False
    parts = first if type(first) in (tuple, list) else [first]
    parts = list(dict.values(first)) if isinstance(first, dict) else parts
    return any(isinstance(each, torch.Tensor) or hasattr(type(each), "__array__") for each in parts)
