"""Compares the files of a run with the digests in its audit log.

The log has digests of the policies, of each evidence bundle, and of the journal at each adoption
and at the end of the run. Files without a digest are reported as unchecked.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import StoreError
from . import files, journal, policies
from .recorder import THINNED
from .run_directory import RunDir
from .run_retention import removed

GOOD, CHANGED, MISSING, UNCHECKED = "good", "changed", "missing", "unchecked"
MANIFEST = "manifest.json"
NOT_CHECKED = (
    "records removed from the end of the log (use --witness with the head in a notification)",
    "a log rewritten completely (likewise)",
    "the job's checkpoints, output and data",
    "state.json, checkpoints.json and quarantine.json",
)

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Result for one part of a run.

    Attributes:
        part: `policy`, `evidence` or `journal`.
        status: `good`, `changed`, `missing`, or `unchecked`: the log has no digest of it.
    """

    part: str
    status: str
    text: str


class Digests:
    """The digests in an audit log; `take` its records in order."""

    def __init__(self) -> None:
        self.policy: str | None = None
        self.reloaded: dict[str, None] = {}
        self.bundles: dict[str, str] = {}  # path -> digest of its manifest
        self.heads: list[tuple[int, int, str, int]] = []  # events, bytes, digest, record
        self.pieces: list[tuple[str, int, str]] | None = None  # name, bytes, digest; if thinned
        self.ended = False  # the run has ended with a complete journal

    def take(self, record: Record) -> None:
        """Take the next record."""
        kind, data = record["kind"], record.get("data") or {}
        self.ended = kind == "run_end"
        if kind == "run_start" and self.policy is None:
            self.policy = _text(data.get("policy_digest"))
        elif kind == "policy_load" and (after := _text(data.get("after"))):
            self.reloaded[after] = None
        elif kind == "commit":
            result = data.get("result")
            made = result if isinstance(result, dict) else {}
            path, digest = _text(made.get("path")), _text(made.get("sha256"))
            if path and digest and path.startswith("incidents/"):
                self.bundles[path] = digest
        head = data.get("journal")
        if record["actor"] == "app" and data.get("what") == THINNED:
            self.heads.clear()  # they are of what was there before
            self.pieces = []
        if record["actor"] == "app" and isinstance(head, dict) and "pieces" in head:
            self.pieces = [(str(n), int(size), str(sha)) for n, size, sha in head["pieces"]]
        elif record["actor"] == "app" and isinstance(head, dict):
            events, size, digest = head.get("events"), head.get("bytes"), head.get("sha256")
            if isinstance(events, int) and isinstance(size, int) and isinstance(digest, str):
                self.heads.append((events, size, digest, record["seq"]))


def check(run: RunDir, digests: Digests) -> Iterator[Part]:
    """Compare the files of a run with the digests; never raises StoreError."""
    yield from policy_parts(run, digests)
    gc = "removed by `supervise gc` at"
    unchecked = {part: f"{gc} {wall}" for part, wall in removed(run).items()}
    if "incidents" in unchecked:
        yield Part("evidence", UNCHECKED, unchecked["incidents"])
    else:
        yield from _bundles(run, digests.bundles)
    if "journal" in unchecked:
        yield Part("journal", UNCHECKED, unchecked["journal"])
        return
    try:
        yield _journal(run, digests)
    except StoreError as error:
        yield Part("journal", CHANGED, str(error))


def digest_of(path: Path) -> str | None:
    """Return "sha256:..." of a policy's file, None if unreadable."""
    found = _sha256(path)
    return None if found is None else f"sha256:{found}"


def differs(what: str, expected: str, actual: str | None) -> str:
    """Return a sentence about a file whose digest is not that in the log."""
    if actual is None:
        return f"{what} is missing or unreadable: expected {expected}"
    return f"{what} was changed: expected {expected}, actual {actual}"


def policy_parts(run: RunDir, digests: Digests) -> Iterator[Part]:
    """Compare the policies of the run with their digests."""
    first = digests.policy
    if first is None:
        yield Part("policy", UNCHECKED, "the log has no digest of policy.yaml")
    wanted = [(run.policy_path, first)] if first else []
    wanted += [(policies.path_of(run, digest), digest) for digest in digests.reloaded]
    wrong = 0
    for path, expected in wanted:
        actual = digest_of(path)
        if actual != expected:
            wrong += 1
            name = str(path.relative_to(run.path))
            status = MISSING if actual is None else CHANGED
            yield Part("policy", status, differs(name, expected, actual))
    if wanted and not wrong:
        count = len(digests.reloaded)
        more = f", and so are {count} reloaded policies" if count else ""
        yield Part("policy", GOOD, f"policy.yaml is unchanged{more}")


