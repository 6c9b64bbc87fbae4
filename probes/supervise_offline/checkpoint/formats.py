"""Reads the files of a checkpoint without running code in them.

torch.save, safetensors, and the shards of torch.distributed.checkpoint. Files that need an
unpickler with code execution are not read.

Source: torch/serialization.py; the safetensors format (eight bytes of header length, a JSON header,
the data); FileSystemReader in torch/distributed/checkpoint/filesystem.py.
"""

import contextlib
import io
import json
import mmap
import os
import pickle
import sys
import zipfile
from typing import Any, Dict, Iterator, List, Tuple

from supervise_offline.checkpoint.contents import open_file, report_progress

from .contents import Contents

PIECE = 1 << 22  # bytes
MAX_HEADER = 100_000_000  # bytes of a safetensors header, as its library has it
METADATA = ".metadata"
FLOATS = {  # of safetensors; its other types are always finite
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
REFUSED = ("Unsupported global", "Unsupported class", "TorchScript", "not an allowed global")
REFUSED_PLAIN = ("Unsupported operand", "Invalid magic number")  # for a pickle not by torch

PLAIN = {  # classes and functions in DCP's metadata, by module
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # of Python 3.13
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    ),
}


class NeedsCode(Exception):  # noqa: N818
    """The file cannot be read without running code from it."""


class Damaged(Exception):  # noqa: N818
    """The file is damaged."""


def read_torch(torch: Any, path: str, contents: Contents, name: str) -> None:
    """Read a file of `torch.save`. Raises NeedsCode, Damaged."""
    with open_file(path) as file:
        start, size = file.read(4), os.fstat(file.fileno()).st_size
    zipped = start == b"PK\x03\x04"
    if zipped:
        check_sums(path)
    report_progress(size)
    contents.take(load_object(torch, path, zipped, start[:1] == b"\x80"), name)


def load_object(torch: Any, file: Any, zipped: bool, pickled: bool = False) -> Any:
    """Return the object in a file or stream, memory-mapped if possible.

    Raises:
        NeedsCode, Damaged: see there.
    """
    mapped = {"mmap": True} if zipped and isinstance(file, str) else {}
    try:
        with _numpy_allowed(torch):
            return torch.load(file, weights_only=True, map_location="cpu", **mapped)
    except Exception as error:
        text = str(error)
        if isinstance(error, MemoryError) or "allocate memory" in text:
            raise MemoryError(text) from None  # not a property of the file
        refused = REFUSED + (REFUSED_PLAIN if zipped or pickled else ())
        if any(phrase in text for phrase in refused):
            lines = [
                line for line in text.splitlines() if any(phrase in line for phrase in refused)
            ]
            raise NeedsCode(lines[0].strip()[:200]) from None
        raise Damaged(f"{type(error).__name__}: {(text.strip().splitlines() or [''])[0]}") from None


def _numpy_allowed(torch: Any) -> Any:
    """Allow plain arrays, which contain random states."""
    numpy: Any = sys.modules.get("numpy")
    allow = getattr(torch.serialization, "safe_globals", None)
    if numpy is None or allow is None:
        return contextlib.nullcontext()
    core = getattr(numpy, "_core", None) or numpy.core
    kinds = [type(numpy.dtype(name)) for name in ("uint32", "uint64", "int64", "float64", "uint8")]
    return allow([core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, *kinds])


def check_sums(path: str) -> None:
    """Verify the checksums of the archive: torch does not for a mapped tensor.

    Raises:
        Damaged: a record has a wrong checksum, while others are right. Torch can be configured to
            write none. Or the records are compressed or overlap: torch writes none of these, and
            a few bytes could become any number.
    """
    right, wrong = 0, ""
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            packed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
            if packed or sum(record.file_size for record in records) > os.path.getsize(path):
                raise Damaged("the archive is not as torch writes it: compressed or overlapping")
            for record in records:
                if not _has_checksum(archive, record):
                    wrong = wrong or record.filename
                elif record.file_size:
                    right += 1
    except (zipfile.BadZipFile, EOFError, ValueError, OSError) as error:
        raise Damaged(f"the archive is damaged: {error}") from None
    if wrong and right:
        raise Damaged(f"the archive is damaged: {wrong} has a wrong checksum")


