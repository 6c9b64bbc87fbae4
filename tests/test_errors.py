"""Whoever reads `errors` knows what to catch and how the command ends."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from pathlib import Path

import pytest

from supervise import errors
from supervise.catalog import load_policy


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


def test_an_error_of_a_worker_reaches_its_caller_whole(tmp_path):
    """A policy's mistakes and an action's refusal have more to say than their text."""
    (tmp_path / "p.yaml").write_text("version: supervise/v1\nmod: enforce\n")
    with pytest.raises(errors.PolicyError) as raised:
        load_policy(tmp_path / "p.yaml")
    for error in (raised.value, errors.LaunchError("no", exit_code=126), errors.ActionError("x")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (type(error), str(error))
        assert vars(copy) == vars(error)
