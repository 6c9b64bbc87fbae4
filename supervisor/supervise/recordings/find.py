"""Find the recordings under a path, and name them."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Protocol

from ..errors import InputError
from .table import Table

LABELS = "incidents.csv"  # marks the root of a collection of recordings


class Reader(Protocol):
    """A module of this folder."""

    def claims(self, path: Path) -> bool: ...
    def read(self, path: Path) -> Table: ...


@dataclass(frozen=True, slots=True)
class Source:
    """One file or folder that a reader claims. `name` is the name of its run."""

    path: Path
    reader: str
    name: str
    named: bool  # by the user; False: found in a folder


@cache
def readers() -> dict[str, Reader]:
    """Return the readers by the names of their files."""
    package = __name__.rpartition(".")[0]
    found: dict[str, Reader] = {}
    folder = [str(Path(__file__).parent)]
    for name in sorted(info.name for info in pkgutil.iter_modules(folder)):
        module = import_module(f"{package}.{name}")
        if hasattr(module, "claims"):
            found[name] = module
    return found


def sources(paths: Sequence[Path], more: dict[str, Reader] | None = None) -> list[Source]:
    """Return the recordings at and below `paths`, in that order, each once.

    A recording is called by its path below the root of its collection, without its suffix: the
    nearest folder above it that holds an `incidents.csv`, else the folder that all those without
    one have in common.

    Args:
        more: readers of other layers, asked first.

    Raises:
        InputError: a path is not there or closed, or holds nothing that a reader can read.
    """
    known = {**(more or {}), **readers()}
    found: dict[Path, tuple[str, bool]] = {}
    for path in paths:
        try:  # `exists`, `is_file` and the like raise in a folder that may not be entered
            if not path.exists():
                raise InputError(f"{path}: no such file or directory")
            claimed = [*_walk(path, known)]
        except OSError as error:
            where = error.filename or path
            raise InputError(f"{where}: cannot be read: {error.strerror}") from error
        if not claimed:
            kinds = "a run directory, CSV, Parquet, a TensorBoard or an offline W&B directory"
            raise InputError(f"{path}: holds no recording", hint=f"give {kinds}")
        for each, reader in claimed:
            found.setdefault(each, (reader, each == path))
    names = _names(list(found))
    return [Source(p, reader, names[p], named) for p, (reader, named) in found.items()]


def _walk(path: Path, known: dict[str, Reader]) -> Iterator[tuple[Path, str]]:
    name = next((name for name, reader in known.items() if reader.claims(path)), None)
    if name is not None:
        yield path, name
    if not path.is_dir() or (name is not None and not getattr(known[name], "NESTED", False)):
        return
    for child in sorted(path.iterdir()):
        # A link is a second name: W&B's `latest-run` is one of its neighbours.
        if child.name == LABELS or child.is_symlink() or child.name.startswith("."):
            continue
        if child.is_dir() or name is None:
            yield from _walk(child, known)


def _names(paths: Iterable[Path]) -> dict[Path, str]:
    whole = {path: path.absolute() for path in paths}
    roots = {path: next(filter(_is_root, full.parents), None) for path, full in whole.items()}
    alone = [str(whole[path].parent) for path, root in roots.items() if root is None]
    common = Path(os.path.commonpath(alone)) if alone else Path()
    return {
        path: _stem(full.relative_to(roots[path] or common).as_posix(), full.is_dir())
        for path, full in whole.items()
    }


def _is_root(folder: Path) -> bool:
    try:
        return (folder / LABELS).is_file()
    except OSError:  # unreadable: not ours
        return False


def _stem(name: str, is_folder: bool) -> str:
    if is_folder:
        return name
    for suffix in (".gz", ".csv", ".parquet", ".wandb"):
        name = name.removesuffix(suffix)
    return name
