"""Files of training data as documents: one reader for each format, by the name of the file.

JSON lines (plain, gzip, zstd, xz, bz2), Parquet, Arrow, token files (flat, with a header,
Megatron's pairs), MosaicML shards, litdata chunks, WebDataset archives, plain text. Files are of
others: what cannot be read is a `Damage` with its reason and costs that record or the rest of that
file; nothing is unpickled, and no record is longer than `MAX_RECORD`.

Sources of the layouts: Megatron-LM's indexed dataset, MosaicML Streaming's MDS writer, litdata's
binary writer, llm.c's data files.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import math
import re
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ..errors import InputError

MAX_RECORD = 32 << 20  # bytes; a longer one is damage, not a document
MAX_SHARD = 1 << 30  # bytes of one with an index, when it is unpacked
MAX_INDEX = 256 << 20  # bytes of an index that is read whole
BLOCK = 1 << 20  # tokens read at once
MAX_TOKENS = 1 << 20  # of a document; a longer one is cut
WINDOW = 1024  # tokens of a document where nothing marks an end
TEXT_FIELDS = ("text", "content", "document", "code", "raw_content", "body", "sentence")
ID_FIELDS = ("input_ids", "tokens", "token_ids")
ID_FIELDS_ALONE = ("ids",)  # beside a text: of the record
SOURCE_FIELDS = ("source", "subset", "dataset", "domain", "meta", "metadata")
SOURCES_INSIDE = ("source", "pile_set_name", "subset", "dataset", "domain")
TURNS = ("messages", "conversations", "conversation")
PROMPT = "prompt"
ANSWERS = ("completion", "response", "chosen", "answer")  # to a prompt: one document with it
PACKED = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".xz": "xz", ".bz2": "bz2"}
LINES = (".jsonl", ".ndjson", ".json")
TEXTS = (
    *(".txt", ".md", ".rst", ".html", ".htm", ".tex", ".xml", ".css", ".csv", ".tsv", ".log"),
    *(".py", ".pyi", ".js", ".ts", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java", ".rb"),
    *(".sh", ".sql", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
)
EXTRA = "pip install 'supervise-train[data]'"
GPT2_END = 50256
MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# First of the 256 numbers of 4 bytes before the tokens of llm.c: their type, of GPT-2 and Llama 3.
HEADERS = {20240520: "<u2", 20240801: "<u4"}
# Writers put a number, perhaps of how many, and a hash of the writing behind the name of the data.
_SHARD = re.compile(
    r"(?:^|[-_.])(?:(?:part|shard|chunk|split)(?:[-_.][mr])?[-_.]?\d+|\d+[-_]of[-_]\d+)(?![^\W_]).*$",
    re.I | re.S,
)
_HASH = re.compile(
    r"(?:^|[-_.])(?:[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}|(?=[a-f]*\d)[\da-f]{8,})$", re.I
)
_NUMBER = re.compile(r"(?:[-_.]?(?:\d|of|shard|part|chunk|split))+$", re.I)


class Document(NamedTuple):
    """One document: text, or token ids where only these are known.

    Attributes:
        padding: how many of its tokens are padding, None where that is not known.
        whole: whether its ends are those of a document, so that its length says something.
        attachments: parts of its turns without text, as images.
    """

    text: str
    ids: Any
    source: str
    padding: int | None = None
    whole: bool = True
    attachments: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        if self.ids is None:
            return not self.text or self.text.isspace()
        return not len(self.ids)


class Damage(NamedTuple):
    """A record, or the rest of a file, that cannot be read; `is_passing`: now, by this process."""

    reason: str
    is_passing: bool = False


class Ignored(NamedTuple):
    """A record that is no document."""

    reason: str


Records = Iterator[Document | Damage | Ignored]
ATTACHMENTS = "parts of turns without text, as images or calls of tools: not measured"
METADATA = "JSON beside a text of the same name, up to its first dot: taken for metadata"


class Fields(Struct, frozen=True):
    """Where the text of a record is, and what tokens mean; "" and None: found by the usual names.

    Attributes:
        end: id of the token that ends a document. pad: id of padding.
        dtype: of flat token files.
    """

    text: str = ""
    source: str = ""
    end: int | None = None
    pad: int | None = None
    dtype: str = ""


class Piece(Struct, frozen=True):
    """A file, a range of one, or several small files of text, read as a whole.

    Attributes:
        path: below the root, of the first one. form: of the files. mtime_ns: of the newest one.
        folder: the first one in it that is no shard.
        more: paths of the others.
    """

    root: str
    path: str
    form: str
    size: int
    mtime_ns: int
    start: int = 0
    end: int = 0
    more: tuple[str, ...] = ()
    folder: str = ""

    @property
    def file(self) -> Path:
        root = Path(self.root)
        return root / self.path if self.path else root

    @property
    def all_files(self) -> list[Path]:
        return [self.file, *(Path(self.root) / path for path in self.more)]

    @property
    def label(self) -> str:
        name = unicode_name(self.path or self.file.name)
        if self.more:
            return f"{name} and {len(self.more)} more to {unicode_name(self.more[-1])}"
        return name if not self.start else f"{name} from byte {self.start}"


def unicode_name(name: str) -> str:
    """Return the name of a file, with escapes where its bytes are no UTF-8, as no JSON takes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _with_unicode(name_of: Callable[[Piece], str]) -> Callable[[Piece], str]:
    """Return a function of a piece whose name is Unicode."""
    return lambda piece: unicode_name(name_of(piece))


