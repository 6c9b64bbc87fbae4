"""Host memory that grows with every step, as from a list that keeps every loss."""

from __future__ import annotations

from typing import ClassVar, List

from . import Fault, Params


class MemoryCreep(Fault):
    """Keeps more memory in each step, until the fault ends."""

    MEANING = "hold on to more memory in each step"
    MOVES = "host_mem_growth"
    PARAMS: ClassVar[Params] = {
        "megabytes": (1.0, "more in each step"),
        "steps": (300, "for so many steps"),
    }

    def block(self) -> None:
        kept: List[bytes] = self.__dict__.setdefault("kept", [])
        kept.append(b"\1" * int(float(self.params["megabytes"]) * (1 << 20)))
