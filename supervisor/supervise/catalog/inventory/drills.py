"""`lr_spike:factor=10,steps=5@150` to a drill of the probe. Faults declare their parameters."""

from __future__ import annotations

from typing import Any

from supervise_probe import faults

from ...errors import UsageError
from ..document.diagnostics import did_you_mean

RANK = "rank"  # a parameter of every fault: the only rank that it strikes
FORM = "FAULT@STEP or FAULT:name=value,name=value@STEP"


def parse(text: str) -> dict[str, Any]:
    """Return `{"fault", "step", "params"}` with every parameter filled in, and `rank` if given.

    Raises:
        UsageError: no such fault or parameter, or not of this form.
    """
    head, at, step = text.rpartition("@")
    if not at or not step.isdecimal():
        raise UsageError(f"--drill {text!r}: no step", hint=f"write {FORM}, e.g. lr_spike@150")
    name, _, given = head.partition(":")
    known = faults.catalog()
    if name not in known:
        raise UsageError(f"--drill {text!r}: no fault {name!r}", hint=did_you_mean(name, known))
    params: dict[str, str] = {}
    rank = None
    for pair in filter(None, given.split(",")):
        key, equals, value = pair.partition("=")
        if key == RANK and value.isdecimal():
            rank = int(value)
            continue
        if key not in known[name].PARAMS or not equals:
            hint = did_you_mean(key, known[name].PARAMS) or f"{name} has no parameters"
            raise UsageError(f"--drill {text!r}: {name} has no parameter {key!r}", hint=hint)
        params[key] = value
    try:
        order = {"fault": name, "step": int(step), "params": faults.complete(name, params)}
        return order if rank is None else {**order, RANK: rank}
    except ValueError as error:
        raise UsageError(f"--drill {text!r}: {error}") from None


def describe() -> list[dict[str, Any]]:
    """Return each fault: what it does, the metric that it moves, its parameters and defaults."""
    return [
        {
            "drill": name,
            "does": fault.MEANING,
            "moves": fault.MOVES or None,
            "parameters": {
                key: {"default": default, "meaning": meaning}
                for key, (default, meaning) in fault.PARAMS.items()
            },
        }
        for name, fault in faults.catalog().items()
    ]
