"""Is what a run keeps beside its audit log what that log says of it?

The log holds digests: of the policy that judged, of each evidence bundle, and of the journal as it
was when a supervisor took the run over and when the run ended. They are compared here. What the log
has no digest of cannot be checked, and that is said too.
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
from .run_directory import RunDir

GOOD, CHANGED, MISSING, UNSEEN = "good", "changed", "missing", "unseen"
MANIFEST = "manifest.json"
BLIND = (
    "records that were cut off the end of the log (compare --witness with a message)",
    "a log that was written anew as a whole (likewise)",
    "the job itself: its checkpoints, its output, its data",
    "state.json, checkpoints.json and quarantine.json, which are no evidence",
)

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """What was found of one part of a run.

    Attributes:
        part: `policy`, `evidence` or `journal`.
        status: `good`, `changed`, `missing`, or `unseen`: the log cannot tell.
    """

    part: str
    status: str
    text: str


class Digests:
    """What an audit log says of the files beside it; feed it with the records, in order."""

    def __init__(self) -> None:
        self.policy: str | None = None
        self.reloaded: dict[str, None] = {}
        self.bundles: dict[str, str] = {}  # path -> digest of its manifest
        self.heads: list[tuple[int, int, str, int]] = []  # events, bytes, digest, record
        self.over = False  # the run has ended, and its journal was whole until then

    def take(self, record: Record) -> None:
        """Take the next record."""
        kind, data = record["kind"], record.get("data") or {}
        self.over = kind == "run_end"
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
        if record["actor"] == "app" and isinstance(head, dict):
            events, size, digest = head.get("events"), head.get("bytes"), head.get("sha256")
            if isinstance(events, int) and isinstance(size, int) and isinstance(digest, str):
                self.heads.append((events, size, digest, record["seq"]))


def check(run: RunDir, digests: Digests) -> Iterator[Part]:
    """Compare the files of a run with the digests; never raises StoreError."""
    yield from policy_parts(run, digests)
    yield from _bundles(run, digests.bundles)
    try:
        yield _journal(run, digests)
    except StoreError as error:
        yield Part("journal", CHANGED, str(error))


def digest_of(path: Path) -> str | None:
    """Return "sha256:..." of a policy's file, None where it cannot be read."""
    found = _sha256(path)
    return None if found is None else f"sha256:{found}"


def differs(what: str, expected: str, actual: str | None) -> str:
    """Return the sentence about a file that is not the one of the log."""
    if actual is None:
        return f"{what} is missing, or cannot be read: expected {expected}"
    return f"{what} was changed: expected {expected}, actual {actual}"


def policy_parts(run: RunDir, digests: Digests) -> Iterator[Part]:
    """Compare the policies that judged the run with their digests."""
    first = digests.policy or _described(run)
    if first is None:
        yield Part("policy", UNSEEN, "the log holds no digest of policy.yaml")
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
        count = f", {len(digests.reloaded)} of reloads" if digests.reloaded else ""
        yield Part("policy", GOOD, f"policy.yaml is the one that judged the run{count}")


def _described(run: RunDir) -> str | None:
    """Return the digest in run.json, for a log of an older version."""
    try:
        return _text(run.read_json("run.json").get("policy_digest"))
    except (StoreError, AttributeError):
        return None


def _bundles(run: RunDir, bundles: Mapping[str, str]) -> Iterator[Part]:
    wrong = 0
    for path, expected in bundles.items():
        text = _bundle(run.path, path, expected)
        if text is not None:
            wrong += 1
            yield Part("evidence", CHANGED, text)
    if bundles and not wrong:
        yield Part("evidence", GOOD, f"{len(bundles)} bundles are as they were sealed")
    elif not bundles:
        yield Part("evidence", UNSEEN, "the log tells of no bundle")


def _bundle(home: Path, path: str, expected: str) -> str | None:
    """Return what is wrong with a bundle, None when it is as it was sealed."""
    if ".." in Path(path).parts:
        return f"{path} is no place of a bundle"
    manifest = home / path / MANIFEST
    actual = _sha256(manifest)
    if actual != expected:
        return differs(f"{path}/{MANIFEST}", expected, actual)
    try:
        listed = [(str(f["name"]), str(f["sha256"])) for f in files.read_json(manifest)["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path}/{MANIFEST} cannot be understood: {error}"
    for name, digest in listed:
        if Path(name).name != name:
            return f"{path}/{MANIFEST} names {name!r}, which is no file of the bundle"
        actual = _sha256(manifest.with_name(name))
        if actual != digest:
            return differs(f"{path}/{name}", digest, actual)
    return None


def _journal(run: RunDir, digests: Digests) -> Part:
    found = journal.heads(run.journal_path, [size for _, size, _, _ in digests.heads])
    for events, size, expected, record in digests.heads:
        what = f"the journal up to event {events} (byte {size}, record {record})"
        if size not in found:
            return Part("journal", CHANGED, f"{what} is not all there any more")
        if found[size] != expected:
            return Part("journal", CHANGED, differs(what, expected, found[size]))
    there = journal.count(run.journal_path)
    if not digests.heads:
        return Part(
            "journal", UNSEEN, "every record has a good checksum; the log holds no digest of it yet"
        )
    events, size, _, record = digests.heads[-1]
    if not digests.over:
        return Part(
            "journal",
            GOOD,
            f"its first {events} events are those of record {record}; "
            "later ones have good checksums, and no digest in the log yet",
        )
    if there > events:  # part of an event that found no room is none
        return Part(
            "journal",
            CHANGED,
            f"something stands behind its last event, {events - 1} (byte {size}, record {record})",
        )
    return Part("journal", GOOD, f"its {events} events are those that were judged")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _sha256(path: Path) -> str | None:
    try:
        with os.fdopen(files.open_file(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def taken(records: Iterable[Record]) -> Digests:
    """Return what these records say of the files beside them."""
    found = Digests()
    for record in records:
        found.take(record)
    return found