def _bundles(run: RunDir, bundles: Mapping[str, str]) -> Iterator[Part]:
    wrong = 0
    for path, expected in bundles.items():
        text = _bundle(run.path, path, expected)
        if text is not None:
            wrong += 1
            yield Part("evidence", CHANGED, text)
    if bundles and not wrong:
        yield Part("evidence", GOOD, f"{len(bundles)} bundles are unchanged")
    elif not bundles:
        yield Part("evidence", UNCHECKED, "the log lists no bundle")


def _bundle(home: Path, path: str, expected: str) -> str | None:
    """Return what is wrong with a bundle, None if it is unchanged."""
    if ".." in Path(path).parts:
        return f"{path} is not a path of a bundle"
    manifest = home / path / MANIFEST
    actual = _sha256(manifest)
    if actual != expected:
        return differs(f"{path}/{MANIFEST}", expected, actual)
    try:
        listed = [(str(f["name"]), str(f["sha256"])) for f in files.read_json(manifest)["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path}/{MANIFEST} cannot be parsed: {error}"
    for name, digest in listed:
        if Path(name).name != name:
            return f"{path}/{MANIFEST} lists {name!r}, which is not a file of the bundle"
        actual = _sha256(manifest.with_name(name))
        if actual != digest:
            return differs(f"{path}/{name}", digest, actual)
    return None


def _pieces(run: RunDir, pieces: list[tuple[str, int, str]], *, ended: bool) -> Part:
    """Compare the segments of a thinned journal with their digests."""
    count = journal.count(run.journal_path)
    if not pieces:
        text = "all checksums are valid; it was thinned, and the log has no digest of it yet"
        return Part("journal", UNCHECKED, text)
    for name, size, expected in pieces:
        path = run.journal_path / name
        if Path(name).name != name or not path.is_file():
            return Part("journal", MISSING, f"journal/{name} is missing")
        if ended and path.stat().st_size != size:
            return Part("journal", CHANGED, f"journal/{name} has another size than {size} bytes")
        if ended and (actual := _sha256(path)) != expected:
            return Part("journal", CHANGED, differs(f"journal/{name}", expected, actual))
    cut = journal.thinned(run.journal_path)
    events = sum(end - first for first, end in cut)
    text = f"its {len(pieces)} segments are unchanged; frames of {events} of {count} events"
    return Part("journal", GOOD, f"{text} were removed (journal.max_gb)")


def _journal(run: RunDir, digests: Digests) -> Part:
    if digests.pieces is not None:
        return _pieces(run, digests.pieces, ended=digests.ended)
    found = journal.heads(run.journal_path, [size for _, size, _, _ in digests.heads])
    for events, size, expected, record in digests.heads:
        what = f"the journal up to event {events} (byte {size}, record {record})"
        if size not in found:
            return Part("journal", CHANGED, f"{what} is incomplete")
        if found[size] != expected:
            return Part("journal", CHANGED, differs(what, expected, found[size]))
    count = journal.count(run.journal_path)
    if not digests.heads:
        return Part(
            "journal", UNCHECKED, "all checksums are valid; the log has no digest of it yet"
        )
    events, size, _, record = digests.heads[-1]
    if not digests.ended:
        return Part(
            "journal",
            GOOD,
            f"its first {events} events match record {record}; later ones have valid checksums, "
            "and no digest in the log yet",
        )
    if count > events:  # a partial event on a full disk does not count
        return Part(
            "journal",
            CHANGED,
            f"events were added after the last one, {events - 1} (byte {size}, record {record})",
        )
    return Part("journal", GOOD, f"its {events} events are unchanged")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _sha256(path: Path) -> str | None:
    try:
        with os.fdopen(files.open_file(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def taken(records: Iterable[Record]) -> Digests:
    """Return the digests in these records."""
    found = Digests()
    for record in records:
        found.take(record)
    return found
