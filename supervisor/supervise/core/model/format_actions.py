"""Actions with their arguments in words, as messages to people have them. Pure text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .checkpoint_registry import WEIGHTS_ONLY

Args = Mapping[str, Any]


def plan(steps: Iterable[tuple[str, Args]]) -> str:
    """Return `(verb, arguments)` of each step as one line."""
    return ", ".join(describe(verb, args) for verb, args in steps)


def describe(verb: str, args: Args) -> str:
    """Return one action in words; one that has none by its name and its arguments."""
    form = FORMS.get(verb)
    if form is not None:
        return form(args)
    shown = ", ".join(f"{key} {value}" for key, value in args.items() if value is not None)
    return f"{verb} ({shown})"[:160] if shown else verb


def _rollback(args: Args) -> str:
    text = f"restore the weights from before step {args.get('before_step', '?')}"
    return text + _ramp(args.get("rewarm"))


def _relaunch(args: Args) -> str:
    text = f"start the job again from the checkpoint of step {args.get('step', '?')}"
    if args.get("resumable") == WEIGHTS_ONLY:
        text += ", which holds weights only: the optimizer starts from nothing"
    return text + _ramp(args.get("rewarm"))


def _hold_rate(args: Args) -> str:
    if args.get("lift"):
        return "hold the learning rate no more"
    if "limit" in args:
        harm = f", as {args['harmful']:.3g} did the harm"
        return f"hold the learning rate at {args['limit']:.3g} at most{harm}"
    return f"hold the learning rate at its level from before step {args.get('before_step', '?')}"


def _ramp(rewarm: Any) -> str:
    if not isinstance(rewarm, Mapping) or not rewarm.get("steps"):
        return ""
    start = float(rewarm.get("start", 0.0))
    return f", raise the learning rate from {start:.0%} to 100% over {rewarm['steps']} steps"


FORMS: Mapping[str, Callable[[Args], str]] = {
    "pause": lambda args: (
        f"pause (at most {args['lease_s']:g} s)" if "lease_s" in args else "pause"
    ),
    "resume": lambda args: "resume",
    "rollback": _rollback,
    "relaunch": _relaunch,
    "stop": lambda args: "stop the job",
    "lr_scale": lambda args: f"multiply the learning rate by {args.get('value')}",
    "hold_rate": _hold_rate,
    "check_weights": lambda args: "compare the loss of the probe batch with that before",
    "skip_step": lambda args: f"skip the next {args.get('count')} updates",
    "quarantine": lambda args: f"leave out shards {', '.join(args.get('shards', ()))}",
}
