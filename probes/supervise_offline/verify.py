"""`python -I verify.py < request.json`: sizes, hashes and contents of the files of checkpoints.

Request: `{"paths": [...], "load": true, "finite": true, "optimizer": false}`. The first line of the
answer is `{"environment": {...}}`, followed by one line of `verify_checkpoint` per path, so that a
crash loses no earlier result. Exit status 3: torch cannot be imported.

Three verdicts: good; bad, with reasons; and unverified, if reading it would run code from the file.

Files of torch.save, safetensors, and shards of torch.distributed.checkpoint are read without
running code in them; those that need an unpickler with code execution are not read. Tensors must
be finite. Nothing is copied: they may be mapped from a file larger than memory, and are read in
pieces.

Source: torch/serialization.py; the safetensors format (eight bytes of header length, a JSON header,
the data); FileSystemReader in torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import io
import json
import mmap
import os
import pickle
import platform
import resource
import signal
import stat
import sys
import zipfile
from importlib.metadata import distributions
from typing import Any, BinaryIO, Iterator, Mapping, Optional

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

sys.path.append(ROOT)  # for the next import only: other packages there are not the job's
try:
    from supervise_offline import find_torch
finally:
    sys.path.remove(ROOT)

IDLE_S = 120.0  # longer than an NFS server takes to come back; project default
SLOWEST = 20_000_000  # bytes per second of the slowest disk, as the supervisor assumes
SHARE, MARGIN = 4, 1 << 30  # times the bytes of the files, and bytes beyond that; project defaults
_armed = False


def exit_when_stalled() -> None:
    """From now on end this process by SIGALRM once `progress` was not called for `IDLE_S`."""
    global _armed
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    _armed = True
    report_progress()


def report_progress(next_bytes: int = 0) -> None:
    """Say that something was read, and how many bytes the next part has."""
    if _armed:
        signal.setitimer(signal.ITIMER_REAL, IDLE_S + next_bytes / SLOWEST)


def limit_memory(size: int) -> None:
    """Let this process take some times the `size` of what it reads, besides what it has."""
    with open("/proc/self/status", encoding="ascii") as file:
        has = next(int(line.split()[1]) for line in file if line.startswith("VmData:")) << 10
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = has + SHARE * size + MARGIN
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def open_file(path: str) -> BinaryIO:
    """Open a regular file, without waiting. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return os.fdopen(fd, "rb")


DEPTH = 12
STEPS = ("iter_num", "global_step", "step", "iteration", "steps", "num_steps")
OPTIMIZER = {"state", "param_groups"}
NAMED = ("optim.", "optimizer.", "param_groups.")  # prefixes of flattened optimizer states
HINTS = ("optim", "opt_state", "param_groups", "exp_avg", "moment")  # in names of such a state
MODELS = {"model", "state_dict", "model_state_dict", "module", "net", "weights"}  # keys of a file
CALLBACKS = "callbacks."  # of Lightning; contains best scores, which start at infinity


