"""Finds checkpoints on disk, checks that they are complete, and decides which job owns them.

Reads names, sizes and times; of the contents only a small JSON index.

Source of the names: Trainer and accelerate (`checkpoint-N`, `rng_state_N.pth`,
`model-00001-of-00003.safetensors` beside an index), torch.distributed.checkpoint (`__N_M.distcp`
beside `.metadata`, which is written last).

Files of one step beside each other, such as model_00100.pt and optim_00100.pt, are one checkpoint,
named by the file of the model. A set is complete when it has what the set of the step before has.
Source of the names: nanochat, `save_checkpoint` in checkpoint_manager.py, writes the model first,
then meta_00100.json, then optim_00100_rank0.pt of each rank.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..core.model.checkpoint_registry import is_partial
from ..errors import StoreError
from ..store import files
from . import registry
from .registry import GLOB, Entry, Register, Stamp

MODEL, OPTIMIZER = "model", "optim"
_MEMBER = re.compile(
    r"(?P<kind>[A-Za-z]+)_(?P<step>\d{3,})(?P<rank>_rank\d+)?\.(pt|pth|bin|ckpt|safetensors|json)"
)


def model_of(path: str, matched: Collection[str]) -> str:
    """Return the model's file of the set that a file belongs to; the file itself if there is none.

    Args:
        matched: paths that patterns match; of them only one that matches as well stands for others.
    """
    member = _MEMBER.fullmatch(Path(path).name)
    if member is None or member["kind"] == MODEL:
        return path
    names = (f"{MODEL}_{member['step']}.{end}" for end in ("pt", "pth", "bin", "safetensors"))
    models = (str(Path(path).with_name(name)) for name in names)
    candidates = (m for m in models if (m in matched or path not in matched) and Path(m).is_file())
    return next(candidates, path)


def missing_names(path: str) -> list[str]:
    """Return the names that a set lacks, by its model's file; [] for any other file."""
    member = _MEMBER.fullmatch(Path(path).name)
    if member is None or member["kind"] != MODEL:
        return []
    sets, step = _sets(Path(path).parent), member["step"]
    previous_step = max(
        (step_text for step_text in sets if int(step_text) < int(step)), key=int, default=step
    )
    required = sets.get(previous_step, {}).items()
    lost = (name for key, name in required if key not in sets.get(step, {}))
    return sorted(name.replace(f"_{previous_step}", f"_{step}", 1) for name in lost)


def has_optimizer(path: str) -> bool | None:
    """Return whether a set has an optimizer's file, None for a file that is in no set."""
    member = _MEMBER.fullmatch(Path(path).name)
    if member is None:
        return None
    members = _sets(Path(path).parent).get(member["step"], {})
    return any(OPTIMIZER in kind.lower() for kind, _ in members)


def _sets(folder: Path) -> dict[str, dict[tuple[str, str], str]]:
    """Return step -> (kind, rank) -> name of the files in a directory."""
    sets: dict[str, dict[tuple[str, str], str]] = {}
    for path in folder.iterdir():
        if member := _MEMBER.fullmatch(path.name):
            key = member["kind"], member["rank"] or ""
            sets.setdefault(member["step"], {})[key] = path.name
    return sets


METADATA = ".metadata"
MAX_INDEX = 64 << 20  # bytes; that of a model of a thousand layers takes some MB
CLOCK_SLACK_NS = 250_000_000  # between a save and the times of its files; project default
_SHARD = re.compile(r"^(?P<stem>.*-)(?P<number>\d+)(?P<of>-of-)(?P<count>\d+)(?P<end>\..*)$")
_RANK = re.compile(r"^(rng_state_|random_states_)(\d+)(\.\w+)$")


def stamp_files(path: str) -> Stamp | None:
    """Return name, size, time and inode of each file of a checkpoint; None if there is none."""
    root = Path(path)
    try:
        if not root.is_dir():
            return (_row(root, root.name),)
        paths = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
        rows = [_row(file, str(file.relative_to(root))) for file in paths]
        return tuple(sorted(rows)) or None
    except OSError:  # removed during the scan
        return None


