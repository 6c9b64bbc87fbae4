"""Whoever reads `errors` knows what to catch and how the command ends."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from supervise import errors


def below(kind: type) -> set[type]:
    return {kind, *(deep for each in kind.__subclasses__() for deep in below(each))}


def test_an_error_defined_elsewhere_only_refines_one_of_the_errors():
    for found in pkgutil.walk_packages([str(Path(errors.__file__).parent)], "supervise."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)

    elsewhere = [c for c in below(errors.SuperviseError) if c.__module__ != errors.__name__]
    assert elsewhere
    for refined in elsewhere:
        assert refined.__base__.__module__ == errors.__name__, refined
        assert refined.exit_code == refined.__base__.exit_code, refined
