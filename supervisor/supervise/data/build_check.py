"""One pass over a corpus: piece by piece, each piece's result in a file, then the whole.

A piece that was measured under the same settings is not read again, so a check that was stopped
goes on where it was, and the parts of a corpus can be measured by different machines that share a
folder. The results add up in the order of the pieces: the manifest is the same in each case.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from importlib import metadata
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from .. import __version__
from ..errors import InputError, StoreError
from ..store import files
from . import duplicates
from .corpus import (
    ATTACHMENTS,
    FORMS,
    LINES,
    MAX_INDEX,
    PACKED,
    TEXTS,
    Damage,
    Document,
    Fields,
    Ignored,
    Piece,
    documents,
    mds_file,
    need,
    source_of,
    unicode_name,
)
from .manifest import Counts, Hotspots, Input, Manifest, Prompts, Settings, Stage
from .text_metrics import TOKENIZER, TextMetrics, scorer_digest

FULL, CHEAP = "full", "cheap"
LARGE = 50 << 30  # bytes on disk above which only the cheap metrics are taken; project default
SAMPLED_BYTES = 64 << 10  # of a document, in the sample for shared stretches
REPORT_S = 0.25
PATIENCE_S = 5.0  # with a process that was asked to end
RESULTS = 1  # version of a piece's result: another one where the same data gives other numbers
UNFINISHED = re.compile(r"\.\d{6}-[\da-f]{16}-[\da-f]{12}\..*")
OUTDATED_S = 3600.0  # age of an unfinished file that no process writes any more
LIBRARIES = ("rensa", "xxhash", "pycld2", "phonenumbers", "python-stdnum", "tokenizers")
MAX_REASONS = 20
REJECTS = 'datatrove\'s stats.json, {"stage": {"dropped": 1, "total": 10}}, or NAME=FOLDER'
PROMPTS = "JSON lines with a prompt each"

PIECE = 256 << 20  # bytes of JSON lines that are read, and resumed, as one
SMALL = 32 << 20  # bytes of text files of one source that are
SHARD_FOLDER = re.compile(r"(?:part|shard|chunk|split)[-_.]?\d+", re.I)
SHARD_FOLDERS = 10  # of numbers alone, at least: fewer may be grades, sites, years
BESIDE_DATA = (
    *("index.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"),
    *("state.json", "stats.json"),
)

Report = Callable[[int, int, str], None]


# ── which files ───────────────────────────────────────────────────────────────────────────────────


def list_pieces(root: Path) -> tuple[list[Piece], dict[str, str]]:
    """Return the pieces below a path in a fixed order, and why other files are left out.

    Raises:
        InputError: there is no such path, or it cannot be read.
    """
    try:
        exists = root.exists()
    except OSError as error:
        hint = "name data that you can read"
        raise InputError(f"{root}: {error.strerror}", hint=hint) from error
    if not exists:
        raise InputError(
            f"{root}: no such file or folder", hint="name data that is on this machine"
        )
    if not (root.is_file() or root.is_dir()):
        hint = "write its data to a file first: it is read in pieces, some of them twice"
        raise InputError(f"{root} is a pipe or a device", hint=hint)
    ignored: dict[str, str] = {}
    paths = [root] if root.is_file() else sorted(_files_below(root, ignored))
    owners = {p.parent: _shards(p) for p in paths if p.name == "index.json"}
    pieces: list[Piece] = []
    names = ["" if path == root else path.relative_to(root).as_posix() for path in paths]
    folders = _source_folders({name.rpartition("/")[0] for name in names})
    for path, name in zip(paths, names, strict=True):
        try:
            form = owners.get(path.parent, {}).get(path.name) or form_of(path)
            if form in FORMS:
                folder = folders[name.rpartition("/")[0]]
                pieces += _divided(root, name, path, form, folder)
            elif form:
                ignored[name or path.name] = form
        except OSError as error:  # it was removed meanwhile
            ignored[name or path.name] = f"not read: {error.strerror}"
    reasons = {unicode_name(name): unicode_name(reason) for name, reason in ignored.items()}
    return list(_bundled(pieces)), reasons


def _source_folders(folders: set[str]) -> dict[str, str]:
    """Return of each folder the first name in it that is no shard.

    A shard has a word for it, or a number of many that go on from 0 or 1 in one width.
    """
    prefixes = {
        folder: [*itertools.accumulate(folder.split("/"), "{}/{}".format)] for folder in folders
    }
    numbered: dict[tuple[str, int], set[str]] = {}
    for path in itertools.chain.from_iterable(prefixes.values()):
        above, _, name = path.rpartition("/")
        if len(name) > 1 and name.isdecimal():
            numbered.setdefault((above, len(name)), set()).add(path)
    shards = set[str]()
    for paths in numbered.values():
        numbers = [int(path.rpartition("/")[2]) for path in paths]
        goes_on = min(numbers) <= 1 and max(numbers) <= 1.1 * len(paths)  # some may be empty
        if len(paths) >= SHARD_FOLDERS and goes_on:
            shards |= paths
    return {
        folder: next((name for path in paths if (name := _source_name(path, shards))), "")
        for folder, paths in prefixes.items()
    }


def _source_name(path: str, shards: Container[str]) -> str:
    """Return the name of a folder, "" of a shard."""
    name = path.rpartition("/")[2]
    return "" if path in shards or SHARD_FOLDER.fullmatch(name) else name


def _files_below(root: Path, ignored: dict[str, str]) -> Iterator[Path]:
    """Yield the files below a folder, each folder once, links to folders last."""

    def refuse(error: OSError) -> None:
        path = os.path.relpath(error.filename, root)
        ignored[path] = f"not read: {error.strerror}"

    starts, seen_folders = [root], set[tuple[int, int]]()
    for start in starts:
        for folder, folders, names in os.walk(start, onerror=refuse):
            folders[:] = [n for n in sorted(folders) if n[0] != "." and n != "__pycache__"]
            try:
                status = Path(folder).stat()
                links = [p for n in folders if (p := Path(folder, n)).is_symlink()]
            except OSError as error:
                refuse(error)
                continue
            if (status.st_dev, status.st_ino) in seen_folders:
                ignored[os.path.relpath(folder, root)] = "a link to a folder that is read already"
                folders.clear()
                continue
            seen_folders.add((status.st_dev, status.st_ino))
            starts += links
            for path in (Path(folder, name) for name in names if name[0] != "."):
                try:
                    if path.is_file():
                        yield path
                    else:
                        ignored[os.path.relpath(path, root)] = "a broken link, or no regular file"
                except OSError as error:
                    refuse(error)


def _bundled(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces, with small text files of one source as one."""
    for (_, form), group in itertools.groupby(pieces, lambda p: (source_of(p), p.form)):
        bundle: Piece | None = None
        for piece in group:
            if bundle is None or form != "text" or bundle.size + piece.size > SMALL:
                if bundle is not None:
                    yield bundle
                bundle = piece
                continue
            size = bundle.size + piece.size
            mtime_ns = max(bundle.mtime_ns, piece.mtime_ns)
            more = (*bundle.more, piece.path)
            bundle = replace(bundle, size=size, end=size, mtime_ns=mtime_ns, more=more)
        if bundle is not None:
            yield bundle