def _row(path: Path, name: str) -> tuple[str, int, int, int]:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return name, status.st_size, status.st_mtime_ns, status.st_ino


def find_matches(patterns: Iterable[str], cwd: Path) -> list[str]:
    """Return the absolute paths that the patterns match, oldest first.

    Symbolic links and files that are still being written are left out.
    """
    by_path = {}
    for pattern in patterns:
        for name in glob.iglob(pattern, root_dir=cwd, recursive=True):  # noqa: PTH207, absolute too
            path = Path(os.path.normpath(cwd / name))
            try:
                if not is_partial(path.name) and not path.is_symlink():
                    by_path[str(path)] = path.stat().st_mtime_ns
            except OSError:
                continue
    return sorted(by_path, key=lambda path: by_path[path])


def explain_unusable(patterns: Sequence[str], cwd: Path) -> str:
    """Return why nothing that the patterns match can be resumed from, "" if something can."""
    reasons = []
    for path in find_matches(patterns, cwd):
        model = model_of(path, ())
        reason = find_missing_files(path, stamp_files(path) or (), 1)
        if model != path:
            reason = f"it is a part of {Path(model).name}, which is not matched"
        if not reason:
            return ""
        reasons.append(f"{Path(path).name}: {reason}")
    return reasons[-1] if reasons else f"nothing matches {', '.join(patterns)}"


def find_checkpoint_root(path: str, matched: Sequence[str]) -> str:
    """Return the checkpoint that a saved file belongs to: itself, its directory or its set."""
    for parent in Path(path).parents:
        if str(parent) in matched:
            return str(parent)
    name = Path(path).name
    if _SHARD.match(name) or name.endswith(".distcp"):
        return str(Path(path).parent)
    return model_of(path, matched)


@dataclass(frozen=True)
class FileIdentity:
    """Identifies a saved file, even where another file has reused its inode.

    Attributes:
        device: of the file.
        stat: its size, mtime in ns and inode when the save returned, as in a `Stamp`.
        start_ns, end_ns: of the save, since the epoch.
    """

    device: int
    stat: tuple[int, int, int]
    start_ns: float
    end_ns: float

    def matches_row(self, row: tuple[str, int, int, int]) -> bool:
        """Whether a row of a stamp is this file, or was written during this save."""
        start_ns, end_ns = self.start_ns - CLOCK_SLACK_NS, self.end_ns + CLOCK_SLACK_NS
        return row[1:] == self.stat or start_ns <= row[2] <= end_ns


def is_same_file(path: str, identity: FileIdentity, previous_stamp: Stamp = ()) -> bool:
    """Whether `path` is the saved file: same inode, and a size and mtime that a rename keeps.

    Size and mtime must be those `seen` before or reported, or the mtime must fall within the save,
    for data that reached the disk after it returned. Of a directory one known file is enough:
    others may be added after the save.
    """
    try:
        status = Path(path).stat()
    except OSError:
        return False
    if (status.st_dev, status.st_ino) != (identity.device, identity.stat[-1]):
        return False
    known_rows = {row[1:] for row in previous_stamp}
    return any(
        row[1:] in known_rows or identity.matches_row(row) for row in stamp_files(path) or ()
    )


def contains_file(current: Stamp, identity: FileIdentity) -> bool:
    """Whether one of these files is the saved one, whatever its path; see `is_same_file`."""
    return any(row[3] == identity.stat[-1] and identity.matches_row(row) for row in current)


def find_current_path(
    path: str, identity: FileIdentity | None, previous_stamp: Stamp = ()
) -> str | None:
    """Return the present path of a saved file that may have been renamed, see `is_same_file`.

    None if it is not in that directory, or if its inode was not reported.
    """
    if identity is None:
        return None
    if is_same_file(path, identity, previous_stamp):
        return path
    try:
        with os.scandir(Path(path).parent) as entries:
            for entry in entries:
                is_same_inode = entry.inode() == identity.stat[-1]
                if is_same_inode and is_same_file(entry.path, identity, previous_stamp):
                    return entry.path
    except OSError:
        pass
    return None


