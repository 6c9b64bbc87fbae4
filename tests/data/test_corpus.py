"""Files of every format are the same documents; damage costs what it hit, and no exception."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import random
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from supervise.cli import invoke
from supervise.data import Fields, documents, list_pieces, source_of

from .conftest import texts, write_lines

TEXTS = [*texts(30, high=60), "Ünïcode, 漢字 — and\ttabs", "x" * 40_000]
IDS = [numpy.arange(3, 3 + n) % 500 for n in (5, 1, 900, 40, 77)]
MDS, CHUNK = "shard.00000.mds", "chunk-0-0.bin"


def lines() -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


def tar(folder: Path) -> None:
    members = {}
    for number, text in enumerate(TEXTS):
        raw = json.dumps({"text": text}).encode() if number % 2 else text.encode()
        members[f"{number:04d}.{'json' if number % 2 else 'txt'}"] = raw
    (folder / "part-0001.tar").write_bytes(tar_of(members))


def tar_of(members: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, raw in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    return made.getvalue()


def table() -> pyarrow.Table:
    return pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})


def arrow(folder: Path, opened: Callable[..., object]) -> None:
    with opened(folder / "data-00000.arrow", table().schema) as sink:
        sink.write_table(table(), 7)
    (folder / "dataset_info.json").write_text("{}")


def shards(folder: Path, name: str, samples: list[bytes], index: dict[str, object]) -> None:
    """Write one shard as MosaicML and litdata do: count, offsets, samples; the index beside it."""
    head = 4 + 4 * (len(samples) + 1)
    edges = head + numpy.cumsum([0, *map(len, samples)])
    raw = struct.pack("<I", len(samples)) + edges.astype("<u4").tobytes() + b"".join(samples)
    (folder / name).write_bytes(raw)
    (folder / "index.json").write_text(json.dumps(index))


def mds_shards(folder: Path, samples: list[bytes], columns: dict[str, tuple[str, int | None]]):
    """Write a shard of MosaicML; `columns`: the encoding and the size of each."""
    encodings, sizes = zip(*columns.values(), strict=True)
    shard = {"column_names": [*columns], "column_encodings": encodings, "column_sizes": sizes}
    shard |= {"raw_data": {"basename": MDS}, "zip_data": None, "compression": None}
    shards(folder, MDS, samples, {"version": 2, "shards": [shard]})


def litdata_chunk(folder: Path, samples: list[bytes], *formats: str) -> None:
    config = {"data_format": formats, "compression": None}
    chunks = [{"filename": CHUNK, "chunk_size": len(samples)}]
    shards(folder, CHUNK, samples, {"chunks": chunks, "config": config})


def mds(folder: Path) -> None:
    rows = [struct.pack("<Iq", len(text.encode()), 7) + text.encode() for text in TEXTS]
    mds_shards(folder, rows, {"number": ("int", 8), "text": ("str", None)})


def litdata(folder: Path) -> None:
    rows = [struct.pack("<IIq", 8, len(text.encode()), 7) + text.encode() for text in TEXTS]
    litdata_chunk(folder, rows, "int", "str")


def litdata_rows(folder: Path) -> None:
    """As its writer lays out dictionaries: an Arrow file behind empty samples."""
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_file(sink, table().schema) as writer:
        writer.write_table(table(), 7)
    rows = sink.getvalue().to_pybytes()
    litdata_chunk(folder, [b""] * len(TEXTS), "int", "str")
    with (folder / CHUNK).open("ab") as file:
        file.write(rows + struct.pack("<I", len(rows)) + b"LDARW01\0")


def plain(folder: Path) -> None:
    for number, text in enumerate(TEXTS):
        (folder / f"{number:04d}.txt").write_text(text, "utf-8")


OF_TEXT: dict[str, Callable[[Path], object]] = {
    "lines": lambda folder: (folder / "a.jsonl").write_bytes(lines()),
    "lines without ids": lambda folder: write_lines(
        folder / "a.jsonl", [{"text": text, "tokens": []} for text in TEXTS]
    ),
    "gz": lambda folder: (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines())),
    "zst": lambda folder: (folder / "a.jsonl.zst").write_bytes(
        zstandard.compress(lines()[:900]) + zstandard.compress(lines()[900:])
    ),
    "xz": lambda folder: (folder / "a.jsonl.xz").write_bytes(lzma.compress(lines())),
    "bz2": lambda folder: (folder / "a.jsonl.bz2").write_bytes(bz2.compress(lines())),
    "array": lambda folder: (folder / "a.json").write_text(json.dumps(TEXTS)),
    "chat": lambda folder: write_lines(
        folder / "a.jsonl", [{"messages": [{"role": "user", "content": t}]} for t in TEXTS]
    ),
    "parquet": lambda folder: pyarrow.parquet.write_table(table(), folder / "a.parquet"),
    "arrow file": lambda folder: arrow(folder, pyarrow.ipc.new_file),
    "arrow stream": lambda folder: arrow(folder, pyarrow.ipc.new_stream),
    "tar": tar,
    "mds": mds,
    "litdata": litdata,
    "litdata rows": litdata_rows,
    "text": plain,
}


@pytest.mark.parametrize("form", OF_TEXT)
def test_a_text_is_the_same_in_every_format(form, tmp_path, check):
    OF_TEXT[form](tmp_path)

    done = check(tmp_path, "--level", "cheap")

    raw = [len(text.encode()) for text in TEXTS]
    assert done.code == 0, done.document
    assert done.metrics["doc_count"] == len(TEXTS)
    assert done.metrics["damaged_rate"] == 0 and done.metrics["exact_dup_rate"] == 0
    assert done.metrics["doc_bytes_p50"] == pytest.approx(sorted(raw)[len(raw) // 2 - 1], rel=0.02)
    assert done.metrics["doc_bytes_p95"] == pytest.approx(sorted(raw)[30], rel=0.02)
    assert "seq_len_p50" in done.document["unknown"]


def flat(folder: Path, dtype: str, head: bytes = b"") -> None:
    tokens = numpy.concatenate([numpy.append(ids, 50256) for ids in IDS]).astype(dtype)
    (folder / "train.bin").write_bytes(head + tokens.tobytes())


def megatron(folder: Path) -> None:
    lengths = [len(ids) for ids in IDS]
    tokens = numpy.concatenate(IDS).astype("<u2")
    (folder / "d_text_document.bin").write_bytes(tokens.tobytes())
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(IDS), len(IDS) + 1)
    offsets = 2 * numpy.cumsum([0, *lengths[:-1]]).astype("<i8")
    parts = (numpy.array(lengths, "<i4"), offsets, numpy.arange(len(IDS) + 1, dtype="<i8"))
    (folder / "d_text_document.idx").write_bytes(head + b"".join(p.tobytes() for p in parts))


def tensors(folder: Path) -> None:
    litdata_chunk(folder, [ids.astype("<i4").tobytes() for ids in IDS], "no_header_tensor:16")


def arrays(folder: Path) -> None:
    rows = [b"\x05" + struct.pack("<H", len(ids)) + ids.astype("<u2").tobytes() for ids in IDS]
    samples = [struct.pack("<I", len(row)) + row for row in rows]
    mds_shards(folder, samples, {"tokens": ("ndarray:uint16", None)})


LLM_C = struct.pack("<256i", 20240520, 1, *[0] * 254)
LLAMA = struct.pack("<256i", 20240801, 7, *[0] * 254)
OF_IDS: dict[str, Callable[[Path], object]] = {
    "flat, 2 bytes": lambda folder: flat(folder, "<u2"),
    "flat, 4 bytes": lambda folder: flat(folder, "<u4"),
    "flat with a header": lambda folder: flat(folder, "<u2", LLM_C),
    "flat with a header, 4 bytes": lambda folder: flat(folder, "<u4", LLAMA),
    "megatron": megatron,
    "litdata": tensors,
    "mds": arrays,
    "lines": lambda folder: write_lines(
        folder / "a.jsonl", [{"input_ids": ids.tolist()} for ids in IDS]
    ),
}


@pytest.mark.parametrize("form", OF_IDS)
def test_a_document_of_tokens_is_the_same_in_every_format(form, tmp_path, check):
    OF_IDS[form](tmp_path)

    done = check(tmp_path, "--eos", "50256")

    mark = form.startswith("flat")  # a token at the end of each
    lengths = [len(ids) + mark for ids in IDS]
    assert done.metrics["doc_count"] == len(IDS)
    assert done.metrics["seq_len_p50"] == pytest.approx(numpy.median(lengths), rel=0.02)
    assert done.metrics["seq_len_p95"] == pytest.approx(max(lengths), rel=0.02)
    for metric in ("language_share", "pii_hit_rate", "bytes_per_token", "doc_bytes_p50"):
        assert done.document["unknown"][metric], "not 0 %"


def test_an_index_of_any_size_is_read(tmp_path, check):
    """Of Megatron, with holes for all sequences but the last."""
    count = 23 << 20
    numpy.arange(9, dtype="<u2").tofile(tmp_path / "d.bin")
    with (tmp_path / "d.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, 2))
        file.seek(4 * (count - 1), 1)
        file.write(struct.pack("<i", 9))
        file.seek(8 * count, 1)
        file.write(struct.pack("<qq", count - 1, count))

    done = check(tmp_path)

    assert done.metrics["doc_count"] == 1
    assert done.metrics["seq_len_p50"] == pytest.approx(9, rel=0.02)


def test_lengths_are_not_known_where_nothing_marks_an_end(tmp_path, check):
    numpy.arange(5000, dtype="<u2").tofile(tmp_path / "train.bin")

    done = check(tmp_path)

    assert "--eos" in done.document["unknown"]["seq_len_p50"]


def test_padding_counts_by_the_mask_or_the_id_of_it(tmp_path, check):
    rows = [{"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]}] * 3
    write_lines(tmp_path / "mask/a.jsonl", rows)
    write_lines(tmp_path / "id/a.jsonl", [{"input_ids": [5, 6, 7, 9]}, {"input_ids": [5, 9, 9, 9]}])

    assert check(tmp_path / "mask").metrics["pad_fraction"] == 50.0
    assert check(tmp_path / "id", "--pad", "9").metrics["pad_fraction"] == 50.0
    assert "--pad" in check(tmp_path / "id").document["unknown"]["pad_fraction"]


# ── damage ────────────────────────────────────────────────────────────────────────────────────────


def damage(raw: bytes, rng: random.Random) -> bytes:
    """Cut it short, flip bits, or write over a stretch of it."""
    kind = rng.randrange(3)
    if kind == 0:
        return raw[: rng.randrange(len(raw))]
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 5, 50))):
        position = rng.randrange(len(raw))
        if kind == 1:
            changed[position] ^= 1 << rng.randrange(8)
        else:
            stretch = rng.randbytes(8)
            changed[position : position + len(stretch)] = stretch
    return bytes(changed)


def test_two_hundred_damaged_files_cost_no_exception_and_no_other_file(tmp_path, check):
    """Each format, damaged in all ways; an index is damaged, too."""
    rng, count = random.Random(1), 0
    writers = [*OF_TEXT.values(), *OF_IDS.values()]
    while count < 200:
        write = writers[count % len(writers)]
        folder = tmp_path / "bad" / f"{count:03d}"
        folder.mkdir(parents=True)
        write(folder)
        for path in sorted(folder.iterdir())[:: rng.choice((1, 2))][:2]:
            path.write_bytes(damage(path.read_bytes(), rng))
            count += 1
    write_lines(tmp_path / "bad/good/a.jsonl", TEXTS)

    done = check(tmp_path / "bad", "--level", "cheap")

    assert done.code == 1, done.errors
    assert "damage" in done.fired
    assert done.metrics["source_mix_share.good"] > 0


def test_nothing_is_unpickled_and_a_bomb_is_a_record_too_long(tmp_path, check):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "d").mkdir()
    (tmp_path / "d/meta.pkl").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "d/a.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "' + bytes(40 << 20) + b'"}\n{"text": "short"}\n', 1)
    )

    done = check(tmp_path / "d", "--level", "cheap")

    assert not (tmp_path / "ran").exists()
    assert done.metrics["doc_count"] == 1 and done.metrics["damaged_rate"] == 50.0


SAMPLES = {
    "s/1.json": b'{"caption": "a", "url": "b"}',
    "s/1.txt": b"one",
    "s/1.jpg": b"\0",
    "s/2.txt": b"two",
    "s/2.json": b'{"text": "of the picture"}',
    "s/3.json": b'{"text": "3"}',
}
SPARK = "part-{n:05d}-6f1c2a34-9b1d-4c8e-8d7a-{write:012x}-c000.snappy.parquet"
HASHED = "train-{n:05d}-of-00003-{write:016x}.parquet"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("{n:05d}.tar", "data"),
        ("{n}.jsonl", "data"),
        ("part-{n:04d}.jsonl.gz", "data"),
        ("000_{n:05d}.parquet", "data"),
        (SPARK, "data"),
        (HASHED, "train"),
        ("c4-train.{n:05d}-of-00003.json.gz", "c4-train"),
        ("{write:040x}.jsonl", "data"),
        ("web-{n:05d}-{write:016x}.jsonl", "web"),
        ("books_en.{n}.jsonl", "books_en"),
        ("1" * 60 + "x.jsonl", "1" * 60 + "x"),
        ("shard_{n}/a/{n}.parquet", "a"),
        ("part-{n:05d}/web-{n}.jsonl", "web"),
        ("2019/shard-{n}/a.jsonl", "2019"),
    ],
)
def test_shards_of_one_writing_or_of_another_are_one_source(name, source, tmp_path):
    for write in (0xA1B2C3D4E5F, 0x9C8B7A6D5E4F):
        for n in range(3):
            make(tmp_path / name.format(n=n, write=write))

    assert {source_of(piece) for piece in list_pieces(tmp_path)[0]} == {source}


def make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@pytest.mark.parametrize(
    ("name", "numbers", "sources"),
    [
        ("{:03d}/{}.jsonl", range(20), {"data"}),
        ("{:03d}/web.jsonl", range(1, 21), {"web"}),
        ("{:03d}/web.jsonl", {*range(40)} - {7, 30}, {"web"}),  # a few may be empty
        ("web2/{:03d}/a.jsonl", range(20), {"web2"}),
        ("{:03d}/web/a.jsonl", range(20), {"web"}),
        ("{}/a.jsonl", range(10), {*map(str, range(10))}),  # grades
        ("{:02d}/a.jsonl", range(3), {"00", "01", "02"}),
        ("{}/a.jsonl", range(2010, 2026), {*map(str, range(2010, 2026))}),
        ("{}/a.jsonl", range(128), {*map(str, range(128))}),  # as many go on from 10
        ("{:03d}/a.jsonl", range(0, 400, 30), {f"{n:03d}" for n in range(0, 400, 30)}),  # sites
    ],
)
def test_numbered_folders_are_shards_where_many_go_on_from_0_or_1(name, numbers, sources, tmp_path):
    for number in numbers:
        make(tmp_path / name.format(number, number))

    assert {source_of(piece) for piece in list_pieces(tmp_path)[0]} == sources


TURN = [{"role": "user", "content": "Why?"}]
SPOKEN = [{"role": "assistant", "content": "Because."}]
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
QUESTION = {"type": "text", "text": "Why?"}
SHOWN = [{"role": "user", "content": [QUESTION, IMAGE, {"type": "text", "text": "Here."}]}]
RESULT = [{"role": "user", "content": [{"type": "tool_result", "content": [QUESTION]}]}]
TYPED = [{"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}]


@pytest.mark.parametrize("in_columns", [False, True])
@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "Why?", "completion": " Because."}, "Why?\n Because."),
        ({"prompt": "Why?", "chosen": "Because.", "rejected": "No."}, "Why?\nBecause."),
        ({"prompt": TURN, "completion": SPOKEN}, "Why?\nBecause."),
        ({"prompt": "Why?", "chosen": TURN + SPOKEN, "rejected": TURN}, "Why?\nBecause."),
        ({"prompt": "Why?", "messages": TURN + SPOKEN}, "Why?\nBecause."),
        ({"prompt": "Why?", "id": "a"}, "Why?"),
        ({"prompt": "Why?", "text": "All of it."}, "All of it."),
        ({"conversation": "User: hi"}, "User: hi"),
        ({"text": "All of it.", "ids": [12]}, "All of it."),
        ({"messages": SHOWN + TYPED}, "Why?\nHere.\nWhy?"),
        ({"messages": RESULT + TYPED}, "Why?\nWhy?"),
        ({"prompt": SHOWN, "chosen": SPOKEN, "rejected": TURN}, "Why?\nHere.\nBecause."),
        ({"role": "user", "content": [QUESTION, IMAGE]}, "Why?"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, ""),
        ({"messages": [{"role": "user", "content": ["Why?", "Here."]}]}, "Why?\nHere."),
    ],
)
def test_the_document_of_a_record_is_all_its_text(row, text, in_columns, tmp_path):
    if in_columns:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    else:
        write_lines(tmp_path / "a.jsonl", [row])

    (piece,) = list_pieces(tmp_path)[0]

    assert [record.text for record in documents(piece, Fields())] == [text]


def test_parts_of_turns_without_text_are_counted(tmp_path, check):
    """As JSON lines, and as a table, where all parts have all fields."""
    part = {"type": "image", "text": None}
    rows = [{"messages": SHOWN}, {"messages": [{"role": "user", "content": [QUESTION, part]}]}] * 2
    write_lines(tmp_path / "d/a.jsonl", [*rows, {"messages": TURN}])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d/b.parquet")

    done = check(tmp_path / "d", "--level", "cheap", "--manifest", tmp_path / "m.json")

    assert done.metrics["doc_count"] == 9
    ignored = json.loads((tmp_path / "m.json").read_text())["ignored"]
    reason = "parts of turns without text, as images or calls of tools: not measured"
    assert ignored == {f"4 of {name}": reason for name in ("a.jsonl", "b.parquet")}


def test_a_record_of_any_depth_costs_no_other(tmp_path):
    deep = "".join('{"content": [' for _ in range(300)) + "]}" * 300
    (tmp_path / "a.jsonl").write_text(f'{{"messages": [{deep}]}}\n{{"text": "b"}}\n')

    (piece,) = list_pieces(tmp_path)[0]

    assert [getattr(record, "text", None) for record in documents(piece, Fields())] == ["", "b"]


OF_TWO = tar_of({f"{n}.json": b'"of two"' for n in (1, 2)})
OF_LINES = b'{"text": "one"}\n{no json\n{"text": "\\ud800"}\n{"text": "two"}\n'


LINES_OF_TAR = {"a.jsonl": OF_LINES, "b.txt": b"b"}
TERMS = [{"text": "a b", "tokens": ["a", "b"]}, {"tokens": [7, 8]}]


@pytest.mark.parametrize(
    ("files", "documents", "damaged"),
    [
        pytest.param({"a.tar": tar_of(SAMPLES)}, 3, 0, id="metadata of samples"),
        pytest.param({"a.tar": tar_of(LINES_OF_TAR)}, 3, 2, id="lines in an archive"),
        pytest.param(
            {"a.tar": OF_TWO[:1100], "b.tar": OF_TWO[:1540]}, 2, 2, id="archives cut short"
        ),
        pytest.param({"a.tar": OF_TWO.replace(b"2.json", b"?.json")}, 1, 1, id="a header"),
        pytest.param({"a.jsonl": [{"text": None}, "a", "b"]}, 3, 0, id="null"),
        pytest.param({"a.jsonl": TERMS}, 2, 0, id="terms"),
        pytest.param({"dataset_infos.json": b'{"default": {}}'}, 0, 0, id="facts of a data set"),
    ],
)
def test_only_what_cannot_be_read_is_damage(files, documents, damaged, tmp_path, check):
    for name, content in {"z.jsonl": ["one more"], **files}.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            write_lines(tmp_path / name, content)

    metrics = check(tmp_path, "--level", "cheap").metrics

    assert metrics["doc_count"] == documents + 1
    assert metrics["damaged_rate"] == pytest.approx(100 * damaged / (documents + 1 + damaged))


def test_the_manifest_of_a_check_before_is_no_part_of_the_data(tmp_path, check):
    write_lines(tmp_path / "a.jsonl", TEXTS)

    first, second = (check(tmp_path, "--manifest", tmp_path / "data.json") for _ in range(2))

    assert (second.code, second.metrics) == (0, first.metrics)


def test_a_packed_shard_is_unpacked_up_to_a_bound(tmp_path, check, monkeypatch):
    mds(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0] |= {"compression": "gz", "zip_data": {"basename": f"{MDS}.gz"}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    shard = tmp_path / MDS
    shard.with_suffix(".mds.gz").write_bytes(gzip.compress(shard.read_bytes()))
    shard.unlink()

    whole = check(tmp_path, "--level", "cheap")
    monkeypatch.setattr("supervise.data.corpus.MAX_SHARD", 40_000)
    bomb = check(tmp_path, "--level", "cheap")

    assert whole.metrics["doc_count"] == len(TEXTS)
    assert bomb.code == 65 and "when it is unpacked" in bomb.errors


def test_links_are_followed_and_what_is_not_read_is_named(tmp_path, capsys):
    data = tmp_path / "data"
    for number, folder in enumerate((data / "a", tmp_path / "b")):
        write_lines(folder / "x.jsonl", [f"of number {number}"])
    for name, target in (("z", "../b"), ("a/up", ".."), ("self", "."), ("a/none.txt", "nothing")):
        (data / name).symlink_to(target)
    (data / "b.gz").write_bytes(b"damaged")
    (data / "a/s.tar").write_bytes(tar_of({"d.1.txt": b"one", "d.2.json": b'{"text": "two"}'}))
    (data / "train.idx").mkdir()
    (data / "train.bin").write_bytes(bytes(10))
    folder = os.open(data, os.O_RDONLY)
    for _ in range(18):  # a path too long to be opened
        os.mkdir("n" * 240, dir_fd=folder)
        inner = os.open("n" * 240, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    manifest = tmp_path / "m.json"

    code = invoke(["data", "check", str(data), "--manifest", str(manifest)])

    shown = capsys.readouterr().out
    assert code == 1 and "3 documents, 0.0 MB of text, 1 damaged records in 4 pieces" in shown
    assert "ignored: 1 of a/s.tar: JSON beside a text of the same name" in shown
    assert "ignored: b.gz: no reader for .gz" in shown
    assert "ignored: a/up and 1 more: a link to a folder that is read already" in shown
    assert "ignored: a/none.txt: a broken link" in shown
    assert "not read: File name too long" in shown
    assert json.loads(manifest.read_text())["counts"]["sources"].keys() == {"a", "z"}
    assert str(tmp_path) not in manifest.read_text()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: (folder / "a.jsonl").write_text("{no json\n"), "no document could be read"),
        (lambda folder: (folder / "a.png").write_bytes(b"\x89PNG\0\0"), "no known format"),
        (lambda folder: None, "it is empty"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_an_error_and_no_pass(write, message, tmp_path, check):
    write(tmp_path)

    done = check(tmp_path)

    assert done.code == 65 and message in done.errors


def test_without_the_extra_the_command_to_install_it_is_printed(tmp_path, check, monkeypatch):
    write_lines(tmp_path / "a.jsonl", ["text"])
    monkeypatch.setitem(__import__("sys").modules, "rensa", None)

    done = check(tmp_path)

    assert done.code == 65
    assert "'rensa'" in done.errors and "pip install 'supervise-train[data]'" in done.errors
