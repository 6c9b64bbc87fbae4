"""Calls of the outermost module and of the optimizer, which the probe stands around or sees.

Hooks are part of a module: they would be pickled with it by `torch.save(model)` and copied into
every `deepcopy`. What is set here instead is `_compiled_call_impl`, which torch itself drops when a
module is copied or saved. Should the object be copied after all, it becomes None.

`Optimizer.profile_hook_step` is what torch wraps around the `step` of every optimizer class. The
public step hooks would not do: they cannot skip, do not run when a step raises, and run twice where
one class calls the step of another.

Source: Module._wrapped_call_impl and Module.__getstate__ in torch/nn/modules/module.py.
"""

from __future__ import annotations

import functools
import weakref
from sys import _getframe
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

from ..runtime.guard import Hidden, hidden_from_stacklevel, hide_from_compiler, return_unchanged
from ..torch_state.records import SkipUpdate, Update

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
        call = root.__dict__.get(SLOT)
        self._compiled: Optional[Callable[..., Any]] = (
            call._compiled if type(call) is RootCall else call
        )
        self._is_compiling = around.torch.compiler.is_compiling

    @hidden_from_stacklevel
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        root = self._root()
        if not self._is_compiling():
            caller: Any = _getframe(1).f_locals.get("self")
            if caller is not root and self._is_of(caller):
                return (self._compiled or caller._call_impl)(*args, **kwargs)
        call = self._compiled or root._call_impl  # type: ignore[union-attr]
        if self._is_compiling() or self._gate.in_forward or self._gate.must_skip_hook():
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

    def _is_of(self, module: Any) -> bool:
        """Whether `module` holds this: a copy of the root's `__dict__` does, as of MAML's clones.

        Of these nothing else is known than that they called, so that the calling frame tells.
        """
        is_module = issubclass(type(module), self._around.torch.nn.Module)
        return is_module and module.__dict__.get(SLOT) is self

    def __copy__(self) -> None:
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def watch_calls(root: Any, around: Around) -> None:
    """See the calls of `root` from now on; twice is once."""
    call = root.__dict__.get(SLOT)
    if type(call) is not RootCall or call._root() is not root:  # of the module it was copied from
        root.__dict__[SLOT] = RootCall(root, around)


def attach_to_wrapped_modules(registry: Registry, around: Around) -> None:
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


def patch_optimizer(
    torch: Any, gate: Gate, times: Times, listeners: Listeners, hidden: Hidden
) -> None:
    """See every `optimizer.step()` of every class that is used for the first time from now on."""
    original = torch.optim.Optimizer.__dict__["profile_hook_step"].__func__
    around, shy = (
        _around(torch, gate, times, listeners, hide_from)
        for hide_from in (return_unchanged, hidden)
    )

    def profile_hook_step(function: Callable[..., Any]) -> Any:
        inner = original(function)
        return functools.wraps(inner)(
            hide_from_compiler(torch, shy(inner), recursive=False, plain=around(inner))
        )

    torch.optim.Optimizer.profile_hook_step = staticmethod(profile_hook_step)


def _around(
    torch: Any, gate: Gate, times: Times, listeners: Listeners, hidden: Hidden
) -> Callable[..., Any]:
    """Return what makes of an optimizer's `step` ours."""

    @hidden
    def before_step(optimizer: Any, closure: bool) -> Any:
        return listeners.step.before_step(optimizer, closure)

    @hidden
    def measure(update: Update) -> None:
        listeners.step.measure(update)

    @hidden
    def limit(update: Update) -> None:
        listeners.step.limit(update)

    @hidden
    def restore() -> None:
        listeners.step.restore_rate()

    @hidden
    def after_step(update: Update) -> None:
        listeners.step.after_step(update)

    @hidden
    def claims() -> bool:
        return listeners.step.claim_first_step()

    @hidden
    def unseen(optimizer: Any) -> None:
        listeners.step.on_unwatched_step(optimizer)

    def first_evaluation(update: Update, closure: Callable[..., Any]) -> Callable[..., Any]:
        @hidden_from_stacklevel
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            result = closure(*args, **kwargs)
            if not update.measured:
                measure(update)
                if update.skip:
                    update.result = result
                    raise SkipUpdate
            else:
                limit(update)
            return result

        return evaluate

    @hidden_from_stacklevel
    def skip(update: Update, closure: Optional[Callable[..., Any]]) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():  # the batch is used up and the caller gets its loss
            result = closure()
        if not update.measured:
            measure(update)
        return result

    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        @hidden_from_stacklevel
        def step(*args: Any, **kwargs: Any) -> Any:
            if gate.inside or (gate.must_bypass() and not claims()):
                result = inner(*args, **kwargs)
                unseen(args[0])
                return result
            optimizer = args[0]
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            closure = closure if callable(closure) else None
            gate.inside = True
            update: Optional[Update] = None
            try:
                update = before_step(optimizer, closure is not None)
                if update is None:
                    return inner(*args, **kwargs)
                listener = listeners.step
                if listener.drills.active:
                    listener.drills.block()
                began, apart = monotonic_ns(), times.inside()
                if update.skip:
                    result = skip(update, closure)
                else:
                    if closure is not None:
                        loss = first_evaluation(update, closure)
                        if "closure" in kwargs:
                            kwargs = {**kwargs, "closure": loss}
                        else:
                            args = (optimizer, loss, *args[2:])
                    try:
                        result = inner(*args, **kwargs)
                    except SkipUpdate:
                        result = update.result
                elapsed = monotonic_ns() - began - (times.inside() - apart)
                times.optimizer += elapsed
            except BaseException:
                if update is not None:
                    listeners.step.abandon(update)
                raise
            finally:
                if listeners.step.rate.is_scaled:
                    restore()
                gate.inside = False
            after_step(update)
            listeners.step.boundary.run_due_work()
            return result

        return step

    return around