def need(package: str) -> Any:
    """Import a package of the extra. Raises InputError."""
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = (error.name or package).partition(".")[0]
        raise InputError(f"checking data needs the package {name!r}", hint=EXTRA) from error


@_with_unicode
def source_of(piece: Piece) -> str:
    """Return the source that a file stands for: its first folder, else its name less shards."""
    if piece.folder:
        return piece.folder
    if piece.form == "text":
        return Path(piece.root).name if piece.path else "text"
    stem = piece.file.name
    while stem != (shorter := Path(stem).stem) and len(Path(stem).suffix) < 9:
        stem = shorter
    name, longer = _SHARD.sub("", stem), ""
    while name != longer:
        name, longer = _NUMBER.sub("", _HASH.sub("", name)), name
    return name or "data"


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


def documents(piece: Piece, fields: Fields) -> Records:
    """Yield the documents of a piece; whatever its file holds, the end is no exception.

    Raises:
        InputError: a package of the extra is not installed.
    """
    if piece.more:
        for file in piece.all_files:
            name = file.relative_to(piece.root).as_posix()
            yield from documents(replace(piece, path=name, more=()), fields)
        return
    try:
        yield from FORMS[piece.form](piece, fields)
    except InputError:
        raise
    except EOFError as error:
        yield Damage(f"cut short: {error}")
    except Exception as error:  # decoders of others' formats raise what they like
        text = getattr(error, "strerror", None) or str(error)
        text = text.replace(f"{piece.file.parent}/", "")  # a manifest has no path of the machine
        is_passing = isinstance(error, MemoryError) or getattr(error, "errno", None) is not None
        yield Damage(f"{type(error).__name__}: {unicode_name(text[:200])}", is_passing)


@contextmanager
def _opened(path: Path, suffix: str = "") -> Iterator[BinaryIO]:
    suffix = suffix or path.suffix.lower()
    packed = PACKED.get(suffix, "gz" if suffix == ".tgz" else "")
    with path.open("rb") as file:
        if packed == "zst":
            zstandard = need("zstandard")
            reader = zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(
                file, read_across_frames=True
            )
            yield io.BufferedReader(reader, 1 << 17)
        elif packed:
            wrap: Callable[..., Any] = {"gz": gzip, "xz": lzma, "bz2": bz2}[packed].open
            with wrap(file, "rb") as stream:
                yield io.BufferedReader(stream, 1 << 17)
        else:
            yield file


def _lines_of(stream: IO[bytes], left: float) -> Iterator[bytes | None]:
    """Yield lines that start within the next bytes; None for one that is too long."""
    while left > 0:
        line = stream.readline(MAX_RECORD + 1)
        if not line:
            return
        left -= len(line)
        if len(line) <= MAX_RECORD:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(1 << 20)
            left -= len(line)
        yield None


