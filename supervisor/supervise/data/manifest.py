"""The manifest of a corpus: what a check counted, and the numbers that rules judge.

Counts add up: those of a corpus are the sums over its pieces, whichever process read them, so a
manifest is the same bytes however often the check was stopped. It holds no time of day and no path
of the machine. `numbers_of` turns it into metrics; each that the data does not show has a reason.

Sources: Kish's effective sample size for shares by tokens; Miller and Madow's bias of an entropy,
which a divergence of histograms has as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from ..errors import InputError
from ..json_schemas import published_schema
from ..store import files
from .corpus import Fields

SCHEMA = "supervise/data-manifest/v1"
OCTAVE = 64  # bins of a histogram: 1.1 % wide
SCALE = 1024.0  # of ratios, so that a histogram of them has bins below 1
SURE = 4.0  # standard deviations beyond which a share has moved; project default
CHANCE = 0.01  # of hits of a kind that the baseline had not; project default
SECRETS = ("card", "iban", "ssn", "key")  # a checksum or a fixed form: a hit is one
NO_BASELINE = "no baseline: give --baseline, the manifest of another build"
OTHER_FIELDS = "the baseline was read with other fields, --eos, --pad or --dtype"
OTHER_TOKENIZER = "the baseline was made with another tokenizer, or with none"
OTHER_NAMES = "no source of the baseline is in this build: they have other names"
OTHER_SOURCES = "no source with tokens is in both builds"
MAX_SOURCES = 1000  # by name, the largest; the rest is OTHERS
OTHERS = "others"


class Histogram(Struct):
    """Counts by logarithmic bins; a quantile is right to 0.6 %."""

    bins: dict[int, int] = field(default_factory=dict)

    def add(self, value: float) -> None:
        number = math.floor(math.log2(value) * OCTAVE) if value > 0.0 else -1
        self.bins[number] = self.bins.get(number, 0) + 1

    def merge(self, other: Histogram) -> None:
        for number, count in other.bins.items():
            self.bins[number] = self.bins.get(number, 0) + count

    @property
    def total(self) -> int:
        return sum(self.bins.values())

    def quantile(self, share: float) -> float:
        """Return the value below which a share of them lies. Raises ValueError on none."""
        limit, count = share * self.total, 0
        for number in sorted(self.bins):
            count += self.bins[number]
            if count >= limit:
                return 0.0 if number < 0 else 2.0 ** ((number + 0.5) / OCTAVE)
        raise ValueError("an empty histogram has no quantile")

    def share_outside(self, low: float, high: float) -> float:
        """Return the share of values that are not between two values of another histogram."""
        bounds = [math.floor(math.log2(v) * OCTAVE) if v > 0.0 else -1 for v in (low, high)]
        outside = sum(n for b, n in self.bins.items() if not bounds[0] <= b <= bounds[1])
        return outside / max(1, self.total)

    def share_above(self, value: float) -> float:
        bound = math.floor(math.log2(value) * OCTAVE) if value > 0.0 else -1
        above = sum(n for b, n in self.bins.items() if b > bound)
        return (above + self.bins.get(bound, 0) / 2.0) / max(1, self.total)


class Share(Struct):
    """A part of the corpus: its documents, and their weights."""

    documents: int = 0
    weight: int = 0
    squares: int = 0

    def add(self, weight: int) -> None:
        self.documents += 1
        self.weight += weight
        self.squares += weight * weight

    def merge(self, other: Share) -> None:
        self.documents += other.documents
        self.weight += other.weight
        self.squares += other.squares


class Counts(Struct, kw_only=True):
    """What was counted of documents.

    Attributes:
        damaged: records that cannot be read. reasons: of these, each with its number.
        sources, languages: parts of the corpus by name; weights are tokens where ids are known,
            else bytes.
        lengths: of whole documents in tokens; sampled where a tokenizer made them.
        doc_bytes: of texts. ratios: compressed over plain size, of the first 16 KiB, times 1024.
        bytes_per_token: per source, times 1024.
        junk: documents of which more than 1 % are control or replacement characters.
        padding: padding tokens, and all tokens, of documents that show them.
        token_halves: counts of token ids in two halves of the documents.
        pii: documents with a hit, by kind, of `pii_scanned`. examples: masked hits.
        toxic: documents that the scorer gave 0.5 or more, of `scored`.
    """

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    empty: int = 0
    damaged: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    sources: dict[str, Share] = field(default_factory=dict)
    languages: dict[str, Share] = field(default_factory=dict)
    lengths: Histogram = field(default_factory=Histogram)
    doc_bytes: Histogram = field(default_factory=Histogram)
    ratios: Histogram = field(default_factory=Histogram)
    bytes_per_token: dict[str, Histogram] = field(default_factory=dict)
    encoded_bytes: dict[str, int] = field(default_factory=dict)
    encoded_tokens: dict[str, int] = field(default_factory=dict)
    junk: int = 0
    junk_scanned: int = 0
    padding: list[int] = field(default_factory=lambda: [0, 0])
    token_halves: list[dict[int, int]] = field(default_factory=lambda: [{}, {}])
    pii: dict[str, int] = field(default_factory=dict)
    pii_scanned: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)
    toxic: int = 0
    scored: int = 0

    def merge(self, other: Counts) -> None:
        """Add what another piece counted."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if isinstance(ours, int):
                setattr(self, name, ours + theirs)
            elif isinstance(ours, Histogram):
                ours.merge(theirs)
            elif isinstance(ours, list):
                setattr(self, name, [_sum(a, b) for a, b in zip(ours, theirs, strict=True)])
            else:
                setattr(self, name, _sum(ours, theirs))
        if len(self.sources) > 2 * MAX_SOURCES:
            self.join_sources()

    def add_source(self, name: str, weight: int) -> None:
        """Count a document of a source."""
        self.sources.setdefault(name, Share()).add(weight)
        if len(self.sources) > 2 * MAX_SOURCES:
            self.join_sources()

    def join_sources(self) -> None:
        """Make the smallest sources one where there are more than are told apart."""
        ordered = sorted(self.sources.items(), key=lambda item: (-item[1].weight, item[0]))
        names = {OTHERS, *(name for name, _ in ordered[:MAX_SOURCES])}
        for parts in (self.sources, self.encoded_bytes, self.encoded_tokens, self.bytes_per_token):
            for name in sorted(parts.keys() - names):
                _sum(parts, {OTHERS: parts.pop(name)})


