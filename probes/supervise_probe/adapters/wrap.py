"""Wrappers that put an adapter beside or around a function of its library."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional, Tuple

from ..patches import saves
from ..runtime.warning_stacklevel import uncounted

if TYPE_CHECKING:
    from ..listeners.current import Listeners
    from ..runtime.gate import Gate
    from ..runtime.guard import Guard
    from ..runtime.times import Times


class Hold(NamedTuple):
    """What an adapter is given; it stays the same for the life of the process."""

    gate: Gate
    guard: Guard
    times: Times
    listeners: Listeners


def beside(
    hold: Hold, original: Callable[..., Any], observe: Callable[..., None], name: str = "framework"
) -> Callable[..., Any]:
    """Return a function that calls `observe` with the same arguments, and then `original`.

    Args:
        name: of the part of the probe whose numbers are wrong if `observe` fails.
    """
    gate, guard, part = hold.gate, hold.guard, hold.guard.part(name)

    def hear(args: Any, kwargs: Any) -> None:
        observe(*args, **kwargs)

    @functools.wraps(original)
    @uncounted
    def call(*args: Any, **kwargs: Any) -> Any:
        if not gate.off_duty():
            guard.run(part, hear, args, kwargs)
        return original(*args, **kwargs)

    return call


def around_save(
    hold: Hold, original: Callable[..., Any], what: Callable[..., Tuple[str, Optional[int]]]
) -> Callable[..., Any]:
    """Return a function that saves a checkpoint in the phase of that name, and reports it.

    Args:
        what: given the same arguments once it is saved, returns its path and the library's count of
            steps if it has one; an empty path where another rank reports it.
    """

    def saved(seconds: float, args: Any, kwargs: Any) -> None:
        hold.listeners.saves.saved_by_library(seconds, functools.partial(what, *args, **kwargs))

    part = hold.guard.part("framework")
    return saves.in_phase(hold.gate, hold.guard, hold.listeners, original, part, saved)


def resuming(
    hold: Hold, original: Callable[..., Any], parameter: str, unfit: Callable[[str], str]
) -> Callable[..., Any]:
    """Return `original`, a call that trains, which is given the checkpoint to go on from.

    Raises:
        AttributeError: it takes no such parameter; nothing was replaced.
    """
    signature = inspect.signature(original)
    if parameter not in signature.parameters:
        raise AttributeError(f"{original.__qualname__} takes no {parameter}")
    guard, part = hold.guard, hold.guard.part("framework")

    @functools.wraps(original)
    @uncounted
    def train(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(signature.bind, *args, **kwargs)
        steered = guard.run(part, hold.listeners.trainer.steer, call, parameter, unfit)
        if steered is not None:
            args, kwargs = steered
        return original(*args, **kwargs)

    return train
