"""Attributes of a Python object, read and written without a call of its class.

The few corners of the object model that the rest relies on.
"""

from typing import Any, Dict, List

_EMPTY: Dict[str, Any] = {}  # stands for an attribute that is not there


def attributes(thing: Any) -> Dict[str, Any]:
    """The attributes that the object itself holds, in its dict and in its slots."""
    if isinstance(thing, type):
        return dict(vars(thing))
    own = dict(_held(thing, "__dict__"))
    for name in slots(type(thing)):
        value = _held(thing, name)
        if value is not _EMPTY:
            own[name] = value
    return own


def _held(thing: Any, name: str) -> Any:
    try:
        return object.__getattribute__(thing, name)
    except AttributeError:
        return _EMPTY


def slots(kind: type) -> List[str]:
    """The names of the slots that a class and its bases define."""
    names: List[str] = []
    for base in kind.__mro__:
        own = base.__dict__.get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def set_attribute(thing: Any, name: str, value: Any) -> None:
    """Set what `attributes` reads; works on frozen dataclasses, slots and classes as well."""
    if isinstance(thing, type):
        type.__setattr__(thing, name, value)
        return
    own = _held(thing, "__dict__")
    if own is not _EMPTY and name not in slots(type(thing)):
        own[name] = value
    else:
        object.__setattr__(thing, name, value)
