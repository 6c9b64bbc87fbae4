"""Calls of the outermost module, seen without a hook on it.

Hooks are part of a module: they would be pickled with it by `torch.save(model)` and copied into
every `deepcopy`. What is set here instead is `_compiled_call_impl`, which torch itself drops when a
module is copied or saved. Should the object be copied after all, it becomes None.

Source: Module._wrapped_call_impl and Module.__getstate__ in torch/nn/modules/module.py.
"""

from __future__ import annotations

import weakref
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple

from ..runtime.warning_stacklevel import uncounted

if TYPE_CHECKING:
    from ..probe import Probe

SLOT = "_compiled_call_impl"


class RootCall:
    """Stands between the job and one outermost module.

    Args:
        before: told `(root, args, kwargs)` in front of a call with gradients on; returns the
            arguments to use.
    """

    __slots__ = (
        "_before", "_compiled", "_enter", "_is_compiling", "_leave", "_probe", "_root"
    )  # fmt: skip

    def __init__(self, probe: Probe, root: Any, before: Callable[..., Any]) -> None:
        self._probe = probe
        self._root = weakref.ref(root)
        self._before = before
        self._compiled: Optional[Callable[..., Any]] = root.__dict__.get(SLOT)
        self._is_compiling = probe.torch.compiler.is_compiling
        self._enter, self._leave = probe.watching

    @uncounted
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        root = self._root()
        call = self._compiled or root._call_impl  # type: ignore[union-attr]
        probe = self._probe
        if self._is_compiling() or probe.in_forward or probe.off_duty():
            return call(*args, **kwargs)
        if not probe.torch.is_grad_enabled():
            probe.beat("eval")
            return call(*args, **kwargs)
        args, kwargs = self._before(root, args, kwargs)
        sampled = probe.sampling.waiting
        if sampled:
            self._enter(root, self._compiled is not None, args, kwargs)
        probe.in_forward = True
        result = None
        began = monotonic_ns()
        try:
            result = call(*args, **kwargs)
            return result
        finally:
            probe.in_forward = False
            probe.times.forward += monotonic_ns() - began
            if sampled:
                self._leave(result)

    def __copy__(self) -> None:
        return None

    def __deepcopy__(self, memo: Dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(None), ()


def attach(probe: Probe, root: Any, before: Callable[..., Any]) -> None:
    """See the calls of `root` from now on; twice is once."""
    if type(root.__dict__.get(SLOT)) is not RootCall:
        root.__dict__[SLOT] = RootCall(probe, root, before)


def attach_inside(probe: Probe) -> None:
    """The outermost modules are not called: see the calls of what they are wrapped around, too.

    torch.export leaves such a module behind, which holds the model until the garbage is collected.
    """
    for root in probe.registry.roots():
        while root is not None:
            attach(probe, root, probe._before_forward)
            inner = list(root.children())
            root = inner[0] if len(inner) == 1 and not root._parameters else None


def patch_replicas(torch: Any) -> None:
    """Keep DataParallel's replicas, which copy a module's whole dict, from calling the original."""
    original = torch.nn.Module._replicate_for_data_parallel

    def _replicate_for_data_parallel(self: Any) -> Any:
        replica = original(self)
        if type(replica.__dict__.get(SLOT)) is RootCall:
            del replica.__dict__[SLOT]
        return replica

    torch.nn.Module._replicate_for_data_parallel = _replicate_for_data_parallel
