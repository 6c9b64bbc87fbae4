"""Package faces: the names that a package offers, imported when one of them is asked for.

A command of the supervisor imports only what it uses (`supervise run` starts before the engine of a
back-test is needed), so a face must not import its whole package (PEP 562).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: its `__name__`.
        modules: the names of each module: `{"audit": "Audit, read_audit"}`.
    """
    origins = {name: module for module, names in modules.items() for name in names.split(", ")}

    def attribute_of(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{origins[name]}"), name)

    return attribute_of
