"""Copies, near copies and shared stretches: MinHash over 5-grams, verified in full.

Each piece leaves a file with a row per document: a hash of its content and 16 keys, one for each
band of 8 of its 128 MinHash values. Documents with an equal key are candidates; these are read once
more, and count as near copies where the Jaccard similarity of their 5-grams is 0.8 or more. What is
held in memory is one band's keys of one part of the key space at a time, the candidate pairs and
the numbers of all copies.

Stretches that many documents share are found in a sample by a suffix array. Of flat token files an
index is written, by which a model's own texts are searched for copies.

Sources: Broder's MinHash; Leskovec, Rajaraman and Ullman's banding; Lee et al., arXiv:2107.06499
(substrings; 0.8). 128 values in 16 bands: a pair of 0.8 is a candidate in 95 % of cases, of 0.9 in
all.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..errors import InputError, StoreError
from .corpus import Document, Fields, Piece, documents, need, token_layout
from .manifest import Cluster, Duplicates, Hotspots
from .text_metrics import errors_of_tokenizer, load_tokenizer, masked_excerpt

GRAM = 5
VALUES, BANDS = 128, 16
SEED = 42
ALIKE = 0.8
BATCH_BYTES = 1 << 20  # of text whose signatures are made at once
PART = 1 << 22  # rows of one band in memory: 100 MB with what sorts them
ALL_PAIRS = 48  # of a larger group, pairs with its first members and with the next one
SHOWN = 20  # clusters with excerpts
STRETCH = 200  # bytes
SAMPLE = 12 << 20  # bytes whose suffix array is made: 13 times so much memory
# Of an index: tokens of a gram, from one to the next (each copy of 50 has one), grams at a time.
INDEX_GRAM, INDEX_STRIDE, INDEX_BLOCK = 25, 26, 1 << 18
INDEX_HEAD = 4096  # bytes
_TERMS = re.compile(r"\w+")
_MIX = 0x9E3779B97F4A7C15


class DocumentPosition(NamedTuple):
    """One document by its position: number of the piece, number in it."""

    piece: int
    number: int


def row_type() -> Any:
    """Return the type of a row: content hash in two halves, then the keys of the bands."""
    return need("numpy").dtype([("high", "<u8"), ("low", "<u8"), ("keys", "<u8", (BANDS,))])


def gram_hashes(document: Document) -> Any:
    """Return a hash of each 5-gram of a document, in order: of terms, or of token ids."""
    numpy = need("numpy")
    if document.ids is None:
        terms = _TERMS.findall(document.text.lower())
        hashes = need("rensa").RMinHash.hash_token_sets([terms])[0]
        values = numpy.array(hashes, numpy.uint64)
    else:
        values = document.ids.astype(numpy.uint64) * numpy.uint64(_MIX)
        values ^= values >> numpy.uint64(29)
    count = max(1, len(values) - GRAM + 1)
    grams = values[:count].copy()
    for shift in range(1, min(GRAM, len(values))):
        grams *= numpy.uint64(_MIX)
        grams ^= values[shift : count + shift]
    return grams


class Signer:
    """Collects documents and makes the rows of their piece.

    Args:
        near: also make keys; else content hashes alone.
    """

    def __init__(self, *, near: bool) -> None:
        self._numpy = need("numpy")
        self._near = near
        self._rows: list[Any] = []
        self._hashes: list[tuple[int, int]] = []
        self._grams: list[Any] = []
        self._size = 0

    def add(self, document: Document, digest: int) -> None:
        """Take a document and the 128-bit hash of its content; one without any is like no other."""
        digest = 0 if document.is_empty else digest
        self._hashes.append((digest >> 64, digest & 0xFFFFFFFFFFFFFFFF))
        if self._near:
            self._grams.append(gram_hashes(document))
            self._size += len(self._grams[-1]) * 6
        if self._size > BATCH_BYTES or len(self._hashes) > 4096:
            self._sign()

    def finish(self) -> Any:
        """Return the rows of all documents."""
        self._sign()
        return self._numpy.concatenate([self._numpy.empty(0, row_type()), *self._rows])

    def _sign(self) -> None:
        numpy = self._numpy
        if not self._hashes:
            return
        rows = numpy.zeros(len(self._hashes), row_type())
        rows["high"], rows["low"] = numpy.array(self._hashes, numpy.uint64).T
        if self._near:
            edges = numpy.cumsum([0, *map(len, self._grams)], dtype=numpy.uint64)
            flat = numpy.concatenate(self._grams)
            matrix = need("rensa").RMinHash.digest_matrix_from_flat_token_hashes(
                flat, edges, VALUES, SEED
            )
            values = numpy.array(matrix.to_rows(), numpy.uint32)
            rows["keys"] = _band_keys(values)
        self._rows.append(rows)
        self._hashes, self._grams, self._size = [], [], 0


def _band_keys(values: Any) -> Any:
    """Return a key of 64 bits for each band of each row."""
    numpy = need("numpy")
    parts = values.reshape(len(values), BANDS, VALUES // BANDS).astype(numpy.uint64)
    keys = numpy.zeros(parts.shape[:2], numpy.uint64)
    for i in range(parts.shape[2]):
        keys ^= parts[:, :, i]
        keys *= numpy.uint64(_MIX)
        keys ^= keys >> numpy.uint64(31)
    return keys


class Rows:
    """The rows of all pieces, in files, of which one at a time is open; numbered through.

    Args:
        held_out: of each piece, whether it is of the held-out set.
    """

    def __init__(self, paths: Sequence[Path], held_out: Sequence[bool]) -> None:
        self._numpy = numpy = need("numpy")
        self._paths = paths
        self.edges = numpy.cumsum([0, *(len(self._of(i)) for i in range(len(paths)))])
        self.total = int(self.edges[-1])
        self._held_out = held_out
        self.parts = max(1, -(-self.total // PART))

    def _of(self, piece: int) -> Any:
        """Return the rows of a piece. Raises StoreError."""
        path = self._paths[piece]
        try:
            return self._numpy.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise StoreError(
                f"{path}: {error}", hint=f"remove {path.parent} and check again"
            ) from error

    def column(self, read: Callable[[Any], Any], part: int) -> tuple[Any, Any]:
        """Return a value of each document whose value is in a part of the key space, and numbers.

        Documents without content are left out.

        Args:
            read: from rows to values of 64 bits.
        """
        numpy = self._numpy
        values, numbers = [numpy.empty(0, "u8")], [numpy.empty(0, "i8")]
        for piece, edge in enumerate(self.edges[:-1].tolist()):
            rows = self._of(piece)
            for start in range(0, len(rows), 1 << 16):
                block = rows[start : start + (1 << 16)]
                column = read(block)
                is_hit = column % numpy.uint64(self.parts) == part
                hits = numpy.flatnonzero(is_hit & (block["high"] != 0))
                values.append(column[hits])
                numbers.append(hits + edge + start)
        return numpy.concatenate(values), numpy.concatenate(numbers)

    def low_hash(self, numbers: Any) -> Any:
        """Return the second half of the hash of these documents."""
        numpy = self._numpy
        result = numpy.empty(len(numbers), "u8")
        order = numpy.argsort(numbers)
        bounds = numpy.searchsorted(numbers[order], self.edges)
        for piece in numpy.flatnonzero(numpy.diff(bounds)).tolist():
            hits = order[bounds[piece] : bounds[piece + 1]]
            result[hits] = self._of(piece)["low"][numbers[hits] - self.edges[piece]]
        return result

    def count_held_out(self) -> int:
        """Return how many documents of the held-out set have content."""
        pieces = (i for i, out in enumerate(self._held_out) if out)
        return sum(int(self._numpy.count_nonzero(self._of(i)["high"])) for i in pieces)

    def is_held_out(self, numbers: Any) -> Any:
        """Return whether each of these documents is of the held-out set."""
        pieces = self._numpy.searchsorted(self.edges, numbers, side="right") - 1
        return self._numpy.array([*self._held_out, False])[pieces]

    def found(self, number: int) -> DocumentPosition:
        """Return the position of a document."""
        piece = int(self._numpy.searchsorted(self.edges, number, side="right")) - 1
        return DocumentPosition(piece, number - int(self.edges[piece]))


def equal_groups(values: Any, numbers: Any) -> Iterator[Any]:
    """Yield the numbers of documents with one value, where there are several; in their order."""
    numpy = need("numpy")
    order = numpy.lexsort((numbers, values))
    ordered = values[order]
    edges = numpy.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    starts = numpy.concatenate([[0], edges, [len(ordered)]])
    sizes = numpy.diff(starts)
    for group in numpy.flatnonzero(sizes > 1).tolist():
        yield numbers[order[starts[group] : starts[group + 1]]]


class Clusters:
    """Sets of documents that are joined; the first one of a set stands for it."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}

    def root(self, number: int) -> int:
        parents = self.parents
        while (parent := parents.get(number, number)) != number:
            parents[number] = parents.get(parent, parent)
            number = parent
        return number

    def join(self, a: int, b: int) -> None:
        first, second = sorted((self.root(a), self.root(b)))
        if first != second:
            self.parents[second] = first

    def members(self) -> dict[int, list[int]]:
        """Return the documents of each cluster by its first one."""
        result: dict[int, list[int]] = {}
        for number in self.parents:
            result.setdefault(self.root(number), []).append(number)
        return {root: sorted({root, *numbers}) for root, numbers in result.items()}