def form_of(path: Path) -> str:
    """Return the form of a file by its name, "" of one that belongs to others, or a reason."""
    name = path.name.lower()
    packed = next((suffix for suffix in PACKED if name.endswith(suffix)), "")
    stem = name.removesuffix(packed)
    if name in BESIDE_DATA or name.endswith((".idx", ".pkl", ".sha256")):
        return ""
    if stem.endswith(LINES):
        return "lines"
    if stem.endswith((".tar", ".tgz")):
        return "tar"
    if stem.endswith(TEXTS):
        return "text"
    if packed:
        return f"no reader for {name.removeprefix(Path(stem).stem)}"
    if stem.endswith((".parquet", ".arrow")):
        return "parquet" if stem.endswith(".parquet") else "arrow"
    if stem.endswith(".bin"):
        return "megatron" if path.with_suffix(".idx").exists() else "tokens"
    try:
        return "text" if _is_text(path) else "no known format"
    except OSError as error:
        return f"not read: {error.strerror}"


def _divided(root: Path, name: str, path: Path, form: str, folder: str) -> Iterator[Piece]:
    status = path.stat()
    size = status.st_size
    plain = form == "lines" and path.suffix.lower() in (".jsonl", ".ndjson")
    step = PIECE if plain else max(1, size)
    for start in range(0, max(1, size), step):
        end = min(size, start + step)
        yield Piece(str(root), name, form, size, status.st_mtime_ns, start, end, folder=folder)