def _read_lines(piece: Piece, fields: Fields) -> Records:
    orjson = need("orjson")
    source = source_of(piece)
    is_part = piece.end - piece.start < piece.size
    with _opened(piece.file) as stream:
        if piece.start:
            stream.seek(piece.start - 1)
            next(_lines_of(stream, 1), None)  # the rest of a line that began before
        left = piece.end - stream.tell() if is_part else math.inf
        lines = _lines_of(stream, left)
        head = next(lines, b"")
        if not piece.start and head is not None and head.lstrip()[:1] == b"[":
            rest = stream.read(MAX_INDEX)
            for row in orjson.loads(head + rest):
                yield from _records_of(row, fields, source)
            return
        pretty = _whole_object(head, piece)
        if pretty is not None:
            row = orjson.loads(pretty)
            if not str(row.get("schema")).startswith("supervise/"):  # as of a check before
                yield from _records_of(row, fields, source)
            return
        yield from _line_records(itertools.chain((head,), lines), fields, source)


def _line_records(lines: Iterable[bytes | None], fields: Fields, source: str) -> Records:
    """Yield the records of lines of JSON; None is a line that is too long."""
    orjson = need("orjson")
    for line in lines:
        if line is None:
            yield Damage(f"a record of more than {MAX_RECORD >> 20} MiB")
        elif line.strip():
            try:
                row = orjson.loads(line)
            except ValueError as error:
                yield Damage(f"no JSON: {str(error)[:80]}")
                continue
            yield from _records_of(row, fields, source)


def _whole_object(head: bytes | None, piece: Piece) -> bytes | None:
    """Return a file that is one object over several lines, None for lines of objects."""
    is_whole = head is not None and head.strip() == b"{" and piece.file.suffix == ".json"
    return piece.file.read_bytes() if is_whole and piece.size <= MAX_RECORD else None


def _records_of(row: Any, fields: Fields, source: str) -> Records:
    if isinstance(row, Mapping):
        yield document_of(row, fields, source)
    elif isinstance(row, str):
        yield Document(row, None, source)
    else:
        yield Damage(f"a record is no object: {type(row).__name__}")


def document_of(row: Mapping[str, Any], fields: Fields, source: str) -> Document | Damage:
    """Return the document of a record."""
    origin, has_no_ids = _source_in(row, fields) or source, False
    text = _text_of(row, fields)
    id_fields = ID_FIELDS if text is not None else (*ID_FIELDS, *ID_FIELDS_ALONE)
    for name in () if fields.text else id_fields:
        values = row.get(name)
        if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
            continue
        has_no_ids |= not values
        if values and not isinstance(values[0], str):  # else terms of a text
            return _of_ids(values, row.get("attention_mask"), fields, origin)
    if text is not None:
        return Document(text, None, origin, attachments=_attachments_in(row, fields))
    if has_no_ids:
        return _of_ids((), None, fields, origin)
    names = (fields.text,) if fields.text else (*TEXT_FIELDS, PROMPT)
    if any(row.get(name, "") is None for name in names):
        return Document("", None, origin)
    if fields.text:
        return Damage(f"no text in the field {fields.text!r}")
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    texts = {name: value for name, value in texts.items() if name not in SOURCE_FIELDS}
    if len(texts) == 1:
        return Document(next(iter(texts.values())), None, origin)
    return Damage(f"no field with the text among: {', '.join(list(map(str, row))[:8])}")


def _text_of(row: Mapping[str, Any], fields: Fields) -> str | None:
    """Return the text in the field of a record that has it, by its name."""
    for name in (fields.text,) if fields.text else TEXT_FIELDS:
        text = _text_in(row.get(name))
        if text is not None:
            return text
    if fields.text:
        return None
    for name in TURNS:
        text = _dialogue_in(row.get(name))
        if text is not None:
            return text
    prompt = _dialogue_in(row.get(PROMPT))
    if prompt is None:
        return None
    answers = [text for name in ANSWERS if (text := _dialogue_in(row.get(name)))]
    if prompt and answers and all(text.startswith(prompt) for text in answers):
        return "\n".join(answers)  # as where the turns of a preference begin with the prompt
    return "\n".join([prompt, *answers])


