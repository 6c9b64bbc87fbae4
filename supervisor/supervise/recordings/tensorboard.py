"""TensorBoard: the scalars of the event files that lie in one folder; each folder is a run.

Values of one step may have been logged one by one: they become one row per step and file. A second
file in the folder is the same run started again.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import InputError
from .table import Cell, Table, missing

EVENTS = "tensorboard.backend.event_processing"
PATTERN = "*tfevents*"
NESTED = True  # folders inside a run's folder may be runs as well
SCALARS = "scalars"  # the plugin whose tensors are numbers


def claims(path: Path) -> bool:
    """Return whether this is a folder for this reader."""
    return path.is_dir() and any(path.glob(PATTERN))


def read(path: Path) -> Table:
    """Read all event files of a folder, in the order of their names, which begin with the time.

    Tags whose steps are counted in samples (Megatron's `lm loss vs samples`) are left out.

    Raises:
        InputError: they cannot be read, or the package `tensorboard` is not installed.
    """
    try:
        load = import_module(f"{EVENTS}.event_file_loader").LegacyEventFileLoader
    except ImportError as error:
        raise missing(path, "tensorboard") from error
    found: list[dict[str, float]] = []
    columns: dict[str, None] = {}
    for file in sorted(path.glob(PATTERN)):
        if not file.stat().st_size:
            continue  # a writer that has written nothing yet
        by_step: dict[int, dict[str, float]] = {}
        found_events = False
        try:
            for event in load(str(file)).Load():
                found_events = True
                for value in event.summary.value:
                    number = _number(value)
                    if number is not None and not value.tag.endswith("vs samples"):
                        row = by_step.setdefault(event.step, {"step": float(event.step)})
                        row[value.tag] = number
                        columns[value.tag] = None
        except Exception as error:  # its own classes of errors differ by version and by codec
            raise InputError(f"{file}: is no event file: {error}") from error
        if not found_events:
            raise InputError(f"{file}: is no event file, or is cut before its first event")
        found += [by_step[step] for step in sorted(by_step)]
    names = ("step", *(name for name in columns if name != "step"))
    rows: list[tuple[Cell, ...]] = [tuple(row.get(name) for name in names) for row in found]
    return Table(str(path), names, rows)


def _number(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.HasField("tensor") and value.metadata.plugin_data.plugin_name in ("", SCALARS):
        array = import_module("tensorboard.util.tensor_util").make_ndarray(value.tensor)
        if array.size == 1 and array.dtype.kind in "fiu":
            return float(array.reshape(-1)[0])
    return None