def _sum(ours: Any, theirs: Any) -> Any:
    if isinstance(ours, int):
        return ours + theirs
    for key, value in theirs.items():
        present = ours.get(key)
        if present is None:
            ours[key] = value
        elif isinstance(value, int):
            ours[key] = present + value
        elif isinstance(value, list):
            ours[key] = sorted({*present, *value})[:EXAMPLES]
        else:
            present.merge(value)
    return ours


EXAMPLES = 5  # masked hits of a kind that are shown


class Cluster(Struct, frozen=True):
    """Documents that are the same or nearly so: how many, and how two of them begin, masked."""

    documents: int
    excerpts: list[str]


class Duplicates(Struct, kw_only=True):
    """Documents with a copy.

    Attributes:
        exact: documents that are copies of an earlier one. near: of these and near copies.
        sizes: number of clusters by their size.
        val_documents: of the held-out set. val_exact, val_near: of these, with a copy in the data.
    """

    exact: int = 0
    near: int | None = None
    sizes: dict[int, int] = field(default_factory=dict)
    clusters: list[Cluster] = field(default_factory=list)
    val_documents: int = 0
    val_exact: int | None = None
    val_near: int | None = None


class Hotspots(Struct, kw_only=True):
    """Stretches of 200 bytes or more that several documents of a sample share.

    Attributes:
        documents: in the sample. shared: those that hold the commonest stretch.
        excerpts: the commonest ones, masked, each with its documents.
    """

    documents: int = 0
    bytes: int = 0
    shared: int = 0
    excerpts: list[Cluster] = field(default_factory=list)


class Stage(Struct, frozen=True):
    """A filter of the pipeline before: what it dropped, of what it read."""

    dropped: int
    total: int


class Prompts(Struct, frozen=True):
    """A set of prompts: its size, those given 0.5 or more for toxicity, and its SHA-256."""

    count: int
    toxic: int
    sha256: str


class Input(Struct, frozen=True):
    """One file, or a part of one, that was read.

    Attributes:
        sha256: of the bytes. damage: why it, or the rest of it, could not be read.
    """

    path: str
    bytes: int
    sha256: str
    documents: int
    damage: str = ""


class Settings(Struct, frozen=True, kw_only=True):
    """What the numbers depend on, beside the data.

    Attributes:
        fields: where the text is and what tokens mean, as far as options say so.
    """

    level: str
    fields: Fields = Fields()
    tokenizer: str = ""
    scorer: str = ""
    libraries: dict[str, str] = field(default_factory=dict)


