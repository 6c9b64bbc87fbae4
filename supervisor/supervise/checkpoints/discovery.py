"""Where checkpoints are, what they look like, and whether all of their files are there.

Looks at names and sizes only; one small JSON file is read. Decides nothing.

Source of the names: Trainer and accelerate (`checkpoint-N`, `rng_state_N.pth`,
`model-00001-of-00003.safetensors` beside an index), torch.distributed.checkpoint (`__N_M.distcp`
beside `.metadata`, which is written last).
"""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..store import files
from .registry import Stamp

PARTIAL = (".partial", ".tmp", ".temp", ".incomplete", ".part", ".writing")
METADATA = ".metadata"
MAX_INDEX = 64 << 20  # bytes; that of a model of a thousand layers takes some MB
LATE_NS = 250_000_000  # that a file is written, or its clock is, beside the save; project default
_SHARD = re.compile(r"^(?P<stem>.*-)(?P<number>\d+)(?P<of>-of-)(?P<count>\d+)(?P<end>\..*)$")
_RANK = re.compile(r"^(rng_state_|random_states_)(\d+)(\.\w+)$")


def stamp(path: str) -> Stamp | None:
    """Return what a checkpoint looks like now, None if there is nothing."""
    place = Path(path)
    try:
        if not place.is_dir():
            return (_row(place, place.name),)
        every = (Path(folder, name) for folder, _, names in os.walk(place) for name in names)
        rows = [_row(file, str(file.relative_to(place))) for file in every]
        return tuple(sorted(rows)) or None
    except OSError:  # it went away while we looked
        return None


def _row(path: Path, name: str) -> tuple[str, int, int, int]:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return name, found.st_size, found.st_mtime_ns, found.st_ino


def matches(patterns: Iterable[str], cwd: Path) -> list[str]:
    """Return the absolute paths that the patterns match, oldest first.

    Left out: links, which only point to another one, and names of what is being written.
    """
    found = {}
    for pattern in patterns:
        for name in glob.iglob(pattern, root_dir=cwd, recursive=True):  # noqa: PTH207, absolute too
            path = Path(os.path.normpath(cwd / name))
            try:
                if not is_partial(path.name) and not path.is_symlink():
                    found[str(path)] = path.stat().st_mtime_ns
            except OSError:
                continue
    return sorted(found, key=lambda path: found[path])


def is_partial(name: str) -> bool:
    """Whether the last part of a path says that it is still being written."""
    return name.endswith(PARTIAL) or name.startswith(("tmp-", ".tmp"))


def whole(path: str, matched: Sequence[str]) -> str:
    """Return the checkpoint that a file which was saved belongs to: itself, or its directory."""
    for parent in Path(path).parents:
        if str(parent) in matched:
            return str(parent)
    name = Path(path).name
    return str(Path(path).parent) if _SHARD.match(name) or name.endswith(".distcp") else path


@dataclass(frozen=True)
class FileIdentity:
    """What tells a file that was saved from another one that has its inode by now.

    Attributes:
        device: of what was written.
        look: its size, time of writing and inode when the save returned: what a stamp has of it.
        began_ns, told_ns: since the epoch; it was written between them, as its times say.
    """

    device: int
    look: tuple[int, int, int]
    began_ns: float
    told_ns: float


def is_what(path: str, mark: FileIdentity, seen: Stamp = ()) -> bool:
    """Whether what lies at `path` is what was saved: by its inode, and by what a renaming keeps.

    That is size and time of writing: those that were `seen` before, or told, or a time within the
    save, for what was not yet on the disk when it returned. Of a directory one file that is known
    is enough: others may be added after the save.
    """
    try:
        found = Path(path).stat()
    except OSError:
        return False
    if (found.st_dev, found.st_ino) != (mark.device, mark.look[-1]):
        return False
    known = {mark.look, *(row[1:] for row in seen)}
    began_ns, told_ns = mark.began_ns - LATE_NS, mark.told_ns + LATE_NS
    return any(row[1:] in known or began_ns <= row[2] <= told_ns for row in stamp(path) or ())


def has(look: Stamp, mark: FileIdentity) -> bool:
    """Whether one of these files is what was saved, wherever it is now; see `is_what`."""
    began_ns, told_ns = mark.began_ns - LATE_NS, mark.told_ns + LATE_NS
    same = [row for row in look if row[3] == mark.look[-1]]
    return any(row[1:] == mark.look or began_ns <= row[2] <= told_ns for row in same)


def named(path: str, mark: FileIdentity | None, seen: Stamp = ()) -> str | None:
    """Return what the file with this mark is called in its directory now, see `is_what`.

    None where it has no name there, or nobody told the inode.
    """
    if mark is None:
        return None
    if is_what(path, mark, seen):
        return path
    try:
        with os.scandir(Path(path).parent) as entries:
            for entry in entries:
                if entry.inode() == mark.look[-1] and is_what(entry.path, mark, seen):
                    return entry.path
    except OSError:
        pass
    return None


def missing(path: str, look: Stamp, ranks: int) -> str:
    """Return what a checkpoint lacks, as a sentence; "" if all of its files are there.

    Args:
        ranks: of the job, for files that every rank writes.
    """
    if all(size == 0 for _, size, _, _ in look):
        return "it is empty"
    names = [name for name, *_ in look]
    if not Path(path).is_dir():
        return ""
    for name in names:
        if is_partial(Path(name).name):
            return f"{name} is still being written"
    if any(name.endswith(".distcp") for name in names) and METADATA not in names:
        return f"{METADATA} is missing"
    shards = {shard for name in names for shard in _siblings(path, name)}
    ranked = [(name, match) for name in names if (match := _RANK.match(name))]
    if ranks > 1:
        shards |= {f"{m[1]}{rank}{m[3]}" for _, m in ranked for rank in range(ranks)}
    lost = sorted(shards - set(names))
    return f"{', '.join(lost[:3])} {'are' if len(lost) > 1 else 'is'} missing" if lost else ""


def _siblings(path: str, name: str) -> set[str]:
    """Return the files that must be there because `name` is, by its name or its contents."""
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
            return {str(folder / str(each)) for each in index["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return set()  # whoever loads it will tell
    return set()
