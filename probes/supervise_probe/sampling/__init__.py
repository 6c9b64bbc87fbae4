"""What is looked at in one step of many: attention, activations, routing, and copies of weights.

On a step that `schedule.py` calls due, the first forward of the outermost module is watched by
hooks and stand-ins that exist during that one call (`watch.py`); nothing is run twice. Compiled
models cannot be watched that way: there two rows of the input are kept, and go once more through
the original module just before the optimizer steps (`side_forward.py`).

Values stay on their device until `runtime/scalars.py` brings them over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Tuple

from .schedule import Sampling
from .snapshots import Snapshots
from .watch import Sampler, around_forward

if TYPE_CHECKING:
    from ..probe import Probe

__all__ = ["around_forward", "start"]


def start(probe: Probe) -> Tuple[Sampling, Sampler, Snapshots]:
    """Return the plan, what samples forwards, and the copies of weights, of a fresh process."""
    return Sampling(probe), Sampler(probe), Snapshots(probe)
