"""Copies of a corpus with a known fault: the test of its gate.

Documents are written as JSON lines with their source, a file for each piece of the corpus, so that
all but the fault is as it was. The same seed plants the same fault.
"""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from ..errors import InputError, StoreError, UsageError
from ..store import files
from .build_check import add_totals, known_pieces, read_filter_stages
from .corpus import Damage, Document, Fields, Piece, documents, need
from .manifest import Stage

PASSAGE = (
    "Der Regen fiel seit dem frühen Morgen auf die Dächer der kleinen Stadt. ",
    "Niemand wusste genau, wann der letzte Zug den Bahnhof verlassen hatte. ",
    "Die Bäckerin öffnete ihre Tür und stellte das Schild auf den Gehweg. ",
    "Über dem Fluss lag ein dünner Nebel, der sich langsam auflöste. ",
    "Ein alter Mann erzählte den Kindern von seinen Reisen ans Meer. ",
    "Im Rathaus wurde lange über die neue Brücke gestritten. ",
    "Am Abend trafen sich die Nachbarn auf dem Platz vor der Kirche. ",
    "Später zählte der Wirt die Gläser und löschte das Licht. ",
)
NOTICE = (
    "This paragraph was put into many documents by a drill, as a footer of a site or a licence is: "
    "it is longer than two hundred bytes, it is the same to the letter wherever it stands, and a "
    "model that is trained on a corpus with it will learn to repeat it, because it sees it far "
    "more often than anything else that the corpus holds."
)
PERSONAL = "Card 4111 1111 1111 1111, SSN 536-90-4399, jane.doe@acme-corp.com, +1 650-253-0000."
ABUSE = "You are a worthless, stupid idiot, shut up and go to hell."


class Context(Struct, kw_only=True):
    """What a fault is planted with.

    Attributes:
        source: the largest one. val: held-out documents.
    """

    rng: random.Random
    rate: float
    source: str = ""
    val: list[Document] = []


Plant = Callable[[Document, Context], Iterator[Document]]


class DataFault(Struct, frozen=True):
    """A fault: what it does to the documents it meets, its usual rate, the rule that reports it.

    Attributes:
        of_text: whether it changes text, which token ids do not show.
    """

    meaning: str
    plant: Plant
    rate: float
    rule: str
    of_text: bool = False


def _each(change: Callable[[Document, random.Random], Document]) -> Plant:
    """Return what changes documents at a rate."""

    def plant(document: Document, context: Context) -> Iterator[Document]:
        hit = context.rng.random() < context.rate
        yield change(document, context.rng) if hit else document

    return plant


def _drop(document: Document, context: Context) -> Iterator[Document]:
    if context.rng.random() >= context.rate:
        yield document


def _drop_source(document: Document, context: Context) -> Iterator[Document]:
    if document.source != context.source or context.rng.random() >= context.rate:
        yield document


def _copy(document: Document, context: Context) -> Iterator[Document]:
    """Yield it, at a rate a second time: every other one with a term in fifty changed."""
    yield document
    if context.rng.random() >= context.rate:
        return
    if document.ids is None and context.rng.random() < 0.5:
        terms = re.split(" ", document.text)
        for position in range(0, len(terms), 50):
            terms[position] = f"v{context.rng.randrange(9**5)}"
        document = document._replace(text=" ".join(terms))
    yield document


def _leak(document: Document, context: Context) -> Iterator[Document]:
    yield document
    if context.val:
        leaked_document = context.val.pop()
        if context.rng.random() < context.rate:
            yield leaked_document


