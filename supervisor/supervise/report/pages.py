"""HTML pages by jinja2, and their figures: no script, nothing from elsewhere; phone or paper.

Texts of a job may hold anything: every value is escaped, and a character that does not print, such
as one that reverses the direction of the text, becomes a space. The lines of a figure stretch with
the page; labels and marks, which must stay readable on a phone, are text that does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.model.formats import printable

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")
LOG = 20.0  # a series that spans more than so many times its least value has a log scale
ROOM = 0.06  # of the height, above and below

Point = Sequence[float]  # step, value


def render_template(template: str, **values: Any) -> str:
    """Return the page of a template, `NAME.html.j2`, with these values."""
    return _environment().get_template(f"{template}.html.j2").render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # 30 ms, for pages only

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )


def _printed(value: Any) -> Any:
    """Return text without control characters, anything else as it is."""
    if type(value) is not str:  # markup of a template is of a subclass
        return value
    return printable(value, keep="\n")


@dataclass(frozen=True, slots=True)
class Scale:
    """From a value to percent from the top."""

    low: float
    high: float
    is_log: bool

    def percent_of(self, value: float) -> float:
        """Return the position of a value; outside of the range that of its edge."""
        low, high, here = (self._scaled(v) for v in (self.low, self.high, value))
        share = 0.5 if high == low else min(1.0, max(0.0, (here - low) / (high - low)))
        return 100.0 * (1.0 - ROOM - share * (1.0 - 2.0 * ROOM))

    def _scaled(self, value: float) -> float:
        return math.log(max(value, self.low)) if self.is_log else value


@dataclass(frozen=True, slots=True)
class Line:
    """A line; `points` are "x,y x,y ..."."""

    kind: str
    points: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across the plot, vertical at an x or horizontal at a y, with a label or none."""

    kind: str
    position: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """One plot.

    Attributes:
        name: id of the metric, shown small. extent: range of the values, as text.
        description: for readers that cannot see it.
        first, last: steps at the ends of the axis.
        marks: vertical ones. limits: horizontal ones.
        breaks: x of values that are not finite.
        band: top and height of a shaded band.
    """

    title: str
    description: str
    extent: str
    first_step: int
    last_step: int
    lines: Sequence[Line]
    name: str = ""
    marks: Sequence[Mark] = ()
    limits: Sequence[Mark] = ()
    breaks: Sequence[float] = ()
    band: tuple[float, float] | None = None
    tall: bool = False


def figure_over_steps(
    title: str,
    series: Iterable[tuple[str, Sequence[Point]]],
    marks: Iterable[tuple[str, float]] = (),
    limits: Iterable[tuple[str, float]] = (),
    band: tuple[float, float] | None = None,
    *,
    log: bool = False,
) -> Figure | None:
    """Return a plot of several series over steps, None without a finite value.

    Args:
        series: kind of line, and its points. marks: kind and step. limits: kind and value.
        band: from which value to which.
        log: a logarithmic scale where the values span more than LOG.
    """
    everything = [(kind, list(points)) for kind, points in series]
    finite = [(kind, [p for p in points if math.isfinite(p[1])]) for kind, points in everything]
    steps = [step for _, points in everything for step, _ in points]
    horizontal = list(limits)
    values = [value for _, points in finite for _, value in points]
    if not values:
        return None
    values += [value for _, value in horizontal]
    low, high = min(values), max(values)
    scale = Scale(low, high, log and low > 0.0 and high > LOG * low)
    first_step, last_step = min(steps), max(steps)
    width = max(1.0, last_step - first_step)

    def x(step: float) -> float:
        return 100.0 * (step - first_step) / width

    broken = [x(step) for _, points in everything for step, v in points if not math.isfinite(v)]
    shaded = None
    if band is not None and all(map(math.isfinite, band)):
        top, bottom = scale.percent_of(band[1]), scale.percent_of(band[0])
        shaded = top, max(0.5, bottom - top)
    title += ", log scale" if scale.is_log else ""
    return Figure(
        title,
        title,
        f"{low:.4g} to {high:.4g}",
        int(first_step),
        int(last_step),
        [
            Line(
                kind,
                " ".join(f"{x(step):.2f},{scale.percent_of(value):.2f}" for step, value in points),
            )
            for kind, points in finite
            if points
        ],
        breaks=broken,
        marks=[Mark(kind, x(step)) for kind, step in marks],
        limits=[Mark(kind, scale.percent_of(value)) for kind, value in horizontal],
        band=shaded,
    )
