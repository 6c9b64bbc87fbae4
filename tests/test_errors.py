"""The tree in the docstring of errors.py is the documentation, so it has to be true."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re

import supervise
from supervise import errors


def drawn() -> dict[str, str | None]:
    """Return each name in the drawing with the name that it hangs from."""
    parents: dict[str, str | None] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^ {4}([│├└─ ]*)(\w+Error)\b", line)
        if found:
            depth = len(found[1]) // 4
            del above[depth:]
            parents[found[2]] = above[-1] if above else None
            above.append(found[2])
    return parents


def written() -> dict[str, str | None]:
    """Return each error of the module with the name of its base."""
    classes = [
        item
        for _, item in inspect.getmembers(errors, inspect.isclass)
        if item.__module__ == errors.__name__ and issubclass(item, Exception)
    ]
    return {c.__name__: None if c.__base__ is Exception else c.__base__.__name__ for c in classes}


def test_the_drawn_tree_is_the_tree_of_classes():
    """Same names, same parents; nothing drawn that does not exist."""
    assert drawn() == written()
    assert len(drawn()) > 5


def test_an_error_defined_elsewhere_only_refines_a_drawn_one():
    """Whoever reads the drawing knows what to catch and how the command ends."""
    for found in pkgutil.walk_packages(supervise.__path__, "supervise."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)

    def below(kind: type) -> set[type]:
        return {kind, *(deep for c in kind.__subclasses__() for deep in below(c))}

    elsewhere = [c for c in below(errors.SuperviseError) if c.__module__ != errors.__name__]
    for refined in elsewhere:
        assert refined.__base__.__name__ in drawn(), refined
        assert refined.exit_code == refined.__base__.exit_code, refined