def _has_checksum(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(record) as file:
            while file.read(PIECE):
                report_progress()
    except zipfile.BadZipFile:
        return False
    return True


def read_safetensors(torch: Any, path: str, contents: Contents) -> None:
    """Read a safetensors file.

    Raises:
        Damaged: the header cannot be read, or does not fit the file's size.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        room = int.from_bytes(file.read(8), "little")
        if not 2 <= room <= min(size - 8, MAX_HEADER):
            raise Damaged(f"the header is longer than the file, or than {MAX_HEADER} bytes")
        try:
            header = json.loads(file.read(room))
            header.pop("__metadata__", None)
            ends = [tuple(map(int, entry["data_offsets"])) for entry in header.values()]
            end = max((stop for _, stop in ends), default=0)
            overlap = sum(stop - start for start, stop in ends) > end
            if overlap or any(not 0 <= start <= stop for start, stop in ends):
                raise ValueError("its tensors overlap")
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
            raise Damaged(f"the header cannot be read: {error}") from None
        if 8 + room + end != size:
            raise Damaged(f"it has {size} bytes, its header describes {8 + room + end}")
        if not header:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
            for name, entry in header.items():
                contents.named(name)
                _mapped_tensor(torch, data, 8 + room, name, entry, contents)


def _mapped_tensor(
    torch: Any, data: Any, start: int, name: str, entry: Dict[str, Any], contents: Contents
) -> None:
    begin, stop = entry["data_offsets"]
    dtype = getattr(torch, FLOATS.get(entry["dtype"], ""), None)
    if dtype is None or begin == stop:
        contents.tensors += 1
        contents.bytes += stop - begin
        return
    count = (stop - begin) // torch.empty(0, dtype=dtype).element_size()
    tensor = torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin)
    contents.take(tensor, name)
    del tensor  # the map cannot be closed before


class _Metadata(pickle.Unpickler):
    """Reads DCP's metadata, and refuses all but its plain classes and types, by their names."""

    def find_class(self, module: str, name: str) -> Any:
        if name in PLAIN.get(module, ()):
            return super().find_class(module, name)
        torch: Any = sys.modules["torch"]
        kind = vars(torch).get(name) if module == "torch" else None
        if isinstance(kind, torch.dtype):
            return kind
        raise NeedsCode(f"{METADATA} names {module}.{name}")


def read_distributed(torch: Any, folder: str, contents: Contents) -> List[str]:
    """Read all shards that `.metadata` lists, and return their names.

    Raises:
        NeedsCode, Damaged: see there; a missing or truncated shard is damage.
    """
    __import__("torch.distributed.checkpoint")
    try:
        with open_file(os.path.join(folder, METADATA)) as file:
            metadata = _Metadata(file).load()
        pieces = sorted(set(_pieces(metadata.storage_data)), key=lambda piece: piece[1:3])
    except (NeedsCode, MemoryError):
        raise
    except Exception as error:
        raise Damaged(f"{METADATA} cannot be read: {type(error).__name__}: {error}") from None
    ends: Dict[str, int] = {}
    for name, shard, offset, length in pieces:
        contents.named(name)
        if offset < ends.get(shard, 0):
            raise Damaged(f"{METADATA}: parts of the shard {shard} overlap")
        ends[shard] = offset + length
        data = _read_part(folder, shard, offset, length)
        try:
            thing = load_object(torch, io.BytesIO(data), zipped=True)
        except Damaged as error:
            raise Damaged(f"{shard}, {name}: {error}") from None
        contents.take(thing, name)
    return sorted(ends)


def _read_part(folder: str, shard: str, offset: int, length: int) -> bytes:
    """Return a part of a file of the checkpoint. Raises Damaged."""
    path = os.path.normpath(os.path.join(folder, shard))
    if not path.startswith(os.path.join(os.path.normpath(folder), "")):
        raise Damaged(f"{METADATA}: the shard {shard} is not in the checkpoint")
    try:
        with open_file(path) as file:
            if not 0 <= offset <= offset + length <= os.fstat(file.fileno()).st_size:
                raise Damaged(f"the shard {shard} is truncated")
            report_progress(length)
            file.seek(offset)
            return file.read(length)
    except FileNotFoundError:
        raise Damaged(f"the shard {shard} is missing") from None
    except OSError as error:
        raise Damaged(f"the shard {shard} cannot be read: {error.strerror}") from None


def _pieces(storage: Dict[Any, Any]) -> Iterator[Tuple[str, str, int, int]]:
    """Yield (name, file, offset, length) of each stored item."""
    for index, info in storage.items():
        if getattr(info, "transform_descriptors", None):
            raise NeedsCode("its shards went through a transformation")
        yield str(index.fqn), str(info.relative_path), int(info.offset), int(info.length)
