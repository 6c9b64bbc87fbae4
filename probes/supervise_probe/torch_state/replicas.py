"""Parameters that all ranks hold alike: those that DistributedDataParallel keeps the same.

Behind its backward their gradients are the same on all ranks to the bit, so what is decided by
these alone is decided alike everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, Optional, Set

if TYPE_CHECKING:
    from .records import OptimizerInfo
    from .registry import Registry

WRAPPER, SHARDER = "DistributedDataParallel", "FullyShardedDataParallel"


def replicated(registry: Registry) -> Set[int]:
    """Return the ids of parameters that all ranks must have alike; shards of one are not."""
    wrappers = (m for m in registry.modules if type(m).__name__ == WRAPPER)
    parameters = (p for wrapper in wrappers for p in wrapper.parameters())
    return {id(p) for p in parameters if p.numel() and not hasattr(p, "_local_tensor")}


class Replicas:
    """Whether all parameters of an optimizer are replicated; looked up when either changes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._ids: FrozenSet[int] = frozenset()
        self._changes = -1
        self._all = False

    def hold(self, ids: FrozenSet[int]) -> bool:
        """Return whether all of these are, the `ids` of an `OptimizerInfo`."""
        changes = self._registry.modules.changes
        if ids is not self._ids or changes != self._changes:
            self._ids, self._changes = ids, changes
            self._all = ids <= replicated(self._registry)
        return self._all


class Copies:
    """On how many ranks each parameter's gradient is the same: what a job's norm divides by.

    Known of DistributedDataParallel (all ranks), FSDP1 (ranks outside of the group that shares the
    shards), and DTensors (the dimensions of their mesh that replicate). A plain parameter may be a
    replica that the job keeps by hand, or of another pipeline stage: unknown.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._changes = -1
        self._world = 0
        self._by_id: Dict[int, int] = {}
        self._uniform: Dict[FrozenSet[int], Optional[int]] = {}

    def uniform(self, known: OptimizerInfo, world_size: int) -> Optional[int]:
        """Return the number that all parameters of an optimizer share, else None.

        Remembered, since a step may have thousands of them.
        """
        self._look(world_size)
        if known.ids not in self._uniform:
            found = {self._of(parameter, world_size) for parameter in known.params}
            self._uniform[known.ids] = found.pop() if len(found) == 1 else None
        return self._uniform[known.ids]

    def groups(self, params: List[Any], world_size: int) -> Dict[int, List[Any]]:
        """Return `params` by the number of their copies; empty where one's is not known."""
        found: Dict[int, List[Any]] = {}
        self._look(world_size)
        for parameter in params:
            copies = self._of(parameter, world_size)
            if copies is None:
                return {}
            found.setdefault(copies, []).append(parameter)
        return found

    def _look(self, world_size: int) -> None:
        changes = self._registry.modules.changes
        if changes == self._changes and world_size == self._world:
            return
        self._changes, self._world = changes, world_size
        self._uniform.clear()
        self._by_id = dict.fromkeys(replicated(self._registry), world_size)
        for module in self._registry.modules:
            if type(module).__name__ != SHARDER:
                continue
            whole = getattr(module.sharding_strategy, "name", "") == "NO_SHARD"
            copies = world_size if whole else world_size // module.process_group.size()
            self._by_id.update({id(p): copies for p in module.parameters()})

    def _of(self, parameter: Any, world_size: int) -> Optional[int]:
        if not hasattr(parameter, "_local_tensor"):
            return self._by_id.get(id(parameter))
        mesh, copies = parameter.device_mesh, 1
        if mesh.size() != world_size:  # the others may hold other stages of a pipeline
            return None
        for dimension, placement in enumerate(parameter.placements):
            copies *= mesh.size(dimension) if placement.is_replicate() else 1
        return copies