def find_copies(
    rows: Rows, pieces: Sequence[Piece], fields: Fields, spool: Path, *, near: bool
) -> Duplicates:
    """Return the copies among all documents.

    Args:
        spool: a file for the 5-grams of candidates, which is removed.
    """
    result = Duplicates()
    clusters = Clusters()
    leaks: set[int] = set()
    copies = _join_equal(rows, clusters, leaks)
    result.val_documents = held_out = rows.count_held_out()
    result.exact = sum(1 for number in clusters.parents if clusters.root(number) != number)
    if held_out:
        result.val_exact = len(leaks)
    if near:
        pairs = _candidates(rows, copies)
        _verify(pairs, rows, pieces, fields, spool, clusters, leaks)
        result.near = sum(1 for number in clusters.parents if clusters.root(number) != number)
        if held_out:
            result.val_near = len(leaks)
    members = clusters.members()
    result.sizes = dict(sorted(Counter(map(len, members.values())).items()))
    largest = sorted(members.values(), key=lambda numbers: (-len(numbers), numbers))[:SHOWN]
    result.clusters = _excerpts(largest, rows, pieces, fields)
    return result


def _join_equal(rows: Rows, clusters: Clusters, leaks: set[int]) -> set[int]:
    """Join documents with the same content; return those that are copies of an earlier one."""
    numpy = need("numpy")
    copies: set[int] = set()
    for part in range(rows.parts):
        groups = list(equal_groups(*rows.column(lambda r: r["high"], part)))
        if not groups:
            continue
        lows = rows.low_hash(numpy.concatenate(groups))
        ends = numpy.cumsum([*map(len, groups)]).tolist()
        for group, end in zip(groups, ends, strict=True):
            low = lows[end - len(group) : end]
            for value in numpy.unique(low):
                same = group[low == value]
                if len(same) < 2:
                    continue
                out = rows.is_held_out(same)
                train, val = same[~out].tolist(), same[out].tolist()
                if train:
                    leaks.update(val)
                for number in train[1:]:
                    clusters.join(train[0], number)
                copies.update(train[1:], val if train else val[1:])
    return copies


