"""Metrics of one text: language, junk, how well it compresses, tokens, personal data, toxicity.

Cheap ones are taken of every document, of its first bytes; dear ones of a sample, which is chosen
by the hash of the document: the same documents in each build, whatever stands around them.

Personal data is found by anchored patterns, and counts where a checksum or a numbering plan agrees.
Sources: Luhn, ISO 13616 (IBAN), the SSN ranges of python-stdnum, the plans of libphonenumber.
"""

from __future__ import annotations

import hashlib
import importlib
import ipaddress
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import InputError
from .corpus import Document, need
from .manifest import EXAMPLES, SCALE, Counts, Histogram, Share

LANGUAGE_CHARS = 2000
JUNK_CHARS = 4000
ZLIB_BYTES = 16 << 10
PII_CHARS = 64 << 10
TOXIC_CHARS = 2000
# Bytes of a corpus from which on a share of the documents is looked at, and the least share.
SAMPLES = {"tokens": (4 << 20, 0.002), "pii": (64 << 20, 0.1), "toxic": (4 << 20, 0.001)}
TOXIC = 0.5  # project default, and that of RealToxicityPrompts
BATCH = 64
TOKENIZER = "give a tokenizer.json of the package tokenizers"
SCORER = "a function that takes a list of texts and returns a score from 0 to 1 for each"
UNDETERMINED = "und"

_JUNK = re.compile(r"[\x00-\x08\x0e-\x1f\x7f\x80-\x9f\ufffd]")
_SAFE = str.maketrans({**dict.fromkeys([*range(9), *range(14, 32), *range(127, 160)], " ")})
_NONCHARACTERS = re.compile("[\ufffe\uffff\ufdd0-\ufdef\ufffd\U0001fffe-\U0001ffff]")


class TextMetrics:
    """Measures documents into `Counts`.

    Args:
        size: bytes of the corpus on disk; samples get smaller with it.
        tokenizer: a file of the package tokenizers. scorer: MODULE:FUNCTION.
    """

    def __init__(self, size: int, tokenizer: str = "", scorer: str = "") -> None:
        self._detect = need("pycld2")
        need("numpy")
        self._limits = {
            name: int(min(1.0, max(least, limit / max(1, size))) * 2**32)
            for name, (limit, least) in SAMPLES.items()
        }
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer else None
        self._scorer = load_scorer(scorer) if scorer else None
        self._scorer_name = scorer
        self._texts: list[tuple[str, int, str]] = []  # to be encoded: text, digest, source
        self._scored: list[str] = []

    def measure(self, counts: Counts, document: Document, raw: bytes, digest: int) -> None:
        """Count one document; `raw` are its bytes, `digest` is a hash of them."""
        counts.documents += 1
        text, ids = document.text, document.ids
        chance = digest & 0xFFFFFFFF
        if ids is None:
            weight = len(raw)
            counts.bytes += weight
            counts.doc_bytes.add(weight)
            if self._tokenizer is not None and chance < self._limits["tokens"]:
                self._texts.append((text, digest, document.source))
                if len(self._texts) >= BATCH:
                    self.flush(counts)
        else:
            weight = len(ids)
            self._count_ids(counts, document, digest)
            if self._tokenizer is not None and chance < self._limits["tokens"]:
                with errors_of_tokenizer():
                    text = self._tokenizer.decode(ids.tolist())
                _add_encoded(counts, document.source, len(text.encode()), weight)
        counts.empty += document.is_empty
        counts.add_source(document.source, weight)
        if text:
            self._count_text(counts, text, raw if ids is None else text.encode(), chance)

    def flush(self, counts: Counts) -> None:
        """Encode and score what was collected."""
        if self._texts and self._tokenizer is not None:
            with errors_of_tokenizer():
                encoded = self._tokenizer.encode_batch([text for text, _, _ in self._texts])
            for (text, digest, source), tokens in zip(self._texts, encoded, strict=True):
                ids = tokens.ids
                counts.lengths.add(len(ids))
                _add_encoded(counts, source, len(text.encode()), len(ids))
                half = counts.token_halves[digest >> 32 & 1]
                for token in ids:
                    half[token] = half.get(token, 0) + 1
            self._texts.clear()
        if self._scored and self._scorer is not None:
            scores = self._scores(self._scorer)
            counts.scored += len(scores)
            counts.toxic += sum(score >= TOXIC for score in scores)
            self._scored.clear()

    def _scores(self, scorer: Callable[[Sequence[str]], Sequence[float]]) -> list[float]:
        """Return a score of each text that was collected. Raises InputError."""
        try:
            scores = [float(score) for score in scorer(self._scored)]
        except (Exception, SystemExit) as error:  # the code of others raises what it likes
            text = f"{type(error).__name__}: {error}"
            raise InputError(f"--toxicity {self._scorer_name}: {text}", hint=SCORER) from error
        if len(scores) != len(self._scored) or any(map(math.isnan, scores)):
            text = f"{len(scores)} scores of {len(self._scored)} texts, or one that is no number"
            raise InputError(f"--toxicity {self._scorer_name}: {text}", hint=SCORER)
        return scores

    def _count_text(self, counts: Counts, text: str, raw: bytes, chance: int) -> None:
        head = text[:LANGUAGE_CHARS]
        counts.languages.setdefault(self.language(head), Share()).add(len(raw))
        start = text[:JUNK_CHARS]
        if not start.isprintable():
            counts.junk += len(_JUNK.findall(start)) > 0.01 * len(start)
        counts.junk_scanned += 1
        part = raw[:ZLIB_BYTES]
        counts.ratios.add(SCALE * len(zlib.compress(part, 1)) / len(part))
        if chance < self._limits["pii"]:
            self._count_pii(counts, text)
        if self._scorer is not None and chance < self._limits["toxic"]:
            self._scored.append(text[:TOXIC_CHARS])
            if len(self._scored) >= BATCH:
                self.flush(counts)

    def language(self, text: str) -> str:
        """Return the code of the language of a text, `und` where it is not clear."""
        try:
            reliable, _, details = self._detect.detect(text, bestEffort=True)
        except Exception:  # its error for characters that it does not take has no public class
            try:
                clean = _NONCHARACTERS.sub(" ", text.translate(_SAFE))
                reliable, _, details = self._detect.detect(clean, bestEffort=True)
            except Exception:
                return UNDETERMINED
        code = details[0][1]
        return UNDETERMINED if code == "un" or not reliable else str(code)

    @staticmethod
    def _count_ids(counts: Counts, document: Document, digest: int) -> None:
        numpy = need("numpy")
        ids = document.ids
        counts.tokens += len(ids)
        if document.whole:
            counts.lengths.add(len(ids))
        if document.padding is not None:
            counts.padding[0] += document.padding
            counts.padding[1] += document.padding + len(ids)
        half = counts.token_halves[digest >> 32 & 1]
        kinds, numbers = numpy.unique(ids, return_counts=True)
        for token, number in zip(kinds.tolist(), numbers.tolist(), strict=True):
            half[token] = half.get(token, 0) + number

    @staticmethod
    def _count_pii(counts: Counts, text: str) -> None:
        counts.pii_scanned += 1
        hits: dict[str, str] = {}
        for kind, begin, end in find_pii(text[:PII_CHARS]):
            hits.setdefault(kind, text[begin:end])
        for kind, hit in hits.items():
            counts.pii[kind] = counts.pii.get(kind, 0) + 1
            examples = {*counts.examples.get(kind, ()), mask(hit)}
            counts.examples[kind] = sorted(examples)[:EXAMPLES]