class Manifest(Struct, kw_only=True):
    """What a check found in a corpus.

    Attributes:
        schema: name and version of this form.
        inputs: files in the order in which they were read; ignored: others, with the reason.
        unreadable: inputs of which nothing could be read.
        counts: of all documents. rejects: stages of the filters before, by name.
        metrics: by id, as rules judge them. unknown: id -> why the data does not show it.
    """

    schema: str = SCHEMA
    settings: Settings
    inputs: list[Input]
    ignored: dict[str, str] = field(default_factory=dict)
    unreadable: int = 0
    counts: Counts = field(default_factory=Counts)
    duplicates: Duplicates = field(default_factory=Duplicates)
    hotspots: Hotspots | None = None
    rejects: dict[str, Stage] = field(default_factory=dict)
    prompts: Prompts | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


def manifest_schema() -> dict[str, Any]:
    """Return the JSON Schema of a manifest."""
    return published_schema(Manifest, "Manifest of a corpus, by supervise data check")


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest, the same for the same content."""
    plain = msgspec.to_builtins(manifest, str_keys=True)
    return msgspec.json.format(msgspec.json.encode(plain, order="sorted"), indent=1) + b"\n"


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in a file. Raises InputError."""
    try:
        raw = files.read_file(path, foreign=True)
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        hint = "supervise data check DATA --manifest FILE writes one"
        raise InputError(f"{path} is no manifest: {reason}", hint=hint) from error
    if manifest.schema != SCHEMA:
        raise InputError(f"{path} is a manifest of form {manifest.schema}, not {SCHEMA}")
    return manifest


# ── metrics ───────────────────────────────────────────────────────────────────────────────────────


class Numbers:
    """Collects metrics, and a reason for each that there is not."""

    def __init__(self, no_baseline: str) -> None:
        self.no_baseline = no_baseline
        self.metrics: dict[str, float] = {}
        self.unknown: dict[str, str] = {}

    def put(self, metric: str, value: float | None, reason: str) -> None:
        if value is None or not math.isfinite(value):
            self.unknown[metric] = reason
        else:
            self.metrics[metric] = round(float(value), 6)


def judge_numbers(manifest: Manifest, baseline: Manifest | None) -> None:
    """Fill in the metrics of a manifest, those against a baseline included."""
    numbers = Numbers(NO_BASELINE)
    _given(numbers, manifest, baseline)
    if baseline is not None and baseline.settings.fields != manifest.settings.fields:
        numbers.no_baseline, baseline = OTHER_FIELDS, None
    for group in (_size, _mix, _texts, _lengths, _tokens, _copies, _privacy):
        group(numbers, manifest, baseline)
    manifest.metrics = dict(sorted(numbers.metrics.items()))
    manifest.unknown = dict(sorted(numbers.unknown.items()))


def _is_same_tokenizer(now: Manifest, base: Manifest) -> bool:
    """Whether tokens of both are of one tokenizer; token ids of the data are their own."""
    of_texts = now.counts.bytes or base.counts.bytes
    return not of_texts or now.settings.tokenizer == base.settings.tokenizer


def _percent(part: float, whole: float) -> float | None:
    return 100.0 * part / whole if whole else None


def _size(numbers: Numbers, now: Manifest, base: Manifest | None) -> None:
    counts = now.counts
    numbers.put("doc_count", counts.documents, "")
    all_records = counts.documents + counts.damaged
    numbers.put("damaged_rate", _percent(counts.damaged, all_records), "no record was read")
    numbers.put("unreadable_files", now.unreadable, "")
    lost = (
        None
        if base is None
        else _percent(base.counts.documents - counts.documents, base.counts.documents)
    )
    numbers.put("doc_loss", lost, numbers.no_baseline)


def _mix(numbers: Numbers, now: Manifest, base: Manifest | None) -> None:
    _shares(numbers, "source_mix", now, base, lambda counts: counts.sources, "no document was read")
    no_text = "token ids have no language: give --tokenizer"
    _shares(numbers, "language", now, base, lambda counts: counts.languages, no_text)