def _candidates(rows: Rows, copies: set[int]) -> Any:
    """Return pairs of documents that share a band, packed into one number each, sorted."""
    numpy = need("numpy")
    found_pairs = numpy.empty(0, "u8")
    skipped = numpy.array(sorted(copies), "i8")
    for band in range(BANDS):
        for part in range(rows.parts):
            values, numbers = rows.column(_band_reader(band), part)
            fresh = ~numpy.isin(numbers, skipped)
            pairs: list[tuple[int, int]] = []
            for group in equal_groups(values[fresh], numbers[fresh]):
                pairs += _pairs_of(group, rows.is_held_out(group))
            if pairs:
                packed = numpy.array(pairs, "u8")
                packed = (packed[:, 0] << numpy.uint64(32)) | packed[:, 1]
                found_pairs = numpy.union1d(found_pairs, packed)
    return found_pairs


def _band_reader(band: int) -> Callable[[Any], Any]:
    return lambda rows: rows["keys"][:, band]


def _pairs_of(group: Any, out: Any) -> Iterator[tuple[int, int]]:
    train, val = group[~out].tolist(), group[out].tolist()
    if len(train) <= ALL_PAIRS:
        yield from itertools.combinations(train, 2)
    else:
        yield from itertools.pairwise(train)
        yield from ((first, other) for first in train[:4] for other in train if first < other)
    for number in val:
        for other in train[:ALL_PAIRS]:
            yield (other, number) if other < number else (number, other)


