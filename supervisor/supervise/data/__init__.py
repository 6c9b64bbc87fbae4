"""Training data before the run: read as documents, measured in one pass, kept as a manifest.

`corpus` reads files of any common format, `text_metrics` measures one text, `duplicates` finds what
documents share, `build_check` is the pass, `manifest` its outcome and the metrics in it.
`manifest_page` shows it; `planted_faults` makes copies with a known fault, the test of the gate.
Needs the extra `data`, which is imported when something is read.
"""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "build_check": "BuildCheck, Request, read_prompts, read_rejects",
        "corpus": "Damage, Document, Fields, Piece, documents, list_pieces",
        "duplicates": "find_hotspots, gram_hashes, jaccard",
        "manifest": (
            "Counts, Histogram, Manifest, divergence, encode_manifest, judge_numbers, "
            "manifest_schema, read_manifest"
        ),
        "manifest_page": "Finding, render_page",
        "planted_faults": "FAULTS, parse_fault, plant_fault",
        "text_metrics": "find_pii, mask, masked_excerpt",
    },
)
