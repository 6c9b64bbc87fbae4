"""Numbers on the command line: finite ones."""

from __future__ import annotations

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A number that is neither nan nor infinite, within bounds where there are any.

    click's own types take both, and a range takes nan, which is on no side of a bound.
    """

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; a mistake is a usage error that names it."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number