class Contents:
    """Collects the contents of one checkpoint.

    Attributes:
        tensors, bytes: number and total size.
        step: value of the first key in `STEPS`, None if there is none.
        optimizer, rng: whether it has such a state.
        hints: whether any name looks like an optimizer's state.
        weights, other: whether it has tensors that are a model's by their place, and tensors that
            may be anything.
        problems: one sentence each.
    """

    def __init__(self, torch: Any, finite: bool) -> None:
        self._torch = torch
        self._finite = finite
        self._seen: set[tuple[Any, ...]] = set()
        self.tensors = 0
        self.bytes = 0
        self.step: Optional[int] = None
        self.optimizer = False
        self.rng = self.hints = self.weights = self.other = False
        self.problems: list[str] = []

    def check_recursively(self, thing: Any, name: str) -> None:
        """Check an object recursively; tied tensors once."""
        self._seen.clear()  # another object may reuse the address
        entered: set[int] = set()  # a few lists that hold one another have no end of paths
        todo: list[tuple[str, Any, int, str]] = [(name, thing, 0, _section(name, "weights"))]
        while todo:
            name, thing, depth, section = todo.pop()
            if isinstance(thing, self._torch.Tensor):
                self._tensor(thing, name)
                if section != "optimizer" and thing.is_floating_point() and thing.dim():
                    setattr(self, section, True)
                continue
            inner: list[tuple[Any, Any]] = []
            if id(thing) in entered:
                continue
            if depth < DEPTH and isinstance(thing, dict):
                self._dictionary(thing, depth)
                section = "optimizer" if _is_optimizer(thing) else section
                inner = list(thing.items())
            elif depth < DEPTH and isinstance(thing, (list, tuple)):
                inner = list(enumerate(thing))
            if inner:
                entered.add(id(thing))
            for key, value in inner:
                holds = isinstance(value, (dict, list, tuple))
                lost = not depth and holds and key not in MODELS
                place = "other" if lost and section == "weights" else section
                path = f"{name}.{key}" if name or isinstance(thing, (list, tuple)) else str(key)
                todo.append((path, value, depth + 1, _section(str(key), place)))

    def _dictionary(self, thing: dict[Any, Any], depth: int) -> None:
        if _is_optimizer(thing):
            self.optimizer = True
        for key in thing:
            self.add_name(str(key))
        if depth < 2 and self.step is None:
            steps = (thing.get(key) for key in STEPS)
            self.step = next((n for n in steps if type(n) is int), None)

    def add_name(self, name: str) -> None:
        """Record the name of a part of the checkpoint."""
        if "rng" in name.lower() or "random_state" in name.lower():
            self.rng = True
        if name.startswith(NAMED) or ".param_groups." in name:  # the latter of a flattened state
            self.optimizer = True
        self.hints = self.hints or _section(name, "") == "optimizer"

    def _tensor(self, tensor: Any, name: str) -> None:
        """Count a tensor, and check that it is finite."""
        if tensor.layout == self._torch.strided and tensor.device.type != "meta":
            key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if tensor.numel() and key in self._seen:
                return
            self._seen.add(key)
            tensor = _stored(tensor)
        self.tensors += 1
        self.bytes += tensor.numel() * tensor.element_size()
        score = tensor.numel() == 1 and name.startswith(CALLBACKS)
        if self._finite and not score:
            wrong = self._not_finite(tensor, "mask" in name.lower())
            if wrong:
                self.problems.append(f"{name} has {wrong}")

    def _not_finite(self, tensor: Any, masks: bool) -> str:
        """Return which nonfinite values a tensor has, "" if none.

        Args:
            masks: minus infinity is allowed.
        """
        torch = self._torch
        if tensor.device.type == "meta" or not (tensor.is_floating_point() or tensor.is_complex()):
            return ""
        if tensor.layout == torch.sparse_coo:
            tensor = tensor._values()
        elif tensor.layout != torch.strided:
            tensor = tensor.values()
        tensor = _stored(tensor.detach())
        report_progress(tensor.numel() * tensor.element_size())
        for piece in tensor.reshape(-1).split(PIECE):
            report_progress()
            if piece.element_size() == 1:  # torch has few operations for eight bits
                piece = piece.float()
            if bool(torch.isfinite(piece).all()):
                continue
            if bool(torch.isnan(piece).any()):
                return "NaN"
            if not masks or bool(torch.isposinf(piece).any()):
                return "infinite values"
        return ""


def _stored(tensor: Any) -> Any:
    """Return the elements that a strided tensor has in memory, each once.

    An expanded tensor has any number of elements, and as a copy would take that much memory.
    """
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    if tensor.numel() > span:
        return tensor.as_strided((span,), (1,))
    return tensor


def _is_optimizer(thing: dict[Any, Any]) -> bool:
    return bool(thing.keys() >= OPTIMIZER and thing["param_groups"])