def _shards(index: Path) -> dict[str, str]:
    """Return the files that an index names, with their form."""
    try:
        document = json.loads(index.read_bytes()[:MAX_INDEX])
        if "shards" in document:
            return {mds_file(shard): "mds" for shard in document["shards"]}
        return {chunk["filename"]: "litdata" for chunk in document["chunks"]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(4096)
    return b"\0" not in start and "\ufffd" not in start[:4000].decode("utf-8", "replace")[:-4]


# ── one check ─────────────────────────────────────────────────────────────────────────────────────


class Request(Struct, frozen=True, kw_only=True):
    """One check: what is read, and how.

    Attributes:
        part: which pieces this process measures, and of how many parts; None: all, and the sums.
    """

    paths: tuple[Path, ...]
    val: tuple[Path, ...] = ()
    fields: Fields = Fields()
    level: str = ""
    tokenizer: str = ""
    scorer: str = ""
    jobs: int = 1
    part: tuple[int, int] | None = None


class PieceResult(Struct, kw_only=True):
    """What was measured of a piece. ignored: its records that are no documents, by reason."""

    sha256: str
    counts: Counts
    sample: list[tuple[int, bytes]]
    damage: str = ""
    ignored: dict[str, int] = {}


class Plan(Struct, frozen=True, kw_only=True):
    """What a worker needs to measure any piece."""

    folder: str
    key: str
    size: int
    level: str
    fields: Fields
    tokenizer: str
    scorer: str


def settings_of(request: Request, size: int) -> Settings:
    """Return what the numbers depend on beside the data. Raises InputError."""
    tokenizer = request.tokenizer
    if tokenizer:
        try:
            raw = Path(tokenizer).read_bytes()
        except OSError as error:
            raise InputError(f"{tokenizer}: {error.strerror}", hint=TOKENIZER) from error
        tokenizer = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    return Settings(
        level=request.level or (CHEAP if size > LARGE else FULL),
        fields=request.fields,
        tokenizer=tokenizer,
        scorer=_scorer_digest(request.scorer),
        libraries={name: _version(name) for name in LIBRARIES},
    )


def _scorer_digest(name: str) -> str:
    """Return `scorer_digest` of a scorer, whose module may end the process that imports it."""
    if not name:
        return ""
    (answer,) = run_in_processes(1, [(scorer_digest, name)], scorer=name)
    return str(answer[1])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def known_pieces(path: Path) -> tuple[list[Piece], dict[str, str]]:
    """Return what `list_pieces` does of data, of which there is some. Raises InputError."""
    pieces, ignored = list_pieces(path)
    if not pieces:
        raise InputError(f"{path} has no file of a known format", hint=_seen(ignored))
    return pieces, ignored


class BuildCheck:
    """A check in progress, with the folder of its results.

    Raises:
        InputError: a path does not exist, holds nothing that can be read, or a package is missing.
    """

    def __init__(self, request: Request, folder: Path) -> None:
        for package in ("numpy", "pyarrow", "orjson", "zstandard", "rensa", "xxhash", "pycld2"):
            need(package)
        self._request, self._folder = request, folder
        self.pieces: list[Piece] = []
        self._held_out: list[bool] = []
        self.ignored: dict[str, str] = {}
        for out, paths in ((False, request.paths), (True, request.val)):
            for path in paths:
                pieces, ignored = known_pieces(path)
                self.pieces += pieces
                self._held_out += [out] * len(pieces)
                self.ignored |= ignored
        self.training = [p for p, out in zip(self.pieces, self._held_out, strict=True) if not out]
        self.size = sum(piece.end - piece.start for piece in self.pieces)
        self.settings = settings_of(request, self.size)
        versions = (__version__, RESULTS)
        key = msgspec.json.encode((versions, self.settings, self.size, len(self.pieces)))
        self._plan = Plan(
            folder=str(folder),
            key=hashlib.sha256(key).hexdigest()[:16],
            size=self.size,
            level=self.settings.level,
            fields=request.fields,
            tokenizer=request.tokenizer,
            scorer=request.scorer,
        )

    def run(self, report: Report) -> int:
        """Measure the pieces that are not measured yet; return how many are left to others."""
        _make(self._folder)
        _remove_unfinished(self._folder)
        own = list(enumerate(self.pieces))
        if self._request.part is not None:
            number, count = self._request.part
            own = [(i, piece) for i, piece in own if i % count == number % count]
        todo = [(i, piece) for i, piece in own if not _is_done(self._plan, i, piece)]
        size = sum(piece.end - piece.start for _, piece in todo)
        progress = Progress(report, size)
        jobs = min(self._request.jobs, len(todo))
        scorer = self._plan.scorer  # it may end its process, and that is no end of the check
        if jobs > 1 or (todo and scorer):
            calls = [(measure_piece, self._plan, number, piece) for number, piece in todo]
            for number, _ in run_in_processes(jobs, calls, scorer=scorer):
                progress.finish(todo[number][1])
        else:
            worker = Worker(self._plan)
            for number, piece in todo:
                worker.measure(number, piece, progress)
                progress.finish(piece)
        return sum(not _has_result(self._plan, i, piece) for i, piece in enumerate(self.pieces))

    def manifest(self) -> Manifest:
        """Return the manifest of all pieces, without metrics."""
        plan = self._plan
        counts = Counts()
        inputs: list[Input] = []
        sample: list[tuple[int, bytes]] = []
        unreadable = 0
        for number, piece in enumerate(self.pieces):
            result = _read_result(plan, number, piece)
            held_out = self._held_out[number]
            documents_read = result.counts.documents
            unreadable += bool(result.counts.damaged) and not documents_read
            name = f"held out: {piece.label}" if held_out else piece.label
            size = piece.end - piece.start
            inputs.append(Input(name, size, result.sha256, documents_read, result.damage))
            for reason, records in result.ignored.items():
                key = f"{records:,} of {name}"
                others = [self.ignored[key]] if key in self.ignored else []
                self.ignored[key] = "; ".join((*others, reason))
            if not held_out:
                counts.merge(result.counts)
                sample = duplicates.thin_sample([*sample, *result.sample])
        counts.join_sources()
        counts.reasons = dict(
            sorted(counts.reasons.items(), key=lambda r: (-r[1], r[0]))[:MAX_REASONS]
        )
        paths = [_rows_path(plan, i, piece) for i, piece in enumerate(self.pieces)]
        near = plan.level == FULL
        rows = duplicates.Rows(paths, self._held_out)
        spool = self._folder / "candidates.tmp"
        try:
            copies = duplicates.find_copies(rows, self.pieces, plan.fields, spool, near=near)
        except OSError as error:
            raise _unwritable(self._folder, error) from error
        hotspots: Hotspots | None = duplicates.find_hotspots(sample) if near and sample else None
        return Manifest(
            settings=self.settings,
            inputs=inputs,
            ignored=self.ignored,
            unreadable=unreadable,
            counts=counts,
            duplicates=copies,
            hotspots=hotspots,
        )

    def remove_results(self) -> None:
        """Remove the results of pieces."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Progress:
    """Reports bytes that were read, a few times a second."""

    def __init__(self, report: Report, size: int) -> None:
        self._report, self._size = report, size
        self._finished = self._current = 0
        self._started = self._reported = time.monotonic()

    def add(self, size: int, piece: Piece) -> None:
        self._current = min(piece.end - piece.start, self._current + size)
        now = time.monotonic()
        if now - self._reported >= REPORT_S:
            self._reported = now
            self._show()

    def finish(self, piece: Piece) -> None:
        self._finished += piece.end - piece.start
        self._current = 0
        self._show()

    def _show(self) -> None:
        done = self._finished + self._current
        seconds = max(1e-6, time.monotonic() - self._started)
        self._report(done >> 20, self._size >> 20, f"MiB, {done / 1e6 / seconds:.1f} MB/s")


class Worker:
    """Measures pieces in one process."""

    def __init__(self, plan: Plan) -> None:
        os.environ.setdefault("RAYON_NUM_THREADS", "1")  # a core for each process
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._plan = plan
        self._hash = need("xxhash").xxh3_128_intdigest
        self._metrics = TextMetrics(plan.size, plan.tokenizer, plan.scorer)
        share = min(1.0, duplicates.SAMPLE / max(1, plan.size))
        self._sampled = int(share * 2**32) if plan.level == FULL else 0

    def measure(self, number: int, piece: Piece, progress: Progress | None) -> None:
        """Measure a piece and write its result. Raises InputError, StoreError."""
        plan = self._plan
        counts = Counts()
        signer = duplicates.Signer(near=plan.level == FULL)
        sample: list[tuple[int, bytes]] = []
        last_damage, is_passing, ignored = "", False, Counter[str]()
        for record in documents(piece, plan.fields):
            if isinstance(record, Ignored):
                ignored[record.reason] += 1
                continue
            if isinstance(record, Damage):
                last_damage = record.reason
                is_passing |= record.is_passing
                counts.damaged += 1
                if last_damage in counts.reasons or len(counts.reasons) < MAX_REASONS:
                    counts.reasons[last_damage] = counts.reasons.get(last_damage, 0) + 1
                continue
            if record.attachments:
                ignored[ATTACHMENTS] += record.attachments
            raw = _bytes_of(record)
            digest = self._hash(raw)
            self._metrics.measure(counts, record, raw, digest)
            signer.add(record, digest)
            if record.ids is None and digest & 0xFFFFFFFF < self._sampled:
                sample.append((digest & 0xFFFFFFFFFFFFFFFF, raw[:SAMPLED_BYTES]))
            if progress is not None:
                progress.add(len(raw), piece)
        self._metrics.flush(counts)
        try:
            sha256 = _sha256(piece)
        except OSError as error:
            sha256, is_passing = f"not read: {error.strerror}", True
        result = PieceResult(
            sha256=sha256,
            counts=counts,
            sample=duplicates.thin_sample(sample),
            damage=last_damage,
            ignored=ignored,
        )
        path = (_passing_path if is_passing else _result_path)(plan, number, piece)
        _write_result(path, _rows_path(plan, number, piece), result, signer.finish())


def run_in_processes(
    jobs: int, calls: Sequence[tuple[Any, ...]], *, scorer: str = ""
) -> Iterator[tuple[int, Any]]:
    """Yield the number and the result of each call, as they end.

    Args:
        calls: a function of a module, and its arguments. scorer: what runs in them, too.

    Raises:
        InputError: a process was ended.
    """
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), install_pool_worker_exit)
    tasks: dict[Future[Any], int] = {}
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # is inherited
        tasks |= {pool.submit(*call): number for number, call in enumerate(calls)}
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for task in as_completed(tasks):
            yield tasks[task], task.result()
    except BrokenExecutor as error:
        reason = "as where memory is short"
        if scorer:
            reason = f"by --toxicity {scorer}, or where memory is short"
        raise InputError(
            f"a process of the check was ended, {reason}",
            hint="fewer --jobs; with --work DIR it goes on where it was",
        ) from error
    except (KeyboardInterrupt, GeneratorExit):
        _end_children()  # a piece takes up to a minute
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        tasks.clear()
        del pool  # an exception keeps this frame, and its semaphores would count as lost


def _end_children() -> None:
    """End the processes of the pool, also one in a call that does not look at signals."""
    children = active_children()
    for process in children:
        process.terminate()
    until_s = time.monotonic() + PATIENCE_S
    for process in children:
        process.join(max(0.0, until_s - time.monotonic()))
        process.kill()


class Ending:
    """End of a process of a pool by a signal: at once, but behind a file that it is writing."""

    def __init__(self) -> None:
        self._is_due = self._is_writing = False

    def on_signal(self, _number: int, _frame: object) -> None:
        self._is_due = True
        if not self._is_writing:
            os._exit(1)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False
            if self._is_due:
                os._exit(1)


ENDING = Ending()


def install_pool_worker_exit() -> None:
    """End this process of a pool by Ctrl-C and SIGTERM, which its parent reports, and with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ENDING.on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if (parent := parent_process()) is not None:
        threading.Thread(target=_end_behind, args=[parent], daemon=True).start()


def _end_behind(parent: BaseProcess) -> None:
    """A process of a pool waits for ever where the first one was killed."""
    parent.join()
    os._exit(1)


def measure_piece(plan: Plan, number: int, piece: Piece) -> None:
    """Measure a piece in a process of a pool."""
    _worker(plan).measure(number, piece, None)


_workers: dict[Plan, Worker] = {}


def _worker(plan: Plan) -> Worker:
    """Return the worker of this process: a tokenizer is loaded once."""
    if plan not in _workers:
        _workers[plan] = Worker(plan)
    return _workers[plan]


def _bytes_of(document: Document) -> bytes:
    if document.ids is None:
        return document.text.encode("utf-8", "replace")
    numpy = need("numpy")
    return bytes(numpy.ascontiguousarray(document.ids, "<u4").tobytes())


def _sha256(piece: Piece) -> str:
    digest = hashlib.sha256()
    left = piece.end - piece.start
    for path in piece.all_files:
        with path.open("rb") as file:
            file.seek(piece.start)
            while left > 0 and (part := file.read(min(left, 1 << 20))):
                digest.update(part)
                left -= len(part)
    return digest.hexdigest()


# ── results of pieces ─────────────────────────────────────────────────────────────────────────────


def _seen(ignored: dict[str, str]) -> str:
    names = ", ".join(f"{name} ({reason})" for name, reason in list(ignored.items())[:3])
    known = "JSON lines, Parquet, Arrow, .bin, MDS, litdata, .tar, text"
    return f"{names or 'it is empty'}; known: {known}"


def _remove_unfinished(folder: Path) -> None:
    """Remove files of processes that were killed while they wrote them."""
    oldest = time.time() - OUTDATED_S  # as the file system counts it
    for path in folder.glob(".*"):
        with suppress(OSError):  # another machine did
            if UNFINISHED.fullmatch(path.name) and path.stat().st_mtime < oldest:
                path.unlink()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path | str, error: OSError) -> StoreError:
    hint = "--work DIR names another folder for the results of pieces"
    return StoreError(f"cannot write {folder}: {error.strerror or error}", hint=hint)


