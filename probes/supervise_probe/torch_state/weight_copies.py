"""On how many ranks each part of the weights lies, so that what all ranks hold adds up to the job.

Asked of the objects that spread the weights, on the host, without a message to another rank: mesh
and placements of a DTensor (FSDP2, tensor parallelism), the process group of FSDP1's flat
parameters, the group of a pipeline. Any other tensor is the same on all ranks, as under
DistributedDataParallel and ZeroRedundancyOptimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Tuple

if TYPE_CHECKING:
    from ..runtime.position import Position
    from .records import Optimizers
    from .registry import Registry

FSDP1 = "FullyShardedDataParallel"


class WeightCopies:
    """Counts the copies of parameters.

    Attributes:
        stages: ranks of a pipeline, which hold different layers; 1 without one.
    """

    def __init__(self, registry: Registry, optimizers: Optimizers, position: Position) -> None:
        self._registry, self._optimizers, self._position = registry, optimizers, position
        self.stages = 1

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self._position.world_size > 1

    def split(self, params: List[Any]) -> List[Tuple[float, List[Any]]]:
        """Return `(copies, parameters)`, one for each number of copies; each only once."""
        known: Dict[int, float] = {}
        for info in self._optimizers.known.values():
            if not info.copies:
                info.copies = self._count(info.params)
            known.update(info.copies)
        if not all(map(known.__contains__, map(id, params))):  # in the first step, of a clip
            known = self._count(params)
        if len(set(known.values())) == 1:
            return [(next(iter(known.values())), params)]
        parts: Dict[float, List[Any]] = {}
        for param in params:
            parts.setdefault(known[id(param)], []).append(param)
        return list(parts.items())

    def batch_copies(self) -> float:
        """Return how many ranks read the same batch: those that split a layer among them."""
        specs = [s for p in self._optimizers.parameters() if (s := getattr(p, "_spec", None))]
        spread = max((spec.mesh.size() for spec in specs), default=1)
        return max(1.0, spread / max(map(_data_parallel, self._registry.modules), default=1))

    def _count(self, params: List[Any]) -> Dict[int, float]:
        ranks = self._position.world_size / self.stages
        flat = self._flat()
        return {id(p): ranks / flat.get(id(p), _shards(p)) for p in params}

    def _flat(self) -> Dict[int, int]:
        """Return into how many parts FSDP1 splits each of its parameters, by id."""
        found: Dict[int, int] = {}
        for module in self._registry.modules:
            handle = getattr(module, "_handle", None) if type(module).__name__ == FSDP1 else None
            if handle is None:
                continue
            parts = handle.world_size if handle.uses_sharded_strategy else 1
            flat = handle.flat_param
            members = (flat, *(flat._params or ()), *(flat._shared_params or ()))
            found.update((id(member), parts) for member in members)
        return found


def _shards(param: Any) -> int:
    """Return into how many parts a DTensor is split; 1 for any other tensor."""
    spec, parts = getattr(param, "_spec", None), 1
    if spec is not None:
        for size, placement in zip(spec.mesh.shape, spec.placements):
            parts *= 1 if placement.is_replicate() else size
    return parts


def _data_parallel(module: Any) -> int:
    """Return over how many ranks FSDP2 spreads the batches of this module; 1 where it does not."""
    state = getattr(module, "_get_fsdp_state", None)
    group = None if state is None else getattr(state(), "_fsdp_param_group", None)
    info = getattr(group, "mesh_info", None)
    sizes = (getattr(info, "shard_mesh_size", 1), getattr(info, "replicate_mesh_size", 1))
    return int(sizes[0] * sizes[1])
