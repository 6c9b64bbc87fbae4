"""Parameters that all ranks hold alike: those that DistributedDataParallel keeps the same.

Behind its backward their gradients are the same on all ranks to the bit, so what is decided by
these alone is decided alike everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, FrozenSet, Set

if TYPE_CHECKING:
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
