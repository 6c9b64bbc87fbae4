"""Numbers on the command line: finite ones."""

from __future__ import annotations

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A number that is neither nan nor infinite, within bounds where there are any.

    click's own types take both, and a range takes nan, which is on no side of a bound.
    """

    @property
    def words(self) -> str:
        """What it is, with its bounds."""
        bounds = []
        if self.min is not None:
            bounds.append(f"{'above' if self.min_open else 'at least'} {self.min:g}")
        if self.max is not None:
            bounds.append(f"{'below' if self.max_open else 'at most'} {self.max:g}")
        return f"a number {' and '.join(bounds)}" if bounds else "a finite number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; a mistake is a usage error that names it."""
        try:
            number: float = super().convert(value, param, ctx)
        except click.BadParameter:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{value!r} is not {self.words}.", param, ctx)
        return number