def _verify(
    pairs: Any,
    rows: Rows,
    pieces: Sequence[Piece],
    fields: Fields,
    spool: Path,
    clusters: Clusters,
    leaks: set[int],
) -> None:
    """Join the pairs that are alike in full."""
    numpy = need("numpy")
    first = (pairs >> numpy.uint64(32)).astype("i8")
    second = (pairs & numpy.uint64(0xFFFFFFFF)).astype("i8")
    wanted_numbers = numpy.unique(numpy.concatenate([first, second]))
    sizes: dict[int, tuple[int, int]] = {}
    with spool.open("wb") as file:
        for number, document in read_documents(wanted_numbers.tolist(), rows, pieces, fields):
            grams = numpy.unique(gram_hashes(document))
            sizes[number] = file.tell() // 8, len(grams)
            grams.tofile(file)
            file.seek(0, 2)
    if sizes and spool.stat().st_size:
        grams = numpy.memmap(spool, "u8", "r")
        out = dict(
            zip(wanted_numbers.tolist(), rows.is_held_out(wanted_numbers).tolist(), strict=True)
        )
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            if a not in sizes or b not in sizes:
                continue
            val = a if out[a] else b if out[b] else None
            done = val in leaks if val is not None else clusters.root(a) == clusters.root(b)
            if done:
                continue
            (i, n), (j, m) = sizes[a], sizes[b]
            if jaccard(grams[i : i + n], grams[j : j + m]) < ALIKE:
                continue
            if val is None:
                clusters.join(a, b)
            else:
                leaks.add(val)
        del grams
    spool.unlink(missing_ok=True)


def jaccard(ours: Any, theirs: Any) -> float:
    """Return the Jaccard similarity of two sorted sets."""
    small, large = min(len(ours), len(theirs)), max(len(ours), len(theirs))
    if small < ALIKE * large:
        return small / max(1, large)  # no more than that
    common = len(need("numpy").intersect1d(ours, theirs, assume_unique=True))
    return float(common / max(1, small + large - common))


def read_documents(
    numbers: Sequence[int], rows: Rows, pieces: Sequence[Piece], fields: Fields
) -> Iterator[tuple[int, Document]]:
    """Yield documents by their numbers, which are sorted."""
    wanted_by_piece: dict[int, dict[int, int]] = {}
    for number in numbers:
        found = rows.found(number)
        wanted_by_piece.setdefault(found.piece, {})[found.number] = number
    for piece, wanted_numbers in wanted_by_piece.items():
        last = max(wanted_numbers)
        texts = (d for d in documents(pieces[piece], fields) if isinstance(d, Document))
        for position, document in enumerate(texts):
            if position in wanted_numbers:
                yield wanted_numbers[position], document
            if position >= last:
                break


def _excerpts(
    groups: Sequence[Sequence[int]], rows: Rows, pieces: Sequence[Piece], fields: Fields
) -> list[Cluster]:
    """Return clusters with how their first two documents begin."""
    shown_numbers = sorted({number for group in groups for number in group[:2]})
    texts = {n: _excerpt(d) for n, d in read_documents(shown_numbers, rows, pieces, fields)}
    return [
        Cluster(len(group), [texts[number] for number in group[:2] if number in texts])
        for group in groups
    ]