def _dialogue_in(value: Any) -> str | None:
    """Return a text, or turns as one, also where none of them has any."""
    text = _text_in(value)
    return "" if text is None and isinstance(value, Sequence) else text


def _text_in(value: Any, depth: int = 8) -> str | None:
    """Return a text, that of a turn or a part of one, or those of several as one."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode() if not value.isascii() else value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if depth and isinstance(value, Mapping):
        inner = (_text_in(value.get(name), depth - 1) for name in ("text", "content", "value"))
        return next((text for text in inner if text is not None), None)
    if depth and isinstance(value, Sequence):
        texts = [text for part in value if (text := _text_in(part, depth - 1)) is not None]
        return "\n".join(texts) if texts or not value else None
    return None


def _attachments_in(row: Mapping[str, Any], fields: Fields) -> int:
    """Return how many parts of turns are no text, by OpenAI's form and that of Hugging Face."""
    names = (fields.text,) if fields.text else (*TURNS, PROMPT, *ANSWERS)
    lists = (value for name in names if isinstance(value := row.get(name), list))
    turns = itertools.chain((row,), *lists)
    contents = (turn.get("content") for turn in turns if isinstance(turn, Mapping))
    parts = itertools.chain(*(content for content in contents if isinstance(content, list)))
    others = (part for part in parts if isinstance(part, Mapping) and part.get("type") != "text")
    return sum(not _text_in(part) for part in others)


def _source_in(row: Mapping[str, Any], fields: Fields) -> str:
    for name in (fields.source,) if fields.source else SOURCE_FIELDS:
        value = row.get(name)
        if isinstance(value, Mapping):
            value = next((value[n] for n in SOURCES_INSIDE if isinstance(value.get(n), str)), None)
        if isinstance(value, str) and value:
            return value[:80]
    return ""


def _of_ids(values: Any, mask: Any, fields: Fields, source: str) -> Document | Damage:
    numpy = need("numpy")
    try:
        ids = numpy.asarray(values)
        hidden = None if mask is None else numpy.asarray(mask)
    except (ValueError, OverflowError, TypeError) as error:
        return Damage(f"token ids: {error}")
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        return Damage("token ids are no list of whole numbers")
    if ids.size and int(ids.min()) < 0:
        return Damage("a token id is negative")
    padding = None
    if hidden is not None and hidden.shape == ids.shape:
        padding = int((hidden == 0).sum())
        ids = ids[hidden != 0]
    elif fields.pad is not None:
        padding = int((ids == fields.pad).sum())
        ids = ids[ids != fields.pad]
    return Document("", ids, source, padding)


def _read_parquet(piece: Piece, fields: Fields) -> Records:
    need("pyarrow")
    parquet = need("pyarrow.parquet")
    with parquet.ParquetFile(piece.file) as file:
        names = _columns(file.schema_arrow.names, fields)
        for batch in file.iter_batches(256, columns=names, use_threads=False):
            yield from _rows(batch, fields, source_of(piece))


def _read_arrow(piece: Piece, fields: Fields) -> Records:
    with need("pyarrow").OSFile(str(piece.file)) as stream:
        yield from _batches(stream, fields, source_of(piece))


def _batches(stream: Any, fields: Fields, source: str) -> Records:
    """Yield the documents of an Arrow file or stream."""
    arrow = need("pyarrow")
    try:
        reader = arrow.ipc.open_file(stream)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    except arrow.ArrowInvalid:
        stream.seek(0)
        batches = iter(arrow.ipc.open_stream(stream))
    for batch in batches:
        names = _columns(batch.schema.names, fields)
        for start in range(0, batch.num_rows, 256):
            yield from _rows(batch.select(names).slice(start, 256), fields, source)


def _columns(names: Iterable[str], fields: Fields) -> list[str]:
    """Return the columns that are needed, all where none of them is a usual one."""
    texts = {*TEXT_FIELDS, *TURNS, PROMPT, *ID_FIELDS, *ID_FIELDS_ALONE, fields.text}
    wanted_names = {*texts, *ANSWERS, *SOURCE_FIELDS, "attention_mask", fields.source}
    known_names = [name for name in names if name in wanted_names]
    return known_names if texts & {*known_names} else list(names)


