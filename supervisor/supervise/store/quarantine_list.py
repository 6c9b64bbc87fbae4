"""The quarantine of a run: data that the job must not train on again, in numbered generations.

`<run>/quarantine.json` has the newest generation, written atomically and durably. Every launch of
the run reads it, and so do the workers of a data loader. Released entries are removed from it;
`changes` lists all additions and releases.

An entry applies to processes launched as an attempt from `from_attempt` up to, but not including,
`until_attempt`. A change in the middle of an epoch could make ranks diverge: it waits for the next
launch, and all processes of a launch agree without communication.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from ..core.model.payload import Payload
from ..errors import StoreError
from . import files

CHANGES = 64  # newest ones that are retained, more than a retry can go back

WRITTEN = 'by hand: {"entries": [{"kind": "shard", "name": "a.tar"}]}'


class QuarantineEntry(Struct, frozen=True, kw_only=True):
    """One shard or batch; one written by hand needs only `kind` and `name`."""

    kind: str
    name: str | int
    step: int = -1
    attempt: int = 0
    incident: str | None = None
    by: str = "a person"
    why: str = ""
    from_attempt: int = 0
    until_attempt: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("shard", "batch"):
            raise ValueError(f"kind {self.kind!r} is neither shard nor batch")
        if self.name == "" or (self.kind == "batch" and not str(self.name).isdecimal()):
            raise ValueError(f"{self.name!r} is not a name")

    @property
    def is_active(self) -> bool:
        """Whether it is not released."""
        return self.until_attempt is None

    def normalized(self) -> QuarantineEntry:
        """Return it with the name as the job reports it: a shard may have a number."""
        is_number = self.kind == "shard" and isinstance(self.name, int)
        return replace(self, name=f"shard {self.name}" if is_number else str(self.name))


class QuarantineChange(Struct, frozen=True, kw_only=True):
    """One generation in the list of changes: the names that were added or released."""

    generation: int = 0
    key: str = ""
    added: list[str] | UnsetType = UNSET
    released: list[str] | UnsetType = UNSET
    step: int = -1
    attempt: int = 0
    incident: str | None = None
    by: str = "policy"
    why: str = ""


class QuarantineGeneration(Struct, frozen=True, kw_only=True):
    """The content of the file; generation 0 without a file."""

    generation: int = 0
    entries: list[QuarantineEntry]
    changes: list[QuarantineChange] = []

    def names(self) -> list[str]:
        """Return the names of the entries that are not released."""
        return [str(entry.name) for entry in self.entries if entry.is_active]


class NamedData(Struct, frozen=True):
    """A shard or a batch by its name."""

    kind: str
    name: str


class IncidentEntries(Struct, frozen=True):
    """All entries of an incident."""

    incident: str | None


class QuarantineRequest(Struct, frozen=True, kw_only=True):
    """A requested change: either `add` or `release`; the other fields are for the record.

    Attributes:
        most: limit of shards in quarantine, None for no limit.
        release: names, or all entries of an incident.
    """

    add: list[NamedData] | UnsetType = UNSET
    most: int | None = None
    release: list[str] | IncidentEntries | UnsetType = UNSET
    step: int = -1
    attempt: int = 0
    incident: str | None = None
    by: str = "policy"
    why: str = ""


Entries = dict[tuple[str, str], QuarantineEntry]


class Quarantine:
    """The file at `path`; one supervisor writes it, any number of probes read it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> QuarantineGeneration:
        """Return the newest generation. The probe reads the file in the same way.

        Raises:
            StoreError: it cannot be read, or is invalid.
        """
        try:
            document = files.read_json(self.path)
        except FileNotFoundError:
            return QuarantineGeneration(entries=[])
        except (OSError, ValueError) as error:
            raise StoreError(
                f"cannot read {self.path}: {error}",
                hint="the job keeps the quarantine of its last launch",
            ) from error
        try:
            generation = msgspec.convert(document, QuarantineGeneration)
            entries = [entry.normalized() for entry in generation.entries]
        except ValueError as error:
            raise StoreError(f"{self.path} is not a quarantine: {error}", hint=WRITTEN) from error
        return replace(generation, entries=entries)

    def change(self, request: Payload, *, key: str, live: bool) -> QuarantineGeneration:
        """Write the next generation and return it; a repeated `key` changes nothing.

        Args:
            request: the fields of a `QuarantineRequest`.
            live: applies to running processes, not only from the next launch on.

        Raises:
            StoreError: it changes nothing, exceeds the limit, or cannot be written.
        """
        current = self.read()
        if any(change.key == key for change in current.changes):
            return current
        order = msgspec.convert(dict(request), QuarantineRequest)
        following = 0 if live else order.attempt + 1  # first attempt it applies to
        entries = {(entry.kind, str(entry.name)): entry for entry in current.entries}
        change = QuarantineChange(
            key=key,
            step=order.step,
            attempt=order.attempt,
            incident=order.incident,
            by=order.by,
            why=order.why,
        )
        if order.add is not UNSET:
            change = replace(change, added=_add(entries, order.add, change, following))
            _check_limit(entries.values(), order.most)
        elif order.release is not UNSET:
            change = replace(change, released=_release(entries, order.release, following))
        if not (change.added or change.released):
            return current
        return self._write(current, list(entries.values()), change)

    def hasten(self, key: str) -> QuarantineGeneration:
        """Let what waits for the next launch apply to running processes, too; write and return it.

        Args:
            key: of the change that they have taken up, with all before it.

        Raises:
            StoreError: it cannot be written.
        """
        current = self.read()
        change = next((change for change in current.changes if change.key == key), None)
        hastened_key = f"{key}/now"
        if change is None or any(change.key == hastened_key for change in current.changes):
            return current
        entries = [replace(entry, from_attempt=0) for entry in current.entries if entry.is_active]
        return self._write(current, entries, replace(change, key=hastened_key))

    def _write(
        self,
        current: QuarantineGeneration,
        entries: list[QuarantineEntry],
        change: QuarantineChange,
    ) -> QuarantineGeneration:
        """Write the generation that follows the current one."""
        number = current.generation + 1
        changes = [*current.changes[1 - CHANGES :], replace(change, generation=number)]
        following = QuarantineGeneration(generation=number, entries=entries, changes=changes)
        text = json.dumps(msgspec.to_builtins(following), indent=1) + "\n"
        try:
            files.replace_file(self.path, text.encode(), durable=True)
        except OSError as error:
            raise StoreError(f"cannot write {self.path}: {error.strerror}") from error
        return following