def _excerpt(document: Document) -> str:
    if document.ids is None:
        return masked_excerpt(document.text)
    return "tokens " + " ".join(map(str, document.ids[:24].tolist()))


# ── stretches ─────────────────────────────────────────────────────────────────────────────────────

Sample = Sequence[tuple[int, bytes]]  # hash of a document, and its first bytes


def thin_sample(sample: Iterable[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return the documents with the least hashes, different ones, up to a number of bytes."""
    result: list[tuple[int, bytes]] = []
    size = 0
    by_hash: Mapping[int, bytes] = dict(sample)
    for digest in sorted(by_hash):
        size += len(by_hash[digest]) + 1
        if size > SAMPLE and result:
            break
        result.append((digest, by_hash[digest]))
    return result


def find_hotspots(sample: Sample) -> Hotspots:
    """Return the stretches that several documents of a sample share."""
    numpy = need("numpy")
    result = Hotspots(documents=len(sample), bytes=sum(len(raw) for _, raw in sample))
    if len(sample) < 2 or result.bytes < 2 * STRETCH:
        return result
    divsufsort = need("pydivsufsort")
    text = b"\0".join(raw for _, raw in sample)
    edges = numpy.cumsum([0, *(len(raw) + 1 for _, raw in sample)])
    array = divsufsort.divsufsort(text)
    common = divsufsort.kasai(text, array)
    alike = numpy.asarray(common) >= STRETCH
    starts = numpy.flatnonzero(alike & ~numpy.concatenate([[False], alike[:-1]]))
    ends = numpy.flatnonzero(alike & ~numpy.concatenate([alike[1:], [False]])) + 1
    groups: list[tuple[int, int, int]] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if end - start < max(2, result.shared // 2):
            continue
        owners = numpy.unique(numpy.searchsorted(edges, array[start : end + 1], side="right"))
        if len(owners) > 1:
            result.shared = max(result.shared, len(owners))
            groups.append((len(owners), int(array[start]), int(owners[0])))
    seen_owners: set[int] = set()
    for count, begin, owner in sorted(groups, key=lambda group: (-group[0], group[1])):
        if owner not in seen_owners and len(result.excerpts) < 5:
            seen_owners.add(owner)
            stretch = text[begin : begin + STRETCH].decode("utf-8", "replace")
            result.excerpts.append(Cluster(count, [masked_excerpt(stretch)]))
    return result


# ── index of token files ──────────────────────────────────────────────────────────────────────────


def needs_tokenizer(pieces: Sequence[Piece], tokenizer: str) -> bool:
    """Return whether an index of these pieces needs the tokenizer.

    Raises:
        InputError: it does, and there is none.
    """
    others = [piece.label for piece in pieces if piece.form != "tokens"]
    if others and not tokenizer:
        raise InputError(
            f"an index is of flat token files, and {others[0]} is none",
            hint="of texts it takes --tokenizer, the tokenizer.json of the job",
        )
    return bool(others)


def write_index(path: Path, pieces: Sequence[Piece], fields: Fields, tokenizer: str = "") -> int:
    """Write where each 26th sequence of 25 tokens of flat token files is; return how many.

    With a tokenizer also of texts, whose tokens are written beside it.

    A head of 4096 bytes, JSON filled up with zeros; then as little-endian uint64 the hashes in
    order, and the place of each over all files. The hash is polynomial, modulo 2**64. Of memory it
    takes 100 MB; of disk 0.62 bytes a token, and as much again while it is sorted.

    Raises:
        InputError: a file is of another form. StoreError: it cannot be written.
    """
    numpy = need("numpy")
    tokens_path, is_encoded = path.with_name(f"{path.name}.tokens"), False
    rows, total = [], 0
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            count = 0
            if is_encoded := needs_tokenizer(pieces, tokenizer):
                pieces = [_write_tokens(Path(folder) / "tokens", pieces, fields, tokenizer)]
                fields = msgspec.structs.replace(fields, dtype="uint32")
            for piece in pieces:
                dtype, offset = token_layout(piece, fields)
                tokens = (piece.size - offset) // numpy.dtype(dtype).itemsize
                kind = {"<u2": "H", "<u4": "I", "<i4": "i"}[dtype]
                file = str((tokens_path if is_encoded else piece.file).resolve())
                rows.append((file, piece.size, piece.mtime_ns, offset, kind, tokens))
                if tokens >= INDEX_GRAM:
                    ids = numpy.memmap(piece.file, dtype, "r", offset, (tokens,))
                    count += _divide_grams(ids, total, Path(folder))
                total += tokens
            head: dict[str, Any] = {"gram": INDEX_GRAM, "stride": INDEX_STRIDE, "base": _MIX}
            head |= {"count": count, "files": rows, "digest": _join_grams(Path(folder), count)}
            text = json.dumps(head).encode()
            if len(text) > INDEX_HEAD:
                raise InputError(f"{len(pieces)} files are too many for an index: join some")
            with (Path(folder) / "whole").open("r+b") as out:
                out.write(text)
            if is_encoded:  # only now: a run may search with the index of before
                (Path(folder) / "tokens").replace(tokens_path)
            (Path(folder) / "whole").replace(path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    return total


def _write_tokens(path: Path, pieces: Sequence[Piece], fields: Fields, tokenizer: str) -> Piece:
    """Write documents as one flat file of uint32. Raises InputError, OSError."""
    numpy, encoder = need("numpy"), load_tokenizer(tokenizer)
    with path.open("wb") as out:
        for record in itertools.chain(*(documents(piece, fields) for piece in pieces)):
            if isinstance(record, Document):
                ids = record.ids
                if ids is None:
                    with errors_of_tokenizer():
                        ids = encoder.encode(record.text, add_special_tokens=False).ids
                out.write(numpy.asarray(ids, "<u4").tobytes())
    stat = path.stat()
    return Piece(str(path), "", "tokens", stat.st_size, stat.st_mtime_ns)


def _divide_grams(ids: Any, first: int, folder: Path) -> int:
    """Append hashes and places of the grams of one file to files by the hash's first byte."""
    numpy = need("numpy")
    count = (len(ids) - INDEX_GRAM) // INDEX_STRIDE + 1
    for begin in range(0, count, INDEX_BLOCK):
        size = min(INDEX_BLOCK, count - begin)
        start = begin * INDEX_STRIDE
        hashes = numpy.zeros(size, "<u8")
        block = ids[start : start + (size - 1) * INDEX_STRIDE + INDEX_GRAM]
        for place in range(INDEX_GRAM):
            hashes *= numpy.uint64(_MIX)
            hashes += block[place::INDEX_STRIDE][:size].astype("<u8") + numpy.uint64(1)
        places = first + (begin + numpy.arange(size, dtype="<u8")) * numpy.uint64(INDEX_STRIDE)
        order = numpy.argsort(hashes)
        pairs = numpy.stack([hashes, places], 1)[order]
        edges = numpy.searchsorted(pairs[:, 0] >> numpy.uint64(56), numpy.arange(257, dtype="<u8"))
        for part in range(256):
            if edges[part] < edges[part + 1]:
                with (folder / f"{part:02x}").open("ab") as out:
                    out.write(pairs[edges[part] : edges[part + 1]].tobytes())
    return count


def _join_grams(folder: Path, count: int) -> str:
    """Write hashes in order and places behind the head; return the SHA-256 of the hashes."""
    numpy = need("numpy")
    sha, done = hashlib.sha256(), 0
    with (folder / "whole").open("wb") as out:
        out.truncate(INDEX_HEAD + 16 * count)
        for part in sorted(file for file in folder.iterdir() if len(file.name) == 2):
            pairs = numpy.fromfile(part, "<u8").reshape(-1, 2)
            pairs = pairs[numpy.argsort(pairs[:, 0], kind="stable")]
            for column, start in ((0, INDEX_HEAD), (1, INDEX_HEAD + 8 * count)):
                out.seek(start + 8 * done)
                out.write(pairs[:, column].tobytes())
            sha.update(pairs[:, 0].tobytes())
            done += len(pairs)
    return sha.hexdigest()