def _add_encoded(counts: Counts, source: str, size: int, tokens: int) -> None:
    counts.encoded_bytes[source] = counts.encoded_bytes.get(source, 0) + size
    counts.encoded_tokens[source] = counts.encoded_tokens.get(source, 0) + tokens
    if tokens:
        histogram = counts.bytes_per_token.setdefault(source, Histogram())
        histogram.add(SCALE * size / tokens)


# ── what is given ─────────────────────────────────────────────────────────────────────────────────


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer in a file, without what it cuts and pads. Raises InputError."""
    tokenizers = need("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # of Rust: of no class of its own
        raise InputError(f"{path} is no tokenizer: {error}", hint=TOKENIZER) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def errors_of_tokenizer() -> Iterator[None]:
    """Raise InputError where a tokenizer fails on a text or tokens, also by a panic of Rust."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise InputError(f"the tokenizer fails: {error}", hint=TOKENIZER) from error


def load_scorer(name: str) -> Callable[[Sequence[str]], Sequence[float]]:
    """Return the function MODULE:FUNCTION, looked for in the working directory too.

    Raises:
        InputError: there is none.
    """
    module, _, function = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        scorer = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # its module raises what it likes
        text = f"its module ends with {error}" if isinstance(error, SystemExit) else f"{error}"
        raise InputError(f"--toxicity {name}: {text}", hint=SCORER) from error
    return scorer  # type: ignore[no-any-return]


def scorer_digest(name: str) -> str:
    """Return the name of a scorer and a digest of its module's text, "" for none."""
    if not name:
        return ""
    load_scorer(name)
    path = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    raw = Path(path).read_bytes() if path else b""
    return f"{name} sha256:{hashlib.sha256(raw).hexdigest()[:16]}"


# ── personal data ─────────────────────────────────────────────────────────────────────────────────