def find_missing_files(path: str, current: Stamp, ranks: int) -> str:
    """Return which files a checkpoint lacks, as a sentence; "" if it is complete.

    Args:
        ranks: world size of the job, for files that every rank writes.
    """
    if all(size == 0 for _, size, _, _ in current):
        return "it is empty"
    names = [name for name, *_ in current]
    if not Path(path).is_dir():
        return _missing(missing_names(path))
    for name in names:
        if is_partial(Path(name).name):
            return f"{name} is still being written"
    for folder in {Path(name).parent for name in names if name.endswith(".distcp")}:
        if str(folder / METADATA) not in names:
            return f"{folder / METADATA} is missing"
    shards = {shard for name in names for shard in _siblings(path, name)}
    ranked = [(name, match) for name in names if (match := _RANK.match(name))]
    if ranks > 1:
        shards |= {f"{m[1]}{rank}{m[3]}" for _, m in ranked for rank in range(ranks)}
    return _missing(sorted(shards - set(names)))


def _missing(lost: Sequence[str]) -> str:
    return f"{', '.join(lost[:3])} {'are' if len(lost) > 1 else 'is'} missing" if lost else ""


def has_optimizer_alongside(path: str) -> bool:
    """Whether a file of an optimizer lies beside, of the same step where names have one."""
    try:
        if (has_file := has_optimizer(path)) is not None:
            return has_file
        return any("optim" in file.name.lower() for file in Path(_folder(path)).iterdir())
    except OSError:
        return False