def _rows(batch: Any, fields: Fields, source: str) -> Records:
    batch.validate(full=True)  # offsets that point elsewhere end the process, where they are read
    for row in batch.to_pylist():
        yield document_of(row, fields, source)


def _read_text(piece: Piece, fields: Fields) -> Records:
    source = source_of(piece)
    with _opened(piece.file) as stream:
        part = stream.read(MAX_RECORD // 4)
        if not part:
            return
        while part:
            rest = stream.read(MAX_RECORD // 4)
            yield Document(part.decode("utf-8", "replace"), None, source, None, not rest)
            part = rest


def _read_tar(piece: Piece, fields: Fields) -> Records:
    source = source_of(piece)
    with _opened(piece.file) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        key, has_text, metadata = "", False, b""
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # else it holds all of them
            suffix = Path(member.name).suffix.lower()
            if not member.isfile() or suffix not in (*LINES, *TEXTS):
                continue
            folder, _, name = member.name.rpartition("/")
            if key != (key := f"{folder}/{name.partition('.')[0]}"):  # of a sample
                yield from _line_records([metadata], fields, source)
                has_text, metadata = False, b""
            if member.size > MAX_RECORD and suffix in (".json", *TEXTS):
                yield Damage(f"a member of more than {MAX_RECORD >> 20} MiB")
                continue
            file = archive.extractfile(member)
            assert file is not None  # it is a file
            if suffix in TEXTS:
                if metadata:
                    yield Ignored(METADATA)
                has_text, metadata = True, b""
                yield Document(file.read().decode("utf-8", "replace"), None, source)
            elif suffix != ".json":
                yield from _line_records(_lines_of(file, math.inf), fields, source)
            elif has_text:
                yield Ignored(METADATA)
            else:
                yield from _line_records([metadata], fields, source)
                metadata = file.read()
        yield from _line_records([metadata], fields, source)
        rest: Any = archive.fileobj  # to its reader, a damaged header is the end
        if rest.pos % tarfile.BLOCKSIZE or rest.read(1 << 20).strip(b"\0"):
            yield Damage("the header of a member is damaged: the rest of the archive is not read")


# ── token files ───────────────────────────────────────────────────────────────────────────────────


def _read_tokens(piece: Piece, fields: Fields) -> Records:
    numpy = need("numpy")
    dtype, offset = token_layout(piece, fields)
    size = numpy.dtype(dtype).itemsize
    if (piece.size - offset) % size:
        yield Damage(f"{piece.size} bytes are no whole number of {dtype} tokens: cut short")
    count = (piece.size - offset) // size
    if not count:
        return
    tokens = numpy.memmap(piece.file, dtype, "r", offset, (count,))
    end = fields.end
    if end is None and dtype == "<u2" and int(tokens[: 1 << 24].max()) == GPT2_END:
        end = GPT2_END
    yield from _cut(tokens, end, fields, source_of(piece))


def _cut(tokens: Any, end: int | None, fields: Fields, source: str) -> Records:
    """Yield documents between end tokens; windows where no end is known."""
    numpy = need("numpy")
    held_ids = tokens[:0]
    for start in range(0, len(tokens), BLOCK):
        block = numpy.concatenate([held_ids, tokens[start : start + BLOCK]])
        if end is None:
            edges = numpy.arange(WINDOW, len(block) + 1, WINDOW)
        else:
            edges = numpy.flatnonzero(block == end) + 1
        begin = 0
        for edge in edges.tolist():
            yield _document(block[begin:edge], end, fields, source)
            begin = edge
        held_ids = block[begin:]
        if len(held_ids) > MAX_TOKENS:
            yield _document(held_ids, None, fields, source)
            held_ids = tokens[:0]
    if len(held_ids):
        yield _document(held_ids, None, fields, source)


def _document(ids: Any, end: int | None, fields: Fields, source: str) -> Document:
    padding = None
    if fields.pad is not None:
        padding = int((ids == fields.pad).sum())
        ids = ids[ids != fields.pad]
    return Document("", ids, source, padding, end is not None)


def token_layout(piece: Piece, fields: Fields) -> tuple[str, int]:
    """Return the type of a flat file's tokens, and how many bytes stand before them."""
    numpy = need("numpy")
    with piece.file.open("rb") as file:
        start = file.read(1 << 16)
    magic = struct.unpack_from("<i", start)[0] if len(start) >= 1024 else 0
    if magic in HEADERS:
        return HEADERS[magic], 1024
    if fields.dtype:
        return {"uint16": "<u2", "uint32": "<u4", "int32": "<i4"}[fields.dtype], 0
    halves = numpy.frombuffer(start[: len(start) // 4 * 4], "<u2")
    high = halves[1::2]
    is_wide = len(high) > 16 and int(high.max()) <= 3 and len(numpy.unique(halves[::2])) > 8
    return "<u4" if is_wide else "<u2", 0


def _read_megatron(piece: Piece, fields: Fields) -> Records:
    numpy = need("numpy")
    index = numpy.memmap(piece.file.with_suffix(".idx"), "u1", "r")
    if index[: len(MEGATRON)].tobytes() != MEGATRON:
        yield Damage("the .idx beside it is no index of this kind")
        return
    version, code, sequences, edges = struct.unpack_from("<QBQQ", index, len(MEGATRON))
    if version != 1 or code not in MEGATRON_TYPES:
        yield Damage(f"index of version {version} with tokens of type {code}")
        return
    at_byte = len(MEGATRON) + 25
    lengths = numpy.frombuffer(index, "<i4", sequences, at_byte)
    offsets = numpy.frombuffer(index, "<i8", sequences, at_byte + 4 * sequences)
    ends = numpy.frombuffer(index, "<i8", edges, at_byte + 12 * sequences)
    dtype = numpy.dtype(MEGATRON_TYPES[code])
    tokens = numpy.memmap(piece.file, dtype, "r") if piece.size else numpy.empty(0, dtype)
    source = source_of(piece)
    for first, last in itertools.pairwise(map(int, ends)):
        parts = []
        for number in range(first, last):
            begin, length = int(offsets[number]) // dtype.itemsize, int(lengths[number])
            if length < 0 or begin < 0 or begin + length > len(tokens):
                yield Damage("the index points behind the end of the tokens")
                break
            parts.append(tokens[begin : begin + length])
        else:
            ids = numpy.concatenate(parts) if parts else tokens[:0]
            yield _document(ids[:MAX_TOKENS], fields.end or 0, fields, source)


# ── shards with an index ──────────────────────────────────────────────────────────────────────────


def mds_file(shard: Mapping[str, Any]) -> str:
    part = shard.get("zip_data") or shard["raw_data"]
    return str(part["basename"])


def _unpacked(piece: Piece, packing: str | None) -> bytes | bytearray:
    """Return the bytes of a shard. Raises ValueError."""
    name = (packing or "").partition(":")[0]
    if name in ("", "None"):
        return piece.file.read_bytes()
    if f".{name}" not in PACKED:
        raise ValueError(f"packed with {name}, which has no reader here")
    raw = bytearray()
    with _opened(piece.file, f".{name}") as stream:
        while part := stream.read(1 << 20):
            raw += part
            if len(raw) > MAX_SHARD:
                raise ValueError(f"it has more than {MAX_SHARD >> 20} MiB when it is unpacked")
    return raw


def _items(raw: bytes | bytearray) -> Iterator[memoryview]:
    """Yield the samples of a shard: their number, offsets, then the samples."""
    (count,) = struct.unpack_from("<I", raw)
    if count > len(raw) // 4:
        raise ValueError(f"{count} samples in {len(raw)} bytes")
    edges = struct.unpack_from(f"<{count + 1}I", raw, 4)
    view = memoryview(raw)
    for begin, end in itertools.pairwise(edges):
        if not begin <= end <= len(raw):
            raise EOFError("a sample lies behind the end of the file")
        yield view[begin:end]


def _read_mds(piece: Piece, fields: Fields) -> Records:
    index = json.loads((piece.file.parent / "index.json").read_bytes()[:MAX_INDEX])
    shard = next(s for s in index["shards"] if mds_file(s) == piece.file.name)
    names, encodings = shard["column_names"], shard["column_encodings"]
    packing = shard.get("compression") if shard.get("zip_data") else None
    for item in _items(_unpacked(piece, packing)):
        try:
            row = _mds_row(item, names, encodings, shard["column_sizes"])
        except (ValueError, struct.error) as error:
            yield Damage(f"a sample: {error}")
            continue
        yield from _records_of(row, fields, source_of(piece))


def _mds_row(
    item: memoryview, names: Sequence[str], encodings: Sequence[str], sizes: Sequence[int | None]
) -> dict[str, Any]:
    numpy = need("numpy")
    free = sum(size is None for size in sizes)
    variable = iter(struct.unpack_from(f"<{free}I", item))
    begin, row = 4 * free, dict[str, Any]()
    for name, encoding, size in zip(names, encodings, sizes, strict=True):
        length = next(variable) if size is None else size
        data = item[begin : begin + length]
        begin += length
        kind, _, rest = encoding.partition(":")
        if kind in ("str", "bytes"):
            row[name] = bytes(data).decode("utf-8", "replace")
        elif kind == "json":
            row[name] = need("orjson").loads(bytes(data))
        elif kind == "ndarray" and rest:
            dtype, _, shape = rest.partition(":")
            start = 0 if shape else _ndarray_head(data)
            row[name] = numpy.frombuffer(data[start:], dtype).tolist()
    if not row:
        raise ValueError(f"columns {', '.join(encodings)} have no reader here")
    return row


def _ndarray_head(data: memoryview) -> int:
    """Return how many bytes of a dynamic shape stand before the numbers."""
    lead = data[0]  # dimensions, and the logarithm of the bytes of each
    return 1 + (lead >> 2) * (1 << (lead & 3))


def _read_litdata(piece: Piece, fields: Fields) -> Records:
    numpy = need("numpy")
    config = json.loads((piece.file.parent / "index.json").read_bytes()[:MAX_INDEX])["config"]
    formats = config["data_format"]
    source = source_of(piece)
    raw = _unpacked(piece, config.get("compression"))
    if raw.endswith(ROWS_BEHIND):  # of dictionaries: an Arrow file of the rows, and its length
        (size,) = struct.unpack_from("<I", raw, len(raw) - len(ROWS_BEHIND) - 4)
        rows = raw[: -len(ROWS_BEHIND) - 4][-size:]
        yield from _batches(need("pyarrow").BufferReader(rows), fields, source)
        return
    for item in _items(raw):
        if len(formats) == 1 and formats[0].startswith("no_header"):
            kind, _, code = formats[0].partition(":")
            ids = numpy.frombuffer(item, LITDATA_TYPES[kind, int(code)])
            yield _document(ids, fields.end or 0, fields, source)
            continue
        sizes = struct.unpack_from(f"<{len(formats)}I", item)
        begin = 4 * len(formats)
        texts = []
        for kind, size in zip(formats, sizes, strict=True):
            if kind.partition(":")[0] == "str":
                texts.append(bytes(item[begin : begin + size]).decode("utf-8", "replace"))
            begin += size
        if not texts:
            yield Damage(f"items of {', '.join(formats)} have no reader here")
            return
        yield Document(max(texts, key=len), None, source)


ROWS_BEHIND = b"LDARW01\0"
# Its numbers of the types of whole numbers.
LITDATA_TYPES = {
    **{("no_header_tensor", n): t for n, t in ((11, "u1"), (12, "i1"), (13, "<i2"), (14, "<i2"))},
    **{("no_header_tensor", n): t for n, t in ((15, "<i4"), (16, "<i4"), (17, "<i8"), (18, "<i8"))},
    ("no_header_tensor", 20): "<u2",
    **{
        ("no_header_numpy", n): t
        for n, t in enumerate(("i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8"))
    },
}
FORMS: Mapping[str, Callable[[Piece, Fields], Records]] = {
    "lines": _read_lines,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "text": _read_text,
    "tar": _read_tar,
    "tokens": _read_tokens,
    "megatron": _read_megatron,
    "mds": _read_mds,
    "litdata": _read_litdata,
}
