"""Detectors, mostly one file per kind: the YAML `kind` is the name of the class in snake_case.

The fields are its keys.

Pure: no clock, no random numbers, no disk; a watch is a function of its samples. Files that start
with an underscore are shared helpers.

Common to all kinds:
- A reading is OK, UNKNOWN or BREACH. An absent, NaN or infinite sample reads UNKNOWN for all kinds
  but `nonfinite`, and never enters a window. For `paired` an absent sample is a step without an
  evaluation: the last reading remains.
- `raw` is the code of the sample alone, before `for`, `m_of_n` and `clear`.
- A step that is not newer than the last one is not processed: it reads UNKNOWN, nothing changes.
- `rewind(step)` restores the state after `step` with a fresh verdict, exactly over at least one
  window; further back there may be too few samples left, so it may read UNKNOWN.
"""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "absence": "Absence",
        "band": "Band",
        "collapse": "Collapse",
        "cusum": "Cusum",
        "descent": "Averaged, Comparable, Descent, Negligible, Stationary",
        "equal": "Equal",
        "harm": "Harm",
        "join_sequence": "Join, Sequence",
        "nonfinite": "Nonfinite",
        "paired": "Paired",
        "rate": "Rate",
        "rate_guard": "RateGuard",
        "ratio": "Ratio",
        "record": "Record",
        "robust_z": "RobustZ",
        "threshold": "Threshold",
        "trend": "Trend",
    },
)