_DOMAIN = re.compile(r"@((?:[A-Za-z0-9-]{1,63}\.){1,8}([A-Za-z]{2,24}))(?![\w-])")
_LOCAL = re.compile(r"(?<![\w.%+-])[\w.%+-]{1,64}\Z")
_RESERVED = re.compile(r"(?:^|\.)(?:example|test|localhost|invalid)(?:\.|$)")
_RUN = re.compile(r"\d[\d ().+-]{7,40}\d")  # where a card, a number of a person or a phone may be
_CARD = re.compile(
    r"(?<![\w.])(?:\d{13,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{4}(?:\1\d{3})?|\d{4}([ -])\d{6}\2\d{5})"
    r"(?![\d.])"
)
_NETWORKS = re.compile(  # first digits, and how many there are
    r"4(?:\d{12}|\d{15}|\d{18})|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}"
    r"|3[47]\d{13}|6(?:011|5\d\d)\d{12,15}"
)
_COUNTRY = re.compile(r"[A-Z]{2}\d{2}(?=[ A-Z0-9]{11})")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,4})?\b")
_SSN = re.compile(r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])")
_DOTS = re.compile(r"\.\d{1,3}\.\d{1,3}\.")
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_VERSION = re.compile(r"(?:\bv|version|release)\W{0,3}\Z", re.I)
_PHONE = re.compile(
    r"(?<![\w.+/-])(?:\+\d[\d ().-]{7,18}\d|\(\d{3}\) ?\d{3}-\d{4}|\d{3}-\d{3}-\d{4})(?![\w-])"
)
_KEY = re.compile(
    r"\b(?:AKIA[0-9A-Z]{16}|ghp_[A-Za-z0-9]{36}|sk-[A-Za-z0-9]{32,}|xox[bap]-[0-9A-Za-z-]{20,}"
    r"|AIza[0-9A-Za-z_-]{35})\b|-----BEGIN (?:RSA |EC |OPENSSH )?PRIVATE KEY-----"
)
_PREFIXES = ("AKIA", "ghp_", "sk-", "xox", "AIza", "-----BEGIN")
_TLD = (
    "com org net edu gov mil int io de fr uk ru jp cn in br it nl eu ch es pl se au ca us info biz"
    " dev ai co me at be cz dk fi gr hu ie il kr mx no nz pt ro tr tw ua za app tv xyz"
)
_DOMAINS = frozenset(_TLD.split())


def find_pii(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the kind and the range of each piece of personal data.

    Kinds: email, card, iban, ssn, phone, key, ipv4.
    """
    for at_sign in _DOMAIN.finditer(text) if "@" in text else ():
        begin = at_sign.start()
        local = _LOCAL.search(text, max(0, begin - 65), begin)
        domain = at_sign[1].lower()
        is_public = at_sign[2].lower() in _DOMAINS and not _RESERVED.search(domain)
        if local and is_public and ".." not in local[0]:
            yield "email", local.start(), at_sign.end()
    if any(prefix in text for prefix in _PREFIXES):
        for match in _KEY.finditer(text):
            yield "key", match.start(), match.end()
    for run in _RUN.finditer(text):
        begin, end = max(0, run.start() - 1), run.end() + 1
        for kind, pattern, is_valid in _NUMBERS:
            for match in pattern.finditer(text, begin, end):
                if is_valid(match[0]):
                    yield kind, match.start(), match.end()
    for country in _COUNTRY.finditer(text):
        iban = _IBAN.match(text, country.start())
        if iban and need("stdnum.iban").is_valid(iban[0]):
            yield "iban", iban.start(), iban.end()
    for dots in _DOTS.finditer(text):
        for match in _IPV4.finditer(text, max(0, dots.start() - 3), dots.end() + 4):
            if _is_address(match[0], text[max(0, match.start() - 12) : match.start()]):
                yield "ipv4", match.start(), match.end()


def _is_card(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    return bool(_NETWORKS.fullmatch(digits)) and bool(need("stdnum.luhn").is_valid(digits))


def _is_phone(text: str) -> bool:
    phonenumbers = need("phonenumbers")
    try:
        return bool(phonenumbers.is_valid_number(phonenumbers.parse(text, "US")))
    except phonenumbers.NumberParseException:
        return False


def _is_address(text: str, before: str) -> bool:
    if _VERSION.search(before):
        return False
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _is_ssn(text: str) -> bool:
    return bool(need("stdnum.us.ssn").is_valid(text))


_NUMBERS: tuple[tuple[str, re.Pattern[str], Callable[[str], bool]], ...] = (
    ("card", _CARD, _is_card),
    ("ssn", _SSN, _is_ssn),
    ("phone", _PHONE, _is_phone),
)


def mask(text: str) -> str:
    """Return a text with all but its first and last character hidden."""
    return text[:1] + "•" * max(1, min(len(text), 24) - 2) + text[-1:]


EXCERPT = 160  # characters


def masked_excerpt(text: str) -> str:
    """Return the start of a text on one line, with its personal data masked."""
    start = text[: 4 * EXCERPT]
    parts, position = [], 0
    for _, begin, end in sorted(find_pii(start), key=lambda hit: hit[1]):
        if begin >= position:
            parts += [start[position:begin], mask(start[begin:end])]
            position = end
    line = " ".join("".join([*parts, start[position:]]).split())
    return line[:EXCERPT] + ("…" if len(line) > EXCERPT else "")