def _shares(
    numbers: Numbers, name: str, now: Manifest, base: Manifest | None, part_of: Any, reason: str
) -> None:
    """Put the share of each part, and the largest change of one that is no chance."""
    ours = part_of(now.counts)
    shares, effective = _shares_of(ours)
    share_name = f"{name}_share"
    for part, share in shares.items():
        numbers.put(f"{share_name}.{part}", 100.0 * share, reason)
    if not shares:
        numbers.unknown[share_name] = reason
    if base is None or not shares:
        numbers.unknown[f"{name}_shift"] = numbers.no_baseline if shares else reason
        return
    before, effective_before = _shares_of(part_of(base.counts))
    if name == "source_mix" and before and before.keys().isdisjoint(shares):
        numbers.unknown[f"{name}_shift"] = OTHER_NAMES
        return
    shift = 0.0
    for part in {*shares, *before}:
        new, old = shares.get(part, 0.0), before.get(part, 0.0)
        mean = (new * effective + old * effective_before) / max(1.0, effective + effective_before)
        spread = math.sqrt(
            mean * (1.0 - mean) * (1.0 / max(1.0, effective) + 1.0 / max(1.0, effective_before))
        )
        if abs(new - old) > SURE * spread and max(new, old) >= 0.005:
            shift = max(shift, 100.0 * abs(new - old) / max(old, 0.01))
    numbers.put(f"{name}_shift", shift if before else None, f"the baseline has none: {reason}")


def _shares_of(parts: Mapping[str, Share]) -> tuple[dict[str, float], float]:
    """Return the shares by weight, and how many documents of one size are as sure as these."""
    weight = sum(part.weight for part in parts.values())
    squares = sum(part.squares for part in parts.values())
    if not weight:
        return {}, 0.0
    return {name: parts[name].weight / weight for name in sorted(parts)}, weight**2 / squares


def _texts(numbers: Numbers, now: Manifest, base: Manifest | None) -> None:
    counts = now.counts
    no_text = "token ids show no text: give --tokenizer"
    numbers.put("junk_rate", _percent(counts.junk, counts.junk_scanned), no_text)
    outside = None
    reason = numbers.no_baseline if counts.ratios.total else no_text
    if base is not None and base.counts.ratios.total and counts.ratios.total:
        outside = _outside(counts.ratios, base.counts.ratios)
    numbers.put("doc_zlib_outside", outside, reason)
    encoded = sum(counts.encoded_tokens.values())
    reason = "no tokenizer was given: --tokenizer tokenizer.json"
    mean = sum(counts.encoded_bytes.values()) / encoded if encoded else None
    numbers.put("bytes_per_token", mean, reason)
    for source in sorted(counts.encoded_tokens):
        tokens = counts.encoded_tokens[source]
        if tokens:
            numbers.put(f"bytes_per_token.{source}", counts.encoded_bytes[source] / tokens, reason)
    worst = None
    if base is not None and now.settings.tokenizer != base.settings.tokenizer:
        reason = OTHER_TOKENIZER  # which decodes token ids, too
    elif base is not None:
        pairs = [
            (histogram, base.counts.bytes_per_token[source])
            for source, histogram in counts.bytes_per_token.items()
            if source in base.counts.bytes_per_token
        ]
        worst = max((_outside(ours, theirs) for ours, theirs in pairs), default=None)
        reason = OTHER_SOURCES if encoded else reason
    elif encoded:
        reason = numbers.no_baseline
    numbers.put("bytes_per_token_outside", worst, reason)


def _outside(ours: Histogram, theirs: Histogram) -> float:
    """Return the share beyond 99.8 % of the baseline's values, less what chance explains, in %."""
    low, high = theirs.quantile(0.001), theirs.quantile(0.999)
    share, before = ours.share_outside(low, high), theirs.share_outside(low, high)
    count, count_before = ours.total, theirs.total
    expected = max(before, 0.002, 3.0 / count_before)
    chance = SURE * math.sqrt(expected * (1.0 / count + 1.0 / count_before))
    return 100.0 * max(0.0, share - expected - chance)


