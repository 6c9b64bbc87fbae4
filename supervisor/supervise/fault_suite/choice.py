"""Drills of a suite, and the runs that they need, in their order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .findings import Drill

# Not by default, as a few hundred steps of one process show nothing of them, or end in the middle.
ASKED_FOR = {
    "bad_checkpoint": "a checkpoint is only read by a run that resumes",
    "blackout": "nothing happens to the job",
    "crash": "the run is not started again in a suite",
    "hang": "the run stands still until it is ended",
    "memory_creep": "growth is measured over minutes",
    "same_batch": "it needs several ranks",
}
UNATTENDED, ACTING, HEALTHY = "unattended", "acting", "healthy"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a suite. `drill` is None for a healthy one; `acting`: the policy may act."""

    drill: Drill | None
    seed: int
    acting: bool

    @property
    def name(self) -> str:
        """A name for its files, another one for each run of a suite."""
        if self.drill is None:
            return f"{HEALTHY}-{self.seed}"
        safe = re.sub(r"[^A-Za-z0-9_.=]+", "-", self.drill.text)
        return f"{safe}-{self.seed}-{ACTING if self.acting else UNATTENDED}"


def by_default(known: Iterable[str]) -> list[str]:
    """Return the faults that a suite tries without being asked for any."""
    return [name for name in known if name not in ASKED_FOR]


def waves(
    drills: Iterable[Drill], seeds: int, healthy: int, acts: bool
) -> tuple[list[PlannedRun], list[PlannedRun], list[PlannedRun]]:
    """Return the runs in three waves.

    The healthy ones show how long a run takes, the first seed which faults cannot act on the job.

    Args:
        healthy: healthy runs, one per seed from 1 on; at least `seeds`.
        acts: whether the policy may act; then a healthy run shows false actions, too.
    """
    drills = list(drills)
    first = [PlannedRun(None, seed, acts) for seed in range(1, max(seeds, healthy) + 1)]
    second = [PlannedRun(drill, 1, False) for drill in drills]
    third = [PlannedRun(drill, 1, True) for drill in drills] if acts else []
    for seed in range(2, seeds + 1):
        for drill in drills:
            third.append(PlannedRun(drill, seed, False))
            third += [PlannedRun(drill, seed, True)] if acts else []
    return first, second, third


def without_refused(refused: Mapping[str, str], planned: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Return the runs whose fault was not refused."""
    return [one for one in planned if one.drill is None or one.drill.text not in refused]


def clashes(drills: Iterable[Drill]) -> list[str]:
    """Return the faults whose files would be called like those of one before them."""
    names: dict[str, str] = {}
    found = []
    for drill in drills:
        name = PlannedRun(drill, 1, acting=False).name
        if names.setdefault(name, drill.text) != drill.text:
            found.append(drill.text)
    return found