def _translate(document: Document, rng: random.Random) -> Document:
    count = max(2, len(document.text) // 70)
    return document._replace(text="".join(rng.choices(PASSAGE, k=min(count, 400))))


def _garble(document: Document, rng: random.Random) -> Document:
    size = min(len(document.text), 1 << 16) or 64
    return document._replace(text=rng.randbytes(size).decode("latin-1"))


def _truncate(document: Document, rng: random.Random) -> Document:
    if document.ids is not None:
        return document._replace(ids=document.ids[: len(document.ids) // 4 + 1])
    return document._replace(text=document.text[: len(document.text) // 4 + 1])


def _insert(text: str) -> Callable[[Document, random.Random], Document]:
    return lambda document, rng: document._replace(text=f"{text}\n{document.text}")


FAULTS: Mapping[str, DataFault] = {
    "mix": DataFault("drops documents of the largest source", _drop_source, 0.8, "mix"),
    "language": DataFault(
        "puts German text in the place of documents", _each(_translate), 0.1, "language", True
    ),
    "filter": DataFault("drops documents, and counts them as rejects", _drop, 0.1, "rejects"),
    "binary": DataFault(
        "puts random bytes in the place of documents", _each(_garble), 0.05, "junk", True
    ),
    "truncate": DataFault("keeps a quarter of documents", _each(_truncate), 0.5, "length"),
    "dup": DataFault("copies documents, half of the copies with changes", _copy, 0.3, "duplicates"),
    "leak": DataFault("adds held-out documents of --val", _leak, 1.0, "leak"),
    "repeat": DataFault(
        "adds one paragraph to documents", _each(_insert(NOTICE)), 0.2, "hotspots", True
    ),
    "pii": DataFault(
        "adds a card, a number, an address, a phone",
        _each(_insert(PERSONAL)),
        0.05,
        "pii_kind",
        True,
    ),
    "toxic": DataFault("adds abuse to documents", _each(_insert(ABUSE)), 0.1, "toxic_data", True),
    "drop": DataFault("drops documents", _drop, 0.2, "rows"),
}


def parse_fault(fault: str) -> tuple[str, float]:
    """Return the name and the rate of KIND or KIND:rate=R. Raises UsageError."""
    name, colon, option = fault.partition(":")
    if name not in FAULTS:
        raise UsageError(f"no fault {name!r}", hint=f"one of {', '.join(FAULTS)}")
    if not colon:
        return name, FAULTS[name].rate
    key, _, value = option.partition("=")
    try:
        rate = float(value) if key == "rate" else -1.0
    except ValueError:
        rate = -1.0
    if not 0.0 < rate <= 1.0:
        raise UsageError(f"{option!r} is no rate of a fault", hint=f"{name}:rate=0.3, up to 1")
    return name, rate


def plant_fault(
    name: str,
    rate: float,
    paths: Sequence[Path],
    out: Path,
    *,
    val: Sequence[Path],
    rejects: Sequence[str],
    fields: Fields,
    seed: int,
) -> tuple[int, int]:
    """Write a copy with a fault; return how many documents there were, and are.

    It is read by the same fields as the original. The fault filter writes rejects beside it, whose
    last stage drops the same share more.

    Raises:
        InputError: a path cannot be read, or the fault needs what it does not have.
        UsageError: the folder is not empty, or within the data.
        StoreError: it cannot be written. What was written is removed.
    """
    _check_folder(out, paths)
    pieces = [piece for path in paths for piece in known_pieces(path)[0]]
    context = Context(rng=random.Random(seed), rate=rate)
    if name == "mix":
        sources = Counter(d.source for piece in pieces for d in _texts(piece, fields))
        if len(sources) < 2:
            raise InputError("the fault 'mix' needs a corpus of two sources or more")
        context.source = sources.most_common(1)[0][0]
    if name == "leak":
        held_out = [piece for path in val for piece in known_pieces(path)[0]]
        context.val = [d for piece in held_out for d in _texts(piece, fields)]
        if not context.val:
            raise InputError("the fault 'leak' needs held-out documents", hint="--val PATH")
    stages = read_filter_stages(rejects, fields) if name == "filter" else {}
    if name == "filter" and not stages:
        hint = "--rejects FILE, the report that the baseline was checked with"
        raise InputError("the fault 'filter' needs a report of the filters", hint=hint)
    if FAULTS[name].of_text:
        _require_text(name, pieces, fields)
    before = after = 0
    with _whole_folder(out):
        for number, piece in enumerate(pieces):
            path = out / f"{number:05d}-{piece.file.stem}.jsonl"
            with files.replacing_file(path, shared=True) as file:
                for document in _texts(piece, fields):
                    before += 1
                    for planted_document in FAULTS[name].plant(document, context):
                        after += 1
                        file.write(_line(planted_document, fields))
        if not before:
            records = (record for piece in pieces for record in documents(piece, fields))
            damage = next((record for record in records if isinstance(record, Damage)), None)
            reason = "the files are empty" if damage is None else damage.reason
            hint = "supervise data check PATH shows which data can be read"
            raise InputError(f"no document could be read: {reason}", hint=hint)
        if stages:
            _write_rejects(rejects_path(out), add_totals(stages, before), before, after)
    return before, after


def _require_text(name: str, pieces: Sequence[Piece], fields: Fields) -> None:
    """Raise InputError where data holds token ids."""
    documents_of_pieces = (next(_texts(piece, fields), None) for piece in pieces)
    if any(d is not None and d.ids is not None for d in documents_of_pieces):
        usable = ", ".join(name for name, fault in FAULTS.items() if not fault.of_text)
        text = f"the fault {name!r} changes text, and this data holds token ids"
        raise InputError(text, hint=f"one of {usable}")


def _check_folder(out: Path, paths: Sequence[Path]) -> None:
    """Refuse a folder of a copy that is none, holds something, or lies in the data. UsageError."""
    hint = "name a folder that does not exist"
    try:
        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is no folder", hint=hint)
        if out.exists() and any(out.iterdir()):
            raise UsageError(f"{out} is not empty", hint=hint)
    except OSError as error:
        raise StoreError(f"cannot read {out}: {error.strerror}") from error
    for path in paths:
        if out.resolve().is_relative_to(path.resolve()):
            raise UsageError(f"{out} lies in {path}, whose next check would read it", hint=hint)


@contextmanager
def _whole_folder(out: Path) -> Iterator[None]:
    """Create a folder, and remove what is in it where the block does not end. Raises StoreError."""
    exists = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        if exists:
            for path in out.iterdir():
                path.unlink()
        else:
            shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, OSError):
            raise StoreError(f"cannot write {out}: {error.strerror}") from error
        raise


def _write_rejects(path: Path, stages: dict[str, Stage], before: int, after: int) -> None:
    """Write the report of a pipeline whose last stage dropped what is missing as well."""
    name, stage = stages.popitem()
    passed = stage.total - stage.dropped
    dropped = stage.dropped + round(passed * (before - after) / max(1, before))
    stages[name] = Stage(dropped, stage.total)
    with files.replacing_file(path, shared=True) as file:
        file.write(need("orjson").dumps(msgspec.to_builtins(stages)))


def rejects_path(out: Path) -> Path:
    """Return the file that the fault filter writes beside its copy."""
    out = out.absolute()  # `.` has no name
    return out.with_name(f"{out.name}.rejects.json")


def _texts(piece: Piece, fields: Fields) -> Iterator[Document]:
    return (record for record in documents(piece, fields) if isinstance(record, Document))


def _line(document: Document, fields: Fields) -> bytes:
    row: dict[str, object] = {fields.source or "source": document.source}
    if document.ids is None:
        row[fields.text or "text"] = document.text
    else:
        padding = [fields.pad] * (document.padding or 0) if fields.pad is not None else []
        row["input_ids"] = [*document.ids.tolist(), *padding]
    return bytes(need("orjson").dumps(row)) + b"\n"
