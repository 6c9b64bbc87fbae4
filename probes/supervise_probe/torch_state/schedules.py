"""Lengths of the parts of a learning-rate schedule, for the schedulers that define them.

A scheduler counts in its own steps, mostly updates, sometimes epochs; so do the lengths here. A
`LambdaLR` is any function, but those of Hugging Face keep their lengths in a `partial`.

Source: torch/optim/lr_scheduler.py; transformers/optimization.py.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional


class Ends(NamedTuple):
    """Where warm-up, stable part and whole schedule end; None where unknown."""

    warm: Optional[float] = None
    stable: Optional[float] = None
    total: Optional[float] = None


def find(schedulers: List[Any], optimizer: Any) -> Any:
    """Return the scheduler whose lengths are known, the outermost one of this optimizer, or None.

    Args:
        schedulers: in order of their making; one made of others comes after them.
    """
    for scheduler in reversed(schedulers):
        served = getattr(scheduler, "optimizer", None)
        served = served if served is optimizer else getattr(served, "optimizer", served)
        if served is optimizer and ends(scheduler) is not None:
            return scheduler
    return None


def ends(scheduler: Any) -> Optional[Ends]:
    """Return the lengths of a scheduler's parts, in its own steps; None where it has none."""
    read = _KINDS.get(type(scheduler).__name__)
    return None if read is None else read(scheduler)


def _of_lambda(scheduler: Any) -> Optional[Ends]:
    known = getattr(scheduler.lr_lambdas[0], "keywords", None)
    if not known or "num_warmup_steps" not in known:
        return None
    warm = known["num_warmup_steps"]
    total, stable = known.get("num_training_steps"), None
    if "num_decay_steps" in known:
        stable = warm + known["num_stable_steps"]
        total = stable + known["num_decay_steps"]
    return Ends(warm, stable, total)


def _of_sequence(scheduler: Any) -> Ends:
    milestones = list(scheduler._milestones)
    last = ends(scheduler._schedulers[-1])
    total = None if last is None or last.total is None else milestones[-1] + last.total
    return Ends(milestones[0], milestones[1] if len(milestones) > 1 else None, total)


def _of_one_cycle(scheduler: Any) -> Ends:
    return Ends(scheduler._schedule_phases[0]["end_step"], None, scheduler.total_steps - 1)


def _of_linear(scheduler: Any) -> Ends:
    if scheduler.start_factor < scheduler.end_factor:
        return Ends(warm=scheduler.total_iters)
    return Ends(total=scheduler.total_iters)


_KINDS: Dict[str, Callable[[Any], Optional[Ends]]] = {
    "LambdaLR": _of_lambda,
    "SequentialLR": _of_sequence,
    "OneCycleLR": _of_one_cycle,
    "LinearLR": _of_linear,
    "CosineAnnealingLR": lambda scheduler: Ends(total=scheduler.T_max),
    "PolynomialLR": lambda scheduler: Ends(total=scheduler.total_iters),
}
