"""Package faces: the names that a package offers, imported when one of them is asked for.

A command of the supervisor imports only what it uses (`supervise run` starts before the engine of a
back-test is needed), so a face must not import its whole package (PEP 562).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")
_offers: dict[str, tuple[str, ...]] = {}


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: its `__name__`.
        modules: the names of each module: `{"audit": "Audit, read_audit"}`.
    """
    origins = {name: module for module, names in modules.items() for name in names.split(", ")}
    _offers[package] = tuple(origins)

    def attribute_of(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{origins[name]}"), name)

    return attribute_of


def offered_names(package: str) -> tuple[str, ...]:
    """Return the names that the face of a package offers."""
    return _offers[package]


class LazyClasses(Mapping[str, type[T]]):
    """Classes by the names that a policy has for them, imported when they are asked for.

    Args:
        package: whose face offers them. attributes: name in a policy -> name of the class.
    """

    def __init__(self, package: str, attributes: Mapping[str, str]) -> None:
        self._package, self._attributes = package, attributes
        self._classes: dict[str, type[T]] = {}

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._classes:
            attribute = self._attributes[name]
            self._classes[name] = getattr(import_module(self._package), attribute)
        return self._classes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._attributes

    def __iter__(self) -> Iterator[str]:
        return iter(self._attributes)

    def __len__(self) -> int:
        return len(self._attributes)
