"""How a number in a policy is meant: types for the fields that YAML fills.

A detector, an action or a section of a file says `grace: Seconds` or `window: Steps`; the catalog
reads the hint, asks for the right spelling (`30s` against a bare `30`), and hands over a plain
number. The hints are also what the JSON Schema and the tables in the READMEs are made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a number: `seconds` are written with a unit, `steps` without."""

    name: str


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The least value that makes sense."""

    value: float


Seconds = Annotated[float, Unit("seconds")]  # YAML: 500ms, 30s, 5m, 2h
Steps = Annotated[int, Unit("steps"), AtLeast(0)]  # YAML: a bare whole number
