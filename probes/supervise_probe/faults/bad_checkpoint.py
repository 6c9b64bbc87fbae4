"""A checkpoint that is damaged on its way to the disk."""

from __future__ import annotations

import os
from typing import ClassVar

from . import Fault, Params


class BadCheckpoint(Fault):
    """Acts once, at the first checkpoint that the job saves while it acts."""

    MEANING = "damage the next checkpoint, once"
    PARAMS: ClassVar[Params] = {
        "how": ("flip", "flip (one byte in its middle), truncate (to half) or remove"),
        "steps": (100000, "waits for so many steps"),
    }

    _done = False

    def after_save(self, path: str) -> None:
        if self._done or not os.path.isfile(path):
            return
        self._done = True
        size, how = os.path.getsize(path), self.params["how"]
        if how == "remove":
            os.unlink(path)
        elif how == "truncate":
            os.truncate(path, size // 2)
        else:
            with open(path, "r+b") as file:
                file.seek(size // 2)
                byte = file.read(1)[0]
                file.seek(size // 2)
                file.write(bytes((byte ^ 0x40,)))
