"""`lr_spike:factor=10,steps=5@150` -> what the probe is told. Faults declare their parameters."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import supervise_probe.faults

from ..errors import UsageError
from .problems import did_you_mean

FORM = "FAULT@STEP or FAULT:name=value,name=value@STEP"


def faults() -> dict[str, dict[str, tuple[float | str, str]]]:
    """Return every fault with its parameters: name -> (default, meaning)."""
    found = {}
    for info in iter_modules(supervise_probe.faults.__path__):
        if not info.name.startswith("_"):
            module = import_module(f"{supervise_probe.faults.__name__}.{info.name}")
            found[info.name] = dict(module.PARAMS)
    return found


def parse(text: str) -> dict[str, Any]:
    """Return `{"fault", "step", "params"}` with every parameter filled in.

    Raises:
        UsageError: no such fault or parameter, or not of this form.
    """
    head, at, step = text.rpartition("@")
    if not at or not step.isdecimal():
        raise UsageError(f"--drill {text!r}: no step", hint=f"write {FORM}, e.g. lr_spike@150")
    name, _, given = head.partition(":")
    known = faults()
    if name not in known:
        raise UsageError(f"--drill {text!r}: no fault {name!r}", hint=did_you_mean(name, known))
    params: dict[str, Any] = {key: default for key, (default, _) in known[name].items()}
    for pair in filter(None, given.split(",")):
        key, equals, value = pair.partition("=")
        if key not in params or not equals:
            hint = did_you_mean(key, params) or f"{name} has no parameters"
            raise UsageError(f"--drill {text!r}: {name} has no parameter {key!r}", hint=hint)
        params[key] = _value(text, key, value, params[key])
    return {"fault": name, "step": int(step), "params": params}


def _value(text: str, key: str, value: str, default: float | str) -> float | str:
    if isinstance(default, str):
        return value
    try:
        return type(default)(value)
    except ValueError:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise UsageError(f"--drill {text!r}: {key} must be {kind}, not {value!r}") from None