def _siblings(path: str, name: str) -> set[str]:
    """Return the files that the name or the contents of the file `name` require."""
    folder = Path(name).parent
    shard = _SHARD.match(Path(name).name)
    if shard is not None:
        width, count = len(shard["number"]), int(shard["count"])
        return {
            str(folder / f"{shard['stem']}{n:0{width}}-of-{shard['count']}{shard['end']}")
            for n in range(1, min(count, 100_000) + 1)
        }
    if name.endswith(".index.json"):
        try:
            index = files.read_json(Path(path, name), MAX_INDEX, foreign=True)
            return {str(folder / str(shard)) for shard in index["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return set()  # the verifier reports it
    return set()


# ── ownership ─────────────────────────────────────────────────────────────────────────────────────

FOREIGN = "another job"  # `Entry.how` of a checkpoint that another job wrote
CONTESTED = "several runs"  # unreported, and another run has found it too
UNREPORTED = (GLOB, FOREIGN, CONTESTED)
ELSEWHERE = "another job wrote it: this one saves elsewhere"
UNNAMED = (
    "no job reported it, and job.checkpoints.glob does not name one directory: set it to the "
    "directory of this job"
)
IDENTITIES = 64  # newest saves whose files are recognized after a rename; project default
RECENT_NS = 3600 * 10**9  # clocks of two disks may differ; project default

Rows = set[tuple[int, int, int]]  # size, mtime and inode of files


class OwnershipResolver:
    """Decides which checkpoints found by a pattern are not the job's own.

    A checkpoint that the job reported is its own, and so is any in a directory that it reported.
    If the patterns match such a directory, what they find elsewhere is foreign. Otherwise they must
    name one directory. A checkpoint in the register of another run is never this job's. Callers
    hold the lock of the register.

    Args:
        patterns: of checkpoint paths; relative ones start at `cwd`.
        run: the run directory. runs: another directory of runs, besides the parent of `run`.
    """

    def __init__(
        self, register: Register, patterns: Sequence[str], cwd: Path, run: Path, runs: Path | None
    ) -> None:
        self._register, self._run = register, run
        self._run_parents = {run.parent, run.parent if runs is None else runs.absolute()}
        folders = {Path(os.path.normpath(cwd / pattern)).parent for pattern in patterns}
        single = len(folders) == 1 and not glob.has_magic(str(next(iter(folders))))
        self._named = folders.pop() if single else None
        self._identities: deque[FileIdentity] = deque(maxlen=IDENTITIES)
        self._reported: set[str] = set()  # directories that the job reported
        self._covered = False  # the patterns match one of them
        self._cache: dict[Path, tuple[tuple[int, int], list[tuple[str, Rows]]]] = {}
        self._claims: list[tuple[str, str, Rows]] | None = None

    def on_save(self, identity: FileIdentity | None) -> None:
        """Record the file of a save that the job reported."""
        if identity is not None:
            self._identities.append(identity)

    def refresh(self, matched: Sequence[str]) -> None:
        """Update the job's directories; `claims` of other runs are read again on demand.

        Args:
            matched: paths that the patterns match.
        """
        self._claims = None
        own_paths = (e.path for e in self._register.entries if e.how not in UNREPORTED)
        self._reported |= {_folder(path) for path in own_paths}
        self._covered |= any(_folder(path) in self._reported for path in matched)

    def ownership_verdict(self, entry: Entry) -> tuple[str, str]:
        """Return `FOREIGN` or `CONTESTED` and the reason; two empty strings for the job's own.

        The verdict on a foreign one stands until the job reports it.
        """
        if entry.how not in UNREPORTED:
            return "", ""
        if entry.how != GLOB:
            return entry.how, "; ".join(entry.problems)
        rows = _rows(entry.stamp)
        folder = _folder(entry.path)
        if any(contains_file(entry.stamp, identity) for identity in self._identities):
            self._reported.add(folder)  # renamed after the report
            return "", ""
        claims = [
            (name, reporter) for name, reporter, theirs in self._other_claims() if rows & theirs
        ]
        for name, reporter in claims:
            if reporter not in UNREPORTED:
                return FOREIGN, f"another job wrote it: it belongs to the run {name}"
        if folder not in self._reported and self._covered:
            return FOREIGN, ELSEWHERE
        if folder not in self._reported and (
            self._named is None or folder != os.path.realpath(self._named)
        ):
            return FOREIGN, UNNAMED
        if claims:
            return CONTESTED, (
                f"the run {claims[0][0]} found it too, and no job reported it: name a directory of "
                "its own in job.checkpoints.glob"
            )
        return "", ""

    def is_own(self, entry: Entry) -> bool:
        """Whether it is the job's own, by `verdict`."""
        return not self.ownership_verdict(entry)[0]

    def claiming_run(self, current: Stamp) -> str:
        """Return the run whose job reported these files, "" if none did."""
        rows = _rows(current)
        if any(rows & _rows(e.stamp) for e in self._register.entries if e.how not in UNREPORTED):
            return ""
        claims = (
            name
            for name, reporter, theirs in self._other_claims()
            if reporter not in UNREPORTED and rows & theirs
        )
        return next(claims, "")

    def _other_claims(self) -> list[tuple[str, str, Rows]]:
        """Return run, `how` and files of each checkpoint that another run claims."""
        if self._claims is None:
            self._claims = list(self._read_claims())
        return self._claims

    def _read_claims(self) -> Iterator[tuple[str, str, Rows]]:
        oldest_ns = min(
            (row[2] for e in self._register.entries if e.how in UNREPORTED for row in e.stamp),
            default=0,
        )
        registers = (f.glob(f"*/{registry.NAME}") for f in self._run_parents)
        for path in {path for register in registers for path in register}:
            if path.parent == self._run:
                continue
            try:
                status = path.stat()
                if status.st_mtime_ns < oldest_ns - RECENT_NS:
                    continue  # that run ended before
                version = (status.st_mtime_ns, status.st_ino)
                if self._cache.get(path, (None,))[0] != version:
                    entries = registry.read_registry(path.parent).checkpoints
                    self._cache[path] = version, [(e.how, _rows(e.stamp)) for e in entries]
            except (OSError, StoreError, KeyError, TypeError):
                continue  # being removed, or not a register
            for reporter, theirs in self._cache[path][1]:
                if reporter != FOREIGN:
                    yield path.parent.name, reporter, theirs


def _rows(current: Iterable[Sequence[Any]]) -> Rows:
    return {(size, mtime, inode) for _, size, mtime, inode in current}


@lru_cache(4096)
def _folder(path: str) -> str:
    """Return the directory of a path with links resolved."""
    return os.path.realpath(Path(path).parent)
