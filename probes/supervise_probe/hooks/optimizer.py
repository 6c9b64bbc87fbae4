"""The optimizer's step: the one place where the probe stands around a call of the job.

`Optimizer.profile_hook_step` is what torch wraps around the `step` of every optimizer class. The
public step hooks would not do: they cannot skip, do not run when a step raises, and run twice where
one class calls the step of another.
"""

from __future__ import annotations

import functools
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, Optional

from ..runtime.guard import Hidden, hidden_from_stacklevel, hide_from_compiler, return_unchanged
from ..torch_state.records import SkipUpdate, Update

if TYPE_CHECKING:
    from ..runtime.guard import Gate
    from ..torch_state.records import Times
    from .listeners import Listeners


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
        return listeners.step.steps_first()

    @hidden
    def unseen(optimizer: Any) -> None:
        listeners.step.stepped_unseen(optimizer)

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
            if gate.inside or (gate.absent() and not claims()):
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
                if listeners.step.rate.changed:
                    restore()
                gate.inside = False
            after_step(update)
            listeners.step.boundary.cross()
            return result

        return step

    return around