def _sidecar_of(piece: Piece) -> Path | None:
    """Return the file that says how a piece is read, None where it is read by itself."""
    if piece.form == "megatron":
        return piece.file.with_suffix(".idx")
    return piece.file.with_name("index.json") if piece.form in ("mds", "litdata") else None


def _name(plan: Plan, number: int, piece: Piece) -> str:
    names = *map(unicode_name, (piece.path, piece.folder)), tuple(map(unicode_name, piece.more))
    facts: tuple[Any, ...] = (*names, piece.form, piece.size, piece.mtime_ns)
    sidecar = _sidecar_of(piece)
    if sidecar is not None:
        with suppress(OSError):
            status = sidecar.stat()
            facts += (status.st_size, status.st_mtime_ns)
    about = msgspec.json.encode((*facts, piece.start, piece.end))
    return f"{number:06d}-{plan.key}-{hashlib.sha256(about).hexdigest()[:12]}"


def _result_path(plan: Plan, number: int, piece: Piece) -> Path:
    return Path(plan.folder) / f"{_name(plan, number, piece)}.msgpack"


def _passing_path(plan: Plan, number: int, piece: Piece) -> Path:
    """Return where the result of a piece is that another check measures again."""
    return Path(plan.folder) / f"{_name(plan, number, piece)}.passing.msgpack"