def _section(name: str, otherwise: str) -> str:
    """Return "optimizer" for a name of such a state."""
    return "optimizer" if any(hint in name.lower() for hint in HINTS) else otherwise


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
    contents.check_recursively(load_object(torch, path, zipped, start[:1] == b"\x80"), name)


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


def read_objects(torch: Any, path: str) -> list[tuple[str, Any]]:
    """Return the objects in the files of a checkpoint, and the name of each file.

    Raises:
        OSError, NeedsCode, Damaged: a file cannot be read; what lies beside the weights, and would
            run code, is left out.
    """
    objects: list[tuple[str, Any]] = []
    alone = not os.path.isdir(path)
    for name in list_files(path):
        full = path if alone else os.path.join(path, name)
        if name.endswith((".distcp", METADATA)):
            raise NeedsCode("it is in shards of torch.distributed.checkpoint")
        if name.endswith(".safetensors"):
            with open_file(full) as file:
                objects.append((name, tensors_of(torch, file)))
        elif alone or name.endswith(TORCH):
            with open_file(full) as file:
                start = file.read(4)
            try:
                zipped, pickled = start == b"PK\x03\x04", start[:1] == b"\x80"
                objects.append((name, load_object(torch, full, zipped, pickled)))
            except NeedsCode:
                if alone or not any(fnmatch.fnmatch(os.path.basename(name), p) for p in AUXILIARY):
                    raise
    return objects


def tensors_of(torch: Any, file: BinaryIO) -> dict[str, Any]:
    """Return the floating tensors of a safetensors file, mapped. Raises Damaged."""
    try:
        room = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(room, MAX_HEADER)))
        header.pop("__metadata__", None)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        tensors = {}
        for name, entry in header.items():
            begin, stop = entry["data_offsets"]
            dtype = getattr(torch, FLOATS.get(entry["dtype"], ""), None)
            if dtype is not None and begin < stop:
                count = (stop - begin) // torch.empty(0, dtype=dtype).element_size()
                flat = torch.frombuffer(data, dtype=dtype, count=count, offset=8 + room + begin)
                tensors[name] = flat.view(entry["shape"])
        return tensors
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise Damaged(f"it cannot be read: {error}") from None


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
                contents.add_name(name)
                _mapped_tensor(torch, data, 8 + room, name, entry, contents)


def _mapped_tensor(
    torch: Any, data: Any, start: int, name: str, entry: dict[str, Any], contents: Contents
) -> None:
    begin, stop = entry["data_offsets"]
    dtype = getattr(torch, FLOATS.get(entry["dtype"], ""), None)
    if dtype is None or begin == stop:
        contents.tensors += 1
        contents.bytes += stop - begin
        return
    count = (stop - begin) // torch.empty(0, dtype=dtype).element_size()
    tensor = torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin)
    contents.check_recursively(tensor, name)
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


def read_distributed(torch: Any, folder: str, contents: Contents) -> list[str]:
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
    ends: dict[str, int] = {}
    for name, shard, offset, length in pieces:
        contents.add_name(name)
        if offset < ends.get(shard, 0):
            raise Damaged(f"{METADATA}: parts of the shard {shard} overlap")
        ends[shard] = offset + length
        data = _read_part(folder, shard, offset, length)
        try:
            thing = load_object(torch, io.BytesIO(data), zipped=True)
        except Damaged as error:
            raise Damaged(f"{shard}, {name}: {error}") from None
        contents.check_recursively(thing, name)
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


def _pieces(storage: dict[Any, Any]) -> Iterator[tuple[str, str, int, int]]:
    """Yield (name, file, offset, length) of each stored item."""
    for index, info in storage.items():
        if getattr(info, "transform_descriptors", None):
            raise NeedsCode("its shards went through a transformation")
        yield str(index.fqn), str(info.relative_path), int(info.offset), int(info.length)