def _lengths(numbers: Numbers, now: Manifest, base: Manifest | None) -> None:
    counts = now.counts
    no_tokens = "texts have no tokens: give --tokenizer"
    if counts.tokens:
        no_tokens = "nothing marks the end of a document: give --eos"
    shift: float | None = None
    for name, histogram, reason in (
        ("seq_len", counts.lengths, no_tokens),
        ("doc_bytes", counts.doc_bytes, "token ids have no bytes"),
    ):
        for label, share in (("p50", 0.5), ("p95", 0.95)):
            value = histogram.quantile(share) if histogram.total else None
            numbers.put(f"{name}_{label}", value, reason)
    if base is not None:
        pairs = [(counts.doc_bytes, base.counts.doc_bytes)]
        if _is_same_tokenizer(now, base):
            pairs.append((counts.lengths, base.counts.lengths))
        for ours, theirs in pairs:
            if ours.total and theirs.total:
                shift = max(shift or 0.0, _moved(ours, theirs))
    reason = numbers.no_baseline if base is None else "lengths are known of one of both only"
    numbers.put("seq_len_shift", shift, reason)
    padding, all_tokens = counts.padding
    reason = "nothing says which tokens are padding: --pad ID, or a field attention_mask"
    numbers.put("pad_fraction", _percent(padding, all_tokens), reason)
    pad_shift = None
    if base is not None and all_tokens and base.counts.padding[1]:
        pad_shift = 100.0 * (padding / all_tokens - base.counts.padding[0] / base.counts.padding[1])
    numbers.put("pad_shift", pad_shift, reason if not all_tokens else numbers.no_baseline)


def _moved(ours: Histogram, theirs: Histogram) -> float:
    """Return the largest change of median and 95 % that is no chance, in %."""
    largest = 0.0
    for share in (0.5, 0.95):
        old, new = theirs.quantile(share), ours.quantile(share)
        above = ours.share_above(old)
        spread = math.sqrt(share * (1.0 - share) * (1.0 / ours.total + 1.0 / theirs.total))
        if abs(above - (1.0 - share)) > SURE * spread and old > 0.0:
            largest = max(largest, 100.0 * abs(new - old) / old)
    return largest


def _tokens(numbers: Numbers, now: Manifest, base: Manifest | None) -> None:
    halves = now.counts.token_halves
    reason = "no token is known: give --tokenizer" if not any(halves) else numbers.no_baseline
    drift = excess = None
    if base is not None and any(halves) and not _is_same_tokenizer(now, base):
        reason = OTHER_TOKENIZER
    elif base is not None and any(halves) and any(base.counts.token_halves):
        ours, theirs = _whole(halves), _whole(base.counts.token_halves)
        drift = divergence(ours, theirs)
        noise = abs(divergence(*base.counts.token_halves)) if all(base.counts.token_halves) else 0.0
        excess = drift / max(noise, 0.002)  # a floor, in nat; project default
    numbers.put("token_kl_drift", drift, reason)
    numbers.put("token_kl_excess", excess, reason)