def _add(
    entries: Entries, requested: Sequence[NamedData], change: QuarantineChange, following: int
) -> list[str]:
    """Add the requested entries; return the names of the new ones."""
    new = [
        data
        for data in requested
        if (entry := entries.get((data.kind, data.name))) is None or not entry.is_active
    ]
    if not new:
        names = ", ".join(data.name for data in requested) or "nothing"
        raise StoreError(f"nothing to add to the quarantine: {names} is in it already")
    for data in new:
        released = entries.get((data.kind, data.name))  # and still in force until the next launch
        entries[data.kind, data.name] = QuarantineEntry(
            kind=data.kind,
            name=data.name,
            step=change.step,
            attempt=change.attempt,
            incident=change.incident,
            by=change.by,
            why=change.why,
            from_attempt=min(following, released.from_attempt) if released else following,
        )
    return [data.name for data in new]


def _release(
    entries: Entries, requested: Sequence[str] | IncidentEntries, following: int
) -> list[str]:
    """Release the requested entries; return their names."""
    active = [key for key, entry in entries.items() if entry.is_active]
    if isinstance(requested, IncidentEntries):
        released = [key for key in active if entries[key].incident == requested.incident]
    else:
        released = [key for key in active if key[1] in requested]
        missing = [name for name in requested if name not in {name for _, name in released}]
        if missing or not released:
            names = ", ".join(missing) or "nothing"
            raise StoreError(
                f"nothing to release: {names} is not in the quarantine",
                hint=f"it holds {', '.join(sorted(name for _, name in entries)) or 'nothing'}",
            )
    for key in released:
        if following <= entries[key].from_attempt:  # at once, or it never applied
            del entries[key]
        else:
            entries[key] = replace(entries[key], until_attempt=following)
    return [name for _, name in released]


def _check_limit(entries: Iterable[QuarantineEntry], limit: int | None) -> None:
    shards = sum(entry.kind == "shard" and entry.is_active for entry in entries)
    if limit is not None and shards > limit:
        raise StoreError(
            f"{shards} shards would be in quarantine, and the limit is {limit}",
            hint="raise max_fraction to allow more; so many bad shards rarely mean bad data",
        )
