"""A cache of the parts of a policy that launching a job needs.

Loading a policy takes a third of a second, most of it for imports. The cache key is a digest of all
that the result depends on: the file, its bases, the packs and runbooks beside them, the shipped
ones, this program and the mode. A policy with warnings is not kept: they name files as seen from
the working directory. A damaged, foreign or unwritable cache file is a miss, never an error.
Concurrent writers write the same content; each file is replaced atomically.

    $XDG_CACHE_HOME/supervise/policies/<digest>.json = <sha256 of the rest> LF <json>
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__
from ..catalog import shipped
from ..core.model.policy import JobSettings, Policy, Safeguards, Sampling, Savepoints
from ..errors import InputError
from ..store import files

KEEP = 32  # files; project default
MAX_BYTES = 4 << 20  # of a cache file
MAX_FILES = 500  # beside a policy; a larger folder is not a policy folder
PARTS = ("packs", "runbooks")  # folders beside a policy


class LaunchPart(msgspec.Struct, frozen=True):
    """What a launch reads of a policy; all of it is loaded once the job runs."""

    name: str
    digest: str
    mode: str
    savepoints: Savepoints | None
    sampling: Sampling
    safeguards: Safeguards
    notify: dict[str, dict[str, Any]]
    job: JobSettings
    resolved: str


Load = Callable[[list[str]], Policy]  # appends its warnings to what it is given


def launch_policy(path: str | Path, options: object, load: Load, warnings: list[str]) -> Policy:
    """Return the policy, or the part that a launch needs, without rules.

    Args:
        path: a file, or the name of a shipped policy, as `load_policy` takes it.
        options: what `load` adds to it, such as the mode; their `repr` tells them apart.
        load: called on a cache miss.
        warnings: the policy's warnings are appended here.

    Raises:
        SuperviseError: as `load`.
    """
    cache_path = _cache_path(path, options)
    found = None if cache_path is None else _read(cache_path)
    if found is not None:
        return found
    new: list[str] = []
    policy = load(new)
    warnings += new
    if cache_path is not None and not new:
        with suppress(OSError, ValueError, TypeError):
            _write(cache_path, policy)
    return policy


def _cache_path(name: str | Path, options: object) -> Path | None:
    """Return the cache file of this policy, None if it cannot be cached."""
    try:
        path = shipped.locate(name)
        digest = hashlib.sha256()
        digest.update(repr((__version__, sys.version, str(path.absolute()), options)).encode())
        for line in _fingerprint(path.absolute()):
            digest.update(line)
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "supervise" / "policies" / f"{digest.hexdigest()}.json"
    except (OSError, RuntimeError, ValueError, InputError):
        return None


def _fingerprint(path: Path) -> Iterator[bytes]:
    """Yield what a policy depends on: contents of its files, size and time of shipped ones."""
    for each in shipped.chain(path):
        yield each.read_bytes()
        for part in PARTS:
            parts = sorted((each.parent / part).glob("*.yaml"))
            if len(parts) > MAX_FILES:
                raise ValueError("too many files")
            for file in parts:
                yield file.name.encode() + b"\0" + file.read_bytes()
    ours = [shipped.folder(kind) for kind in ("policies", "policies/packs", "runbooks")]
    probe = shipped.PACKAGE.parents[1] / "probes" / "supervise_probe"
    probe = probe if probe.is_dir() else shipped.PACKAGE.parent / "supervise_probe"
    code = [
        *(folder for folder in (shipped.PACKAGE / "catalog").iterdir() if folder.is_dir()),
        *(shipped.PACKAGE / name for name in ("catalog", "core/model", "detectors", "actions")),
        shipped.PACKAGE / "notifiers",
        *(probe / name for name in ("", "collectors", "faults")),
    ]
    for folder in (*ours, *code):
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.endswith((".yaml", ".py")):
                    stat = entry.stat()
                    yield f"{entry.path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode()


def _read(cache_path: Path) -> Policy | None:
    try:
        digest, _, body = files.read(cache_path, limit=MAX_BYTES).partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        part = msgspec.json.decode(body, type=LaunchPart, dec_hook=lambda _, value: value)
        return Policy(detectors={}, rules=(), **msgspec.structs.asdict(part))
    except (OSError, ValueError):
        return None


def _write(cache_path: Path, policy: Policy) -> None:
    part = LaunchPart(*(getattr(policy, name) for name in LaunchPart.__struct_fields__))
    body = msgspec.json.encode(part)
    files.make_directory(cache_path.parent)
    digest = hashlib.sha256(body).hexdigest().encode()
    files.replace(cache_path, digest + b"\n" + body, durable=False)
    with os.scandir(cache_path.parent) as entries:
        newest = sorted(entries, key=lambda entry: entry.stat().st_mtime_ns, reverse=True)
    for entry in newest[KEEP:]:
        with suppress(OSError):
            Path(entry.path).unlink()
