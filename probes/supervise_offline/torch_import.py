"""Finds torch in an interpreter that was started with `-I`."""

import os
import site
import sys
from importlib import import_module
from typing import Any


def find_torch() -> Any:
    """Import torch, if necessary from the paths that an isolated interpreter ignores.

    Raises:
        ImportError: it is nowhere.
    """
    try:
        return import_module("torch")
    except ImportError:
        extra = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path += [site.getusersitepackages(), *filter(None, extra)]
        return import_module("torch")
