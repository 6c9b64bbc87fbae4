"""Description of a metric, in one record; every collector lists its own in `METRICS`.

Knows no metric and measures nothing: the catalog reads these records for its pages, for the columns
of exports and to check the ids that a policy names. The probe writes only the ids.
"""

from __future__ import annotations

from typing import NamedTuple


class MetricSpec(NamedTuple):
    """One metric, as its collector promises it.

    Attributes:
        id: the name in policies, frames and exports, such as `grad_global_norm`.
        unit: unit of the float64 in the frame, such as `s` or `tokens/s`; "1" for a pure number.
        meaning: one sentence: what exactly is measured, and when it is absent.
        source: where the definition comes from: a formula, a paper, a torch function.
        cost: what one sample costs the job, such as `one pass over the gradients`; "" for nothing
            that can be measured.
        every: steps between two samples as the probe takes them by default; 1 is each step. In
            the others the metric is absent.
        sparsest: the most steps between two samples of a metric that is taken less often where
            steps are short; 0: it never is.
    """

    id: str
    unit: str
    meaning: str
    source: str
    cost: str = ""
    every: int = 1
    sparsest: int = 0
