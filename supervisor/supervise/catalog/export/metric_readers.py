"""Which shipped detectors read a metric: the default answer to "how should it be watched"."""

from __future__ import annotations

from functools import cache
from typing import Any

from ..assembly.pack import PACKS
from ..document import yaml_reader
from ..document.diagnostics import Problems
from ..document.nodes import Mapping, plain
from ..document.yaml_writer import inline
from ..inventory import shipped

ONE, SEVERAL = "metric", "metrics"


def readers(metric: str) -> dict[str, str]:
    """Return `{"pack.detector": "robust_z, gt: 6.0, ..."}` for a metric, in order of the packs."""
    found: dict[str, str] = {}
    for name, detector in _detectors():
        if detector.get(ONE) == metric or metric in detector.get(SEVERAL, ()):
            keys = {key: value for key, value in detector.items() if key not in (ONE, SEVERAL)}
            found[name] = inline(keys).strip("{}")
    return found


@cache
def _detectors() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for pack in shipped.names(PACKS):
        path = shipped.folder(PACKS) / f"{pack}.yaml"
        root = yaml_reader.read(path, shipped.label(path), problems := Problems())
        problems.stop()
        section = root.get("detectors") if root is not None else None
        if isinstance(section, Mapping):
            for name, detector in plain(section).items():
                found.append((f"{pack}.{name}", detector))
    return found
