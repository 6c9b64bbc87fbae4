"""Calls of the outermost module, seen without a hook on it.

Hooks are part of a module: they would be pickled with it by `torch.save(model)` and copied into
every `deepcopy`. What is set here instead is `_compiled_call_impl`, which torch itself drops when a
module is copied or saved. Should the object be copied after all, it becomes None.

Source: Module._wrapped_call_impl and Module.__getstate__ in torch/nn/modules/module.py.
"""

from __future__ import annotations

import weakref
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, Dict, NamedTuple, Optional, Tuple

from ..runtime.guard import hidden_from_stacklevel, hide_from_compiler

if TYPE_CHECKING:
    from ..runtime.guard import Gate
    from ..torch_state.records import Times
    from ..torch_state.registry import Registry
    from .listeners import Listeners

SLOT = "_compiled_call_impl"


class Around(NamedTuple):
    """What stands around each call of an outermost module.

    Attributes:
        before: given `(root, args, kwargs)` in front of a call with gradients on; returns the
            arguments to use.
        enter: given `(root, compiled, args, kwargs)` in front of one that is sampled. leave: given
            its result behind it.
        output, evaluation: while a drill is on: given the result behind a call with gradients on;
            as `before`, in front of one without.
    """

    torch: Any
    gate: Gate
    times: Times
    listeners: Listeners
    enter_root: Callable[..., Any]
    enter: Callable[..., Any]
    leave: Callable[..., Any]
    output: Callable[..., Any]
    evaluation: Callable[..., Any]


def make_around(torch: Any, gate: Gate, times: Times, listeners: Listeners) -> Around:
    """Return what `attach` takes; torch.compile does not look into it."""

    def enter_root(*args: Any) -> Any:
        return listeners.forward.before_forward(*args)

    def enter(*args: Any) -> None:
        listeners.forward.before_sampled_forward(*args)

    def leave(result: Any) -> None:
        listeners.forward.leave(result)

    def output(result: Any) -> None:
        listeners.forward.drills.output(result)

    def evaluation(*args: Any) -> Any:
        return listeners.forward.before_evaluation(*args)

    calls = (
        hide_from_compiler(torch, function)
        for function in (enter_root, enter, leave, output, evaluation)
    )
    return Around(torch, gate, times, listeners, *calls)


class RootCall:
    """Stands between the job and one outermost module."""

    __slots__ = ("_around", "_compiled", "_gate", "_is_compiling", "_root")

    def __init__(self, root: Any, around: Around) -> None:
        self._root = weakref.ref(root)
        self._around, self._gate = around, around.gate
        self._compiled: Optional[Callable[..., Any]] = root.__dict__.get(SLOT)
        self._is_compiling = around.torch.compiler.is_compiling

    @hidden_from_stacklevel
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        root = self._root()
        call = self._compiled or root._call_impl  # type: ignore[union-attr]
        if self._is_compiling() or self._gate.in_forward or self._gate.off_duty():
            return call(*args, **kwargs)
        gate, around = self._gate, self._around
        listener = around.listeners.forward
        if not around.torch.is_grad_enabled():
            listener.evaluates(root)
            if listener.drills.active:
                args, kwargs = around.evaluation(root, args, kwargs)
            return call(*args, **kwargs)
        args, kwargs = around.enter_root(root, args, kwargs)
        sampled = listener.sets.waiting
        if sampled:
            around.enter(root, self._compiled is not None, args, kwargs)
        gate.in_forward = True
        result = None
        began = monotonic_ns()
        try:
            result = call(*args, **kwargs)
            if listener.drills.active:
                around.output(result)
            return result
        finally:
            gate.in_forward = False
            around.times.forward += monotonic_ns() - began
            if sampled:
                around.leave(result)

    def __copy__(self) -> None:
        return None

    def __deepcopy__(self, memo: Dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(None), ()


def watch_calls(root: Any, around: Around) -> None:
    """See the calls of `root` from now on; twice is once."""
    if type(root.__dict__.get(SLOT)) is not RootCall:
        root.__dict__[SLOT] = RootCall(root, around)


def attach_inside(registry: Registry, around: Around) -> None:
    """The outermost modules are not called: see the calls of what they are wrapped around, too.

    torch.export leaves such a module behind, which holds the model until the garbage is collected.
    """
    for root in registry.roots():
        while root is not None:
            watch_calls(root, around)
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