PIECE = 1 << 22  # bytes
TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")
# Files that a training library writes beside the weights, and unpickles with code execution.
KNOWN = (*TORCH, ".safetensors", ".distcp", ".metadata", ".json", ".txt", ".model", ".jinja", ".md")
MAX_JSON = 64 << 20  # bytes; larger ones are vocabularies, and not looked into
SENTENCES, LENGTH = 20, 500  # of an answer: a file may have any number of names of any length
AUXILIARY = ("training_args.bin", "rng_state*", "random_states*", "scheduler.*", "*.pkl")


def verify_checkpoint(torch: Any, path: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict and the contents.

    Args:
        request: the flags `load`, `finite` and `optimizer`.

    Returns:
        `ok`: true, false, or null for unverified. `problems` and `unread`: sentences.
        `files`: per name, relative to the directory of the checkpoint, `{"size", "sha256"}`.
        `tensors`, and their `bytes`. `step` inside, or null. `optimizer`, `rng`: whether it has
        such a state. `resumable`: see there.
    """
    contents = Contents(torch, bool(request.get("finite")))
    answer: dict[str, Any] = {"path": path, "files": {}, "unread": []}
    try:
        names = list_files(path)
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        answer["files"] = {name: hash_file(os.path.join(folder, name)) for name in names}
        limit_memory(sum(file["size"] for file in answer["files"].values()))
        if request.get("load"):
            answer["unread"] = _read(torch, path, names, contents)
            _judge(names, request, contents, answer["unread"])
    except OSError as error:
        contents.problems.append(f"{error.filename or path}: {error.strerror or error}")
    bad = [text[:LENGTH] for text in contents.problems[:SENTENCES]]
    unread = answer["unread"] = [text[:LENGTH] for text in answer["unread"][:SENTENCES]]
    answer["ok"] = False if bad else None if unread else True
    answer["problems"] = bad
    for name in ("tensors", "bytes", "step", "optimizer", "rng"):
        answer[name] = getattr(contents, name)
    answer["resumable"] = "unknown" if unread else resumable(list(answer["files"]), contents)
    return answer


def resumable(names: list[str], contents: Contents) -> str:
    """Return whether a job can resume from a checkpoint that was read.

    Returns:
        `full`: it holds weights and an optimizer's state, and for a Trainer of transformers its
        step. `weights only`: nothing in it can be an optimizer's state. `unknown`: all others.
    """
    tensors = contents.weights or contents.other
    if contents.optimizer and tensors:
        lacks = "training_args.bin" in names and "trainer_state.json" not in names
        return "unknown" if lacks else "full"
    if contents.hints or contents.other or not contents.weights:
        return "unknown"
    alone = len(names) == 1
    return "weights only" if alone or all(name.endswith(KNOWN) for name in names) else "unknown"


def list_files(path: str) -> list[str]:
    """Return the files of a checkpoint, relative to its directory, sorted. Raises OSError."""
    if not os.path.isdir(path):
        return [os.path.basename(path)]
    paths = []
    for folder, _, names in os.walk(path):
        paths += [os.path.relpath(os.path.join(folder, name), path) for name in names]
    return sorted(paths)


def hash_file(path: str) -> dict[str, Any]:
    """Return size and SHA-256 of a file. Raises OSError."""
    sha, size = hashlib.sha256(), 0
    with open_file(path) as file:
        while True:
            piece = file.read(PIECE)
            report_progress()
            if not piece:
                return {"size": size, "sha256": sha.hexdigest()}
            sha.update(piece)
            size += len(piece)


def _read(torch: Any, path: str, names: list[str], contents: Contents) -> list[str]:
    """Read all files; return those that cannot be read without running code."""
    unread, read = [], set()
    alone = not os.path.isdir(path)
    folder = os.path.dirname(path) if alone else path
    for metadata in (n for n in names if os.path.basename(n) == METADATA):
        inside = os.path.dirname(metadata)  # OLMo-core and accelerate have it in a subdirectory
        try:
            shards = read_distributed(torch, os.path.join(path, inside), contents)
            read |= {metadata, *(os.path.join(inside, shard) for shard in shards)}
        except NeedsCode as error:
            unread.append(f"{metadata} is not loadable without running code: {error}")
        except Damaged as error:
            contents.problems.append(str(error))
    for name in names:
        contents.add_name(os.path.basename(name))
        contents.hints = contents.hints or "optim" in name.lower()
        if name in read or name.endswith(".distcp"):
            continue
        try:
            _read_one(torch, os.path.join(folder, name), name, alone, contents)
        except NeedsCode as error:
            if alone or not any(fnmatch.fnmatch(os.path.basename(name), p) for p in AUXILIARY):
                unread.append(f"{name} is not loadable without running code: {error}")
        except Damaged as error:
            contents.problems.append(f"{name} cannot be loaded: {error}")
    return unread


def _read_one(torch: Any, path: str, name: str, alone: bool, contents: Contents) -> None:
    if name.endswith(".safetensors"):
        read_safetensors(torch, path, contents)
    elif name.endswith(".json"):
        _read_json(path, name, contents)
    elif alone or name.endswith(TORCH):
        read_torch(torch, path, contents, "" if alone else name)


def _read_json(path: str, name: str, contents: Contents) -> None:
    try:
        with open_file(path) as file:
            text = file.read(MAX_JSON + 1)
        if len(text) > MAX_JSON:
            return
        document = json.loads(text.decode("utf-8"))
        shards = document.get("weight_map", {}) if isinstance(document, dict) else {}
        names = sorted({str(shard) for shard in dict(shards).values()})
    except RecursionError:
        raise Damaged("it is nested without end") from None
    except (ValueError, TypeError) as error:
        raise Damaged(f"it is not JSON, or of another form: {error}") from None
    if not isinstance(document, dict):
        return
    if name.endswith(".index.json"):
        for shard in names:
            if not os.path.exists(os.path.join(os.path.dirname(path), shard)):
                contents.problems.append(f"the shard {shard} is missing")
    if os.path.basename(name) == "trainer_state.json" and isinstance(
        document.get("global_step"), int
    ):
        contents.step = document["global_step"]


def _judge(
    names: list[str], request: Mapping[str, Any], contents: Contents, unread: list[str]
) -> None:
    if unread or contents.problems:
        return
    if not contents.tensors:
        unread.append("it contains no tensor" if names else "it contains no file")
    elif request.get("optimizer") and not contents.optimizer:
        contents.problems.append("it contains no optimizer state")


# ── the program ───────────────────────────────────────────────────────────────────────────────────


def yield_memory() -> None:
    """Be the first process to be killed when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:  # not Linux
        pass


def describe_environment(torch: Any) -> dict[str, Any]:
    """Return the versions of the packages that are installed here.

    `lock` is the SHA-256 over all `name==version`, sorted.
    """
    installed = {f"{d.metadata['Name']}=={d.version}".lower() for d in distributions()}
    lock = "\n".join(sorted(installed))
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "packages": len(installed),
        "lock": "sha256:" + hashlib.sha256(lock.encode()).hexdigest(),
    }


def main() -> None:
    """Answer the request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job
    yield_memory()
    request = json.load(sys.stdin)
    try:
        torch = find_torch()
    except ImportError as error:
        print(json.dumps({"error": f"torch cannot be imported: {error}"}), flush=True)
        raise SystemExit(3) from None
    torch.set_num_threads(1)
    print(json.dumps({"environment": describe_environment(torch)}), flush=True)
    for path in request["paths"]:
        exit_when_stalled()
        print(json.dumps(verify_checkpoint(torch, path, request)), flush=True)


if __name__ == "__main__":
    main()
