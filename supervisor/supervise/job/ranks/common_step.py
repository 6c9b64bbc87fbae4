"""The next step that all ranks can end together, for what only looks and needs no fence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

from ...errors import SuperviseError
from .pending_command import Rank

LOOKS = ("snapshot",)  # verbs that are of one step where that is possible
TRIP_S = 0.1  # until a letter is read, at most; project default
NONE = -1


def common_step(ranks: Mapping[int, Rank]) -> int:
    """Return the step at whose end all ranks will have read a letter that is sent now, so that they
    can look at the same step; NONE where one of them does not train, or each looks when it can.

    On the main loop only.
    """
    steps, fastest_s = [], math.inf
    for rank in ranks.values():
        step_ns, phase = 0, ""
        with suppress(SuperviseError, OSError):  # a broken segment, told by the poll
            step_ns, phase = rank.step_ns() or 0, rank.beat().phase
        if phase != "step" or not step_ns:
            return NONE
        steps.append(rank.step)
        fastest_s = min(fastest_s, step_ns / 1e9)
    return max(steps) + math.ceil(TRIP_S / fastest_s) if len(steps) > 1 else NONE