def _whole(halves: Sequence[Mapping[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for half in halves:
        total.update(half)
    return total


def divergence(ours: Mapping[int, int], theirs: Mapping[int, int]) -> float:
    """Return the KL divergence of two histograms in nat, less the bias of their sizes.

    A token that the other one lacks counts as half a token there.
    """
    n, m = sum(ours.values()), sum(theirs.values())
    if not n or not m:
        return 0.0
    kinds = len({*ours, *theirs})
    floor = m + 0.5 * sum(1 for token in ours if token not in theirs)
    total = sum(
        count / n * math.log(count / n * floor / theirs.get(token, 0.5))
        for token, count in ours.items()
    )
    return total - (kinds - 1) / 2.0 * (1.0 / n + 1.0 / m)


def _copies(numbers: Numbers, now: Manifest, base: Manifest | None) -> None:
    copies, count = now.duplicates, now.counts.documents
    cheap = "not looked for at --level cheap: use --level full"
    numbers.put("exact_dup_rate", _percent(copies.exact, count), "no document was read")
    rate = None if copies.near is None else _percent(copies.near, count)
    numbers.put("near_dup_rate", rate, cheap)
    growth = None
    if base is not None and rate is not None and base.duplicates.near is not None:
        before = 100.0 * base.duplicates.near / max(1, base.counts.documents)
        spread = 100.0 * math.sqrt(max(before, 0.1) / 100.0 * (1 / max(1, count)))
        growth = 1.0 if rate - before < max(0.1, SURE * spread) else rate / max(before, 0.1)
    numbers.put("near_dup_growth", growth, cheap if rate is None else numbers.no_baseline)
    largest = max(copies.sizes, default=1)
    numbers.put("dup_cluster_max", largest if count else None, "no document was read")
    no_val = "no held-out set was given: --val PATH"
    val = copies.val_documents
    exact = None if copies.val_exact is None else _percent(copies.val_exact, val)
    numbers.put("train_val_overlap_exact", exact, no_val)
    both = None if copies.val_near is None else _percent(copies.val_near, val)
    numbers.put("train_val_overlap", both, no_val if copies.val_exact is None else cheap)
    spots = now.hotspots
    numbers.put("doc_repeat_hotspots", None if spots is None else spots.shared, cheap)
    share = None if spots is None else _percent(spots.shared, spots.documents)
    numbers.put("doc_repeat_share", share, cheap)


def _privacy(numbers: Numbers, now: Manifest, base: Manifest | None) -> None:
    counts = now.counts
    reason = "token ids show no text: give --tokenizer"
    if not counts.pii_scanned:
        numbers.unknown["pii_hit_rate"] = reason
        numbers.unknown["pii_secret_rate"] = reason
    else:
        for kind in sorted(counts.pii):
            hits = _percent(counts.pii[kind], counts.pii_scanned)
            numbers.put(f"pii_hit_rate.{kind}", hits, reason)
        secrets = sum(counts.pii.get(kind, 0) for kind in SECRETS)
        numbers.put("pii_secret_rate", 100.0 * secrets / counts.pii_scanned, reason)
    fresh: int | None = None
    growth: float | None = None
    if base is not None and base.counts.pii_scanned and counts.pii_scanned:
        before = base.counts
        # By chance all hits of both are in this one, as each document is one of it by this share.
        share = counts.pii_scanned / (counts.pii_scanned + before.pii_scanned)
        fresh = sum(
            not before.pii.get(kind) and share ** counts.pii.get(kind, 0) < CHANCE
            for kind in SECRETS
        )
        kinds = counts.pii.keys() - {"ipv4"}  # a number of a version looks like one
        changes = [
            _significant_change(
                counts.pii[k], counts.pii_scanned, before.pii.get(k, 0), before.pii_scanned
            )
            for k in kinds
        ]
        growth = 1.0 + max(0.0, *changes, 0.0) / 100.0
    numbers.put("pii_new_kinds", fresh, numbers.no_baseline if counts.pii_scanned else reason)
    numbers.put("pii_growth", growth, numbers.no_baseline if counts.pii_scanned else reason)
    reason = "no scorer was given: --toxicity MODULE:FUNCTION"
    rate = _percent(counts.toxic, counts.scored)
    numbers.put("data_toxicity_rate", rate, reason)
    shift: float | None = None
    if base is not None and rate is not None and base.counts.scored:
        before = base.counts
        if base.settings.scorer == now.settings.scorer:
            shift = _significant_change(counts.toxic, counts.scored, before.toxic, before.scored)
        reason = "the baseline was scored by another scorer"
    elif rate is not None:
        reason = numbers.no_baseline
    numbers.put("data_toxicity_shift", shift, reason)


def _significant_change(part: int, whole: int, part_before: int, whole_before: int) -> float:
    """Return the relative change of a rate in %, 0 where chance explains it.

    A rate of none counts as one in all.
    """
    new, old = part / whole, max(part_before, 1) / whole_before
    spread = math.sqrt(old * (1.0 / whole + 1.0 / whole_before))
    return 100.0 * (new - old) / old if abs(new - old) > SURE * spread else 0.0


def _given(numbers: Numbers, now: Manifest, base: Manifest | None) -> None:
    """What other programs or files gave: rejects of filters, a set of prompts."""
    reason = "no report of the filters was given: --rejects FILE, or NAME=FOLDER"
    if not now.rejects:
        numbers.unknown["filter_reject_rate"] = reason
    for name, stage in sorted(now.rejects.items()):
        numbers.put(f"filter_reject_rate.{name}", _percent(stage.dropped, stage.total), reason)
    shift = None
    if base is not None and base.rejects and now.rejects:
        stages = ((now.rejects[n], base.rejects[n]) for n in now.rejects.keys() & base.rejects)
        moves = [
            abs(_significant_change(a.dropped, a.total, b.dropped, b.total))
            for a, b in stages
            if a.total and b.total
        ]
        shift = max(moves, default=0.0)
    numbers.put("filter_reject_shift", shift, numbers.no_baseline if now.rejects else reason)
    reason = "no set of prompts was given: --prompts FILE"
    prompts = now.prompts
    numbers.put("rtp_prompt_stats.count", None if prompts is None else prompts.count, reason)
    numbers.put("rtp_prompt_stats.toxic", None if prompts is None else prompts.toxic, reason)
    changes = None
    if prompts is not None and base is not None and base.prompts is not None:
        changes = float(prompts.sha256 != base.prompts.sha256)
    numbers.put("rtp_prompt_changes", changes, reason if prompts is None else numbers.no_baseline)
