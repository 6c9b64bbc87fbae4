"""On how many ranks each part of the weights lies, so that what all ranks hold adds up to the job.

Asked of the objects that spread the weights, on the host, without a message to another rank: the
mesh and the placements of a DTensor (FSDP2, tensor parallelism), the process group of FSDP1, the
wrapper of DistributedDataParallel. A plain parameter that none of these holds may be a replica that
the job keeps by hand, or of another stage of a pipeline: unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, Optional, Set

if TYPE_CHECKING:
    from ..runtime.reporter import Position
    from .records import OptimizerInfo, Optimizers
    from .registry import Registry

WRAPPER = "DistributedDataParallel"


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


FSDP1 = "FullyShardedDataParallel"


class WeightCopies:
    """Counts the copies of parameters; looked up again when the modules or the ranks change."""

    def __init__(self, registry: Registry, optimizers: Optimizers, position: Position) -> None:
        self._registry, self._optimizers, self._position = registry, optimizers, position
        self._looked = (-1, 0)
        self._by_id: Dict[int, int] = {}
        self._uniform: Dict[FrozenSet[int], Optional[int]] = {}

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self._position.world_size > 1

    def uniform(self, info: OptimizerInfo) -> Optional[int]:
        """Return the number that all parameters of an optimizer share, else None.

        Remembered, since a step may have thousands of them.
        """
        self._look()
        if info.ids not in self._uniform:
            counts = {self._copies_of(parameter) for parameter in info.params}
            self._uniform[info.ids] = counts.pop() if len(counts) == 1 else None
        return self._uniform[info.ids]

    def groups(self, params: List[Any]) -> Dict[int, List[Any]]:
        """Return `params` by the number of their copies; empty where one's is not known."""
        ranks: Dict[int, List[Any]] = {}
        self._look()
        for parameter in params:
            copies = self._copies_of(parameter)
            if copies is None:
                return {}
            ranks.setdefault(copies, []).append(parameter)
        return ranks

    def batch_copies(self) -> float:
        """Return how many ranks read the same batch: those that split a layer among them."""
        meshes = (getattr(p, "device_mesh", None) for p in self._optimizers.parameters())
        spread = max((mesh.size() for mesh in meshes if mesh is not None), default=1)
        return max(1.0, spread / max(map(_data_parallel, self._registry.modules), default=1))

    def _look(self) -> None:
        ranks = self._position.world_size
        state = self._registry.modules.changes, ranks
        if state == self._looked:
            return
        self._looked = state
        self._uniform.clear()
        self._by_id = dict.fromkeys(replicated(self._registry), ranks)
        for module in self._registry.modules:
            if type(module).__name__ == FSDP1:
                is_whole = getattr(module.sharding_strategy, "name", "") == "NO_SHARD"
                copies = ranks if is_whole else ranks // module.process_group.size()
                self._by_id.update({id(p): copies for p in module.parameters()})

    def _copies_of(self, parameter: Any) -> Optional[int]:
        if not hasattr(parameter, "_local_tensor"):
            return self._by_id.get(id(parameter))
        mesh, copies = parameter.device_mesh, 1
        if mesh.size() != self._position.world_size:  # others may hold other stages of a pipeline
            return None
        for dimension, placement in enumerate(parameter.placements):
            copies *= mesh.size(dimension) if placement.is_replicate() else 1
        return copies


def _data_parallel(module: Any) -> int:
    """Return over how many ranks FSDP2 spreads the batches of this module; 1 where it does not."""
    state = getattr(module, "_get_fsdp_state", None)
    group = None if state is None else getattr(state(), "_fsdp_param_group", None)
    info = getattr(group, "mesh_info", None)
    sizes = (getattr(info, "shard_mesh_size", 1), getattr(info, "replicate_mesh_size", 1))
    return int(sizes[0] * sizes[1])
