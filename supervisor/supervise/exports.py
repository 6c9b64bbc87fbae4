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
        modules: the names of each module, as an import statement spells them:
            `{"audit": "Audit, read as read_audit"}`.
    """
    origins: dict[str, tuple[str, str]] = {}
    for module, names in modules.items():
        for item in names.split(", "):
            name, _, alias = item.partition(" as ")
            origins[alias or name] = (module, name)

    def attribute_of(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = origins[name]
        return getattr(import_module(f"{package}.{module}"), attribute)

    return attribute_of
