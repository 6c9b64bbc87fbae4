"""Open files and queues that a job reads from: whether they were read since the savepoint.

They are not rewound. A file that is written, and a queue without tensors, are not data.
"""

import io
import queue
from typing import Any, Callable, Optional

from ..runtime.object_access import find
from .captured_values import IdentityRef
from .type_classes import TypeClasses

FILES = (io.BufferedReader, io.TextIOWrapper, io.FileIO)
_QUEUES = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)


class SavedSource(IdentityRef):
    """An open file or a queue that the job reads from."""

    __slots__ = ("_is_data", "_torch")

    def __init__(self, value: Any, stamp: Callable[[Any], Any], torch: Any) -> None:
        super().__init__(value, stamp=stamp)
        self._torch = torch
        self._is_data = _holds_data(value, torch)

    def obstacle(self, live: Any, keep: bool) -> str:
        """See `iterators.SavedIterator.obstacle`."""
        value = find(self.reference, self.id, live)
        if keep or value is None or self.stamp is None:
            return ""
        now, then = self.stamp[0](value), self.stamp[1]
        if now is None or then is None or now == then:
            return ""
        if not self._is_data and not _holds_data(value, self._torch):
            return ""
        return f"the {self.type} was read since the savepoint, and it cannot be rewound"


def saved_source(value: Any, kinds: TypeClasses, torch: Any) -> Optional[SavedSource]:
    """Return the saved state of a file that is only read, or of a queue; else None."""
    if type(value) in FILES and file_position(value) is not None:
        return SavedSource(value, file_position, torch)
    return SavedSource(value, kinds.stamp, torch) if type(value) in _QUEUES else None


def file_position(file: Any) -> Optional[int]:
    """Return the position of a file that is only read; None where it is not known."""
    try:
        if file.writable() or not file.seekable():
            return None
        return int(file.tell())
    except OSError:  # text that is being iterated: position of the chunk
        buffer = getattr(file, "buffer", None)
        return file_position(buffer) if buffer is not None else None
    except Exception:  # closed, or in use by another thread
        return None


def _holds_data(live: Any, torch: Any) -> bool:
    """Whether it is a file, or a queue whose next item holds tensors or arrays."""
    if type(live) in FILES:
        return True
    try:
        first = live.queue[0]
    except IndexError:
        return False
    parts = first if type(first) in (tuple, list) else [first]
    parts = list(dict.values(first)) if isinstance(first, dict) else parts
    return any(isinstance(each, torch.Tensor) or hasattr(type(each), "__array__") for each in parts)
