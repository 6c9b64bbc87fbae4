"""Reads files that a job wrote, with the job's interpreter but in a process of its own.

The supervisor and the probe import nothing of it: each program is run by its path,
`python -I .../supervise_offline/checkpoint`. Needs only torch. Python 3.9.
"""

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
