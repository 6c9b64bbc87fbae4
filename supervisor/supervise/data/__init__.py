"""Training data before the run: read as documents, measured in one pass, kept as a manifest.

`corpus` reads files of any common format, `text_metrics` measures one text, `duplicates` finds what
documents share, `build_check` is the pass over the files, `manifest` its outcome and the metrics.
`manifest_page` shows it; `planted_faults` makes copies with a known fault, the test of the gate.
Needs the extra `data`, which is imported when something is read.
"""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "build_check": "BuildCheck, Request, list_pieces",
        "corpus": "Fields, documents, source_of",
        "manifest": "divergence, judge_numbers, manifest_schema",
        "planted_faults": "FAULTS",
        "text_metrics": "find_pii, masked_excerpt",
    },
)
