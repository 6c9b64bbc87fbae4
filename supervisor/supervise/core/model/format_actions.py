"""Actions with their arguments in words, as messages to people have them. Pure text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from .checkpoint_registry import WEIGHTS_ONLY
from .payload import EndArgs, Payload, QuarantineArgs, RateArgs, RelaunchArgs, Rewarm, RollbackArgs


def plan(steps: Iterable[tuple[str, Payload]]) -> str:
    """Return `(verb, arguments)` of each step as one line."""
    return ", ".join(describe(verb, args) for verb, args in steps)


def describe(verb: str, args: Payload) -> str:
    """Return one action in words; one that has none by its name and its arguments."""
    form = FORMS.get(verb)
    if form is not None:
        return form(args)
    shown = ", ".join(f"{key} {value}" for key, value in args.items() if value is not None)
    return f"{verb} ({shown})"[:160] if shown else verb


def _rollback(args: Payload) -> str:
    order = args.parse(RollbackArgs)
    return f"restore the weights from before step {order.before_step}{_ramp(order.rewarm)}"


def _relaunch(args: Payload) -> str:
    order = args.parse(RelaunchArgs)
    text = f"start the job again from the checkpoint of step {order.step}"
    if order.resumable == WEIGHTS_ONLY:
        text += ", which holds weights only: the optimizer starts from nothing"
    return text + _ramp(order.rewarm)


def _hold_rate(args: Payload) -> str:
    order = args.parse(RateArgs)
    if order.lift:
        return "hold the learning rate no more"
    if order.limit is not None:
        harm = f", as {order.harmful:.3g} did the harm"
        return f"hold the learning rate at {order.limit:.3g} at most{harm}"
    return f"hold the learning rate at its level from before step {order.before_step}"


def _pause(args: Payload) -> str:
    lease_s = args.parse(EndArgs).lease_s
    return "pause" if lease_s is None else f"pause (at most {lease_s:g} s)"


def _ramp(rewarm: Rewarm | None) -> str:
    if rewarm is None or not rewarm.steps:
        return ""
    return f", raise the learning rate from {rewarm.start:.0%} to 100% over {rewarm.steps} steps"


FORMS: Mapping[str, Callable[[Payload], str]] = {
    "pause": _pause,
    "resume": lambda args: "resume",
    "rollback": _rollback,
    "relaunch": _relaunch,
    "stop": lambda args: "stop the job",
    "lr_scale": lambda args: f"multiply the learning rate by {args.get('value')}",
    "hold_rate": _hold_rate,
    "check_weights": lambda args: "compare the loss of the probe batch with that before",
    "skip_step": lambda args: f"skip the next {args.get('count')} updates",
    "quarantine": lambda args: f"leave out shards {', '.join(args.read(QuarantineArgs).shards)}",
}