def _rows_path(plan: Plan, number: int, piece: Piece) -> Path:
    return Path(plan.folder) / f"{_name(plan, number, piece)}.npy"


def _is_done(plan: Plan, number: int, piece: Piece) -> bool:
    return _result_path(plan, number, piece).exists()


def _has_result(plan: Plan, number: int, piece: Piece) -> bool:
    return _is_done(plan, number, piece) or _passing_path(plan, number, piece).exists()


def _write_result(path: Path, rows_path: Path, result: PieceResult, rows: Any) -> None:
    """Write the rows, then the result, which says that both are there. Raises StoreError."""
    try:
        with ENDING.postponed():
            with files.replacing_file(rows_path) as file:
                need("numpy").save(file, rows)
            files.replace_file(path, msgspec.msgpack.encode(result), durable=False)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _read_result(plan: Plan, number: int, piece: Piece) -> PieceResult:
    path = _result_path(plan, number, piece)
    if not path.exists():
        path = _passing_path(plan, number, piece)
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=PieceResult)
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(
            f"{path}: {error}", hint=f"remove {plan.folder} and check again"
        ) from error


# ── what others counted ───────────────────────────────────────────────────────────────────────────


def read_filter_stages(options: Sequence[str], fields: Fields) -> dict[str, Stage]:
    """Return the stages of filters that reports or folders of rejects show.

    Each is a file, of datatrove (stats.json) or {"stage": {"dropped": n, "total": m}}, or
    NAME=FOLDER of what a stage dropped, whose total is 0 until `add_totals`.

    Raises:
        InputError: one cannot be understood.
    """
    stages: dict[str, Stage] = {}
    for option in options:
        name, equals, folder = option.partition("=")
        try:
            if equals and not (Path(folder).is_dir() or Path(option).exists()):
                raise InputError(f"--rejects {option}: no folder {folder}", hint=REJECTS)
            if equals and Path(folder).is_dir():
                pieces, _ = list_pieces(Path(folder))
                dropped = sum(isinstance(d, Document) for p in pieces for d in documents(p, fields))
                stages[name] = Stage(dropped, 0)
                continue
            document = files.read_json(Path(option), foreign=True)
            stages |= dict(_stages(document))
        except OSError as error:
            raise InputError(f"--rejects {option}: {error.strerror}", hint=REJECTS) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            text = f"--rejects {option} is no report of filters: {error}"
            raise InputError(text, hint=REJECTS) from error
    return stages


