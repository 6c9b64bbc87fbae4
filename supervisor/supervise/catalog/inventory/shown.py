"""Benchmark results of rules, faults and recoveries, from `benchmarks/proving/shown.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from . import shipped


@cache
def shown() -> Mapping[str, Any]:
    """Return the content of `policies/shown.json`."""
    found: dict[str, Any] = json.loads((shipped.folder("policies") / "shown.json").read_text())
    return found
