"""The manifest of a corpus as one HTML page: findings, mix, lengths, copies, personal data.

Texts of documents are excerpts in which personal data is masked; the page's templates escape them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from ..report import pages
from .manifest import SCALE, Cluster, Histogram, Manifest, Share

BARS = 24  # of a histogram
PARTS = 30  # sources, languages that are shown
FAIL, PASS, UNJUDGED = "fail", "pass", "not judged"


class Finding(Struct, frozen=True):
    """How a rule judged a corpus.

    Attributes:
        status: fail, pass, or not judged. text: the numbers, or what is not known.
        gate: whether it fails the gate.
    """

    rule: str
    title: str
    sev: str
    status: str
    text: str
    gate: bool


class Bar(NamedTuple):
    """One bar: its width is in percent of the widest."""

    label: str
    width: float
    text: str


def render_page(
    manifest: Manifest,
    findings: Sequence[Finding],
    baseline: Manifest | None,
    units: Mapping[str, str],
) -> str:
    """Return the page. `units` are those of metrics by id."""
    counts = manifest.counts
    failed = [finding for finding in findings if finding.gate]
    return pages.render_template(
        "data",
        verdict="FAIL" if failed else "PASS",
        tone="bad" if failed else "good",
        summary=describe_size(manifest),
        settings=_settings(manifest),
        findings=[
            (f.status, f.rule, f.sev, f.title, f.text)
            for f in sorted(findings, key=lambda f: (FAIL, PASS, UNJUDGED).index(f.status))
        ],
        mixes=[
            (title, list(share_bars(parts)))
            for title, parts in (("Sources", counts.sources), ("Languages", counts.languages))
            if parts
        ],
        histograms=list(_histograms(manifest)),
        metrics=list(_metric_rows(manifest, baseline, units)),
        unknown=sorted(manifest.unknown.items()),
        clusters=_cluster_rows(manifest.duplicates.clusters),
        cluster_sizes=[(str(n), str(k)) for n, k in sorted(manifest.duplicates.sizes.items())],
        hotspots=_cluster_rows([] if manifest.hotspots is None else manifest.hotspots.excerpts),
        personal=[
            (kind, str(number), ", ".join(counts.examples.get(kind, ())))
            for kind, number in sorted(counts.pii.items())
        ],
        damage=[(reason, str(n)) for reason, n in counts.reasons.items()],
        ignored=sorted(manifest.ignored.items())[:100],
        schema=manifest.schema,
    )


def describe_size(manifest: Manifest) -> str:
    """Return the size of a corpus in words."""
    counts = manifest.counts
    parts = [f"{counts.documents:,} documents"]
    if counts.tokens:
        parts.append(f"{counts.tokens:,} tokens")
    if counts.bytes:
        parts.append(f"{counts.bytes / 1e6:,.1f} MB of text")
    if counts.empty:
        parts.append(f"{counts.empty:,} empty")
    if counts.damaged:
        parts.append(f"{counts.damaged:,} damaged records")
    return f"{', '.join(parts)} in {len(manifest.inputs):,} pieces"


def describe_ignored(manifest: Manifest) -> Iterator[str]:
    """Yield why files were not read, each with how many and the first one."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(manifest.ignored.items()):
        names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        yield f"ignored: {names[0]}{more}: {reason}"


def _settings(manifest: Manifest) -> str:
    settings = manifest.settings
    tools = (("tokenizer", settings.tokenizer), ("scorer", settings.scorer))
    texts = [f"level {settings.level}", *(f"{name} {text}" for name, text in tools if text)]
    return " · ".join([*texts, *(f"{n} {v}" for n, v in settings.libraries.items())])


def share_bars(parts: Mapping[str, Share]) -> Iterator[Bar]:
    """Yield the parts of a corpus, largest first."""
    total = max(1, sum(part.weight for part in parts.values()))
    ordered = sorted(parts.items(), key=lambda item: (-item[1].weight, item[0]))
    widest = max(1, ordered[0][1].weight) if ordered else 1
    for name, part in ordered[:PARTS]:
        text = f"{100.0 * part.weight / total:.2f} %, {part.documents:,} documents"
        yield Bar(name, 100.0 * part.weight / widest, text)
    if len(ordered) > PARTS:
        yield Bar(f"{len(ordered) - PARTS} others", 0.0, "")


def _histograms(manifest: Manifest) -> Iterator[tuple[str, list[Bar]]]:
    counts = manifest.counts
    whole = Histogram()
    for histogram in counts.bytes_per_token.values():
        whole.merge(histogram)
    for title, histogram, scale in (
        ("Length of a document, tokens", counts.lengths, 1.0),
        ("Size of a text, bytes", counts.doc_bytes, 1.0),
        ("Bytes per token of a document", whole, SCALE),
        ("Compressed over plain size", counts.ratios, SCALE),
    ):
        if histogram.total:
            yield title, list(histogram_bars(histogram, scale))


def histogram_bars(histogram: Histogram, scale: float) -> Iterator[Bar]:
    """Yield a histogram in few bars of equal width on a logarithmic scale."""
    low, high = histogram.quantile(0.0), histogram.quantile(1.0)
    low = max(low, 0.5)
    step = max(math.log2(max(high, low) / low) / BARS, 1.0 / 8.0)
    bars = [0] * (BARS + 1)
    for number, count in histogram.bins.items():
        position = math.floor((number / 64.0 - math.log2(low)) / step)
        bars[min(BARS, max(0, position))] += count
    while bars and not bars[-1]:
        bars.pop()
    widest = max(bars, default=1)
    for position, count in enumerate(bars):
        start = low * 2.0 ** (position * step) / scale
        label = f"{start:,.0f}" if start >= 100.0 else f"{start:.3g}"
        yield Bar(label, 100.0 * count / widest, f"{count:,}")


def _metric_rows(
    manifest: Manifest, baseline: Manifest | None, units: Mapping[str, str]
) -> Iterator[tuple[str, str, str, str]]:
    before = {} if baseline is None else baseline.metrics
    for name, value in manifest.metrics.items():
        family = name.partition(".")[0]
        if name != family and family in ("source_mix_share", "language_share"):
            continue
        old = f"{before[name]:.4g}" if name in before else ""
        yield name, f"{value:.4g}", units.get(family, ""), old


def _cluster_rows(clusters: Iterable[Cluster]) -> list[tuple[str, str]]:
    return [(str(c.documents), "\n".join(dict.fromkeys(c.excerpts))) for c in clusters]