def add_totals(stages: Mapping[str, Stage], retained: int) -> dict[str, Stage]:
    """Return the stages, with what those read whose rejects are in a folder."""
    return {
        name: stage if stage.total else Stage(stage.dropped, stage.dropped + retained)
        for name, stage in stages.items()
    }


def _stages(document: Any) -> Iterator[tuple[str, Stage]]:
    if isinstance(document, list):
        for step in document:
            stats = step["stats"]
            dropped = _number(stats.get("dropped", 0))
            total = _number(stats.get("total", 0)) or dropped + _number(stats.get("forwarded", 0))
            if total:
                yield str(step["name"]).strip(), Stage(dropped, total)
        return
    for name, stage in document.items():
        dropped = _first(stage, "dropped", "rejected", "removed")
        if total := _first(stage, "total", "seen", "input"):
            yield str(name), Stage(dropped, total)


def _first(stage: Mapping[str, Any], *keys: str) -> int:
    number = next((stage[key] for key in keys if key in stage), None)
    if number is None:
        raise ValueError(f"a stage has none of {', '.join(keys)}")
    return int(number)


def _number(value: Any) -> int:
    return int(value["total"] if isinstance(value, dict) else value)


def read_prompts(path: Path) -> Prompts:
    """Return the facts of a set of prompts. Raises InputError."""
    count = toxic = 0
    pieces, _ = list_pieces(path)
    digest = hashlib.sha256()
    for piece in pieces:
        try:
            digest.update(_sha256(piece).encode())
            lines = piece.file.read_bytes().splitlines()
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from error
        for line in filter(bytes.strip, lines):
            try:
                row = msgspec.json.decode(line)
                prompt = row["prompt"]
                scores = [prompt.get("toxicity") if isinstance(prompt, dict) else None]
                scores.append(row.get("toxicity"))
            except (msgspec.DecodeError, LookupError, TypeError) as error:
                raise InputError(
                    f"{path}: a line without a prompt: {error}", hint=PROMPTS
                ) from error
            count += 1
            toxic += any(isinstance(s, float | int) and s >= 0.5 for s in scores)
    if not count:
        raise InputError(f"{path} has no prompt", hint=PROMPTS)
    return Prompts(count, toxic, digest.hexdigest())
