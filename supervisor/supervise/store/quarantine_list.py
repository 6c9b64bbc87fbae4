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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import StoreError
from . import files

CHANGES = 64  # newest ones kept, more than a retry can go back

WRITTEN = 'by hand: {"entries": [{"kind": "shard", "name": "a.tar"}]}'
# Defaults of an entry written by hand.
DEFAULTS = {
    "step": -1,
    "attempt": 0,
    "incident": None,
    "by": "a person",
    "why": "",
    "from_attempt": 0,
    "until_attempt": None,
}

Document = dict[str, Any]


class Quarantine:
    """The file at `path`; one supervisor writes it, any number of probes read it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Document:
        """Return `{"generation", "entries", "changes"}`; generation 0 without a file.

        An entry written by hand needs only `kind` and `name`, and applies to every process. The
        probe reads the file in the same way.

        Raises:
            StoreError: it cannot be read, or is invalid.
        """
        try:
            found = files.read_json(self.path)
        except FileNotFoundError:
            return {"generation": 0, "entries": [], "changes": []}
        except (OSError, ValueError) as error:
            raise StoreError(
                f"cannot read {self.path}: {error}",
                hint="the job keeps the quarantine of its last launch",
            ) from error
        try:
            entries = [_complete(entry) for entry in found["entries"]]
            changes = [dict(change) for change in found.get("changes", ())]
            generation = int(found.get("generation", 0))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StoreError(f"{self.path} is not a quarantine: {error}", hint=WRITTEN) from error
        return {"generation": generation, "entries": entries, "changes": changes}

    def change(self, change: Mapping[str, Any], *, key: str, live: bool) -> Document:
        """Write the next generation and return it; a repeated `key` changes nothing.

        Args:
            change: either `add`, a list of `{"kind": "shard" | "batch", "name"}`, with `most`, the
                limit of shards in quarantine (None: no limit); or `release`, a list of names, or
                `{"incident"}` for all entries of that incident. For the record also `step`,
                `attempt`, `incident`, `by` and `why`.
            live: applies to running processes, not only from the next launch on.

        Raises:
            StoreError: it changes nothing, exceeds the limit, or cannot be written.
        """
        before = self.read()
        if any(done.get("key") == key for done in before["changes"]):
            return before
        facts: Document = {
            "step": int(change.get("step", -1)),
            "attempt": int(change.get("attempt", 0)),
            "incident": change.get("incident"),
            "by": str(change.get("by", "policy")),
            "why": str(change.get("why", "")),
        }
        following = 0 if live else facts["attempt"] + 1  # first attempt it applies to
        entries = {(entry["kind"], entry["name"]): entry for entry in before["entries"]}
        if "add" in change:
            changed = {"added": _add(entries, change["add"], facts, following)}
            _bound(entries.values(), change.get("most"))
        else:
            changed = {"released": _release(entries, change["release"], following)}
        if not any(changed.values()):
            return before
        made = {"generation": 0, "key": key, **changed, **facts}
        return self._write(before, list(entries.values()), made)

    def hasten(self, key: str) -> Document:
        """Let what waits for the next launch apply to running processes, too; write and return it.

        Args:
            key: of the change that they have taken up, with all before it.

        Raises:
            StoreError: it cannot be written.
        """
        before = self.read()
        change = next((c for c in before["changes"] if c.get("key") == key), None)
        again = f"{key}/now"
        if change is None or any(c.get("key") == again for c in before["changes"]):
            return before
        entries = [{**each, "from_attempt": 0} for each in before["entries"] if _is_active(each)]
        return self._write(before, entries, {**change, "key": again})

    def _write(self, before: Document, entries: list[Document], change: Document) -> Document:
        """Write the generation that follows `before`."""
        generation = before["generation"] + 1
        changes = [*before["changes"][1 - CHANGES :], {**change, "generation": generation}]
        after = {"generation": generation, "entries": entries, "changes": changes}
        text = json.dumps(after, indent=1) + "\n"
        try:
            files.replace(self.path, text.encode(), durable=True)
        except OSError as error:
            raise StoreError(f"cannot write {self.path}: {error.strerror}") from error
        return after


def _complete(entry: Mapping[str, Any]) -> Document:
    """Return an entry with all of its keys. Raises ValueError, KeyError, TypeError."""
    full = {**DEFAULTS, **entry, "name": _name(entry["kind"], entry["name"])}
    until = full["until_attempt"]
    full["from_attempt"] = int(full["from_attempt"])
    full["until_attempt"] = None if until is None else int(until)
    return full


def _name(kind: Any, name: Any) -> str:
    """Return the name of an entry as the job reports it: a shard may have a number."""
    if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
        raise ValueError(f"{name!r} is not a name")
    if kind == "batch":
        return str(int(name))
    if kind != "shard":
        raise ValueError(f"kind {kind!r} is neither shard nor batch")
    return name if isinstance(name, str) else f"shard {name}"


def _add(
    entries: dict[tuple[str, str], Document],
    asked: Iterable[Mapping[str, Any]],
    facts: Mapping[str, Any],
    following: int,
) -> list[str]:
    """Add the requested entries; return the names of the new ones."""
    wanted = [(str(entry["kind"]), str(entry["name"])) for entry in asked]
    new = [key for key in wanted if not _is_active(entries.get(key))]
    if not new:
        names = ", ".join(name for _, name in wanted) or "nothing"
        raise StoreError(f"nothing to add to the quarantine: {names} is in it already")
    for kind, name in new:
        waits = entries.get((kind, name), {"from_attempt": following})  # not released yet
        span = {"from_attempt": min(following, waits["from_attempt"]), "until_attempt": None}
        entries[kind, name] = {"kind": kind, "name": name, **facts, **span}
    return [name for _, name in new]


def _release(
    entries: dict[tuple[str, str], Document],
    asked: Sequence[str] | Mapping[str, Any],
    following: int,
) -> list[str]:
    """Release the requested entries; return their names."""
    if isinstance(asked, Mapping):
        incident = asked["incident"]
        found = [at for at, e in entries.items() if e["incident"] == incident and _is_active(e)]
    else:
        found = [at for at, e in entries.items() if e["name"] in asked and _is_active(e)]
        missing = [name for name in asked if name not in {name for _, name in found}]
        if missing or not found:
            names = ", ".join(missing) or "nothing"
            raise StoreError(
                f"nothing to release: {names} is not in the quarantine",
                hint=f"it holds {', '.join(sorted(name for _, name in entries)) or 'nothing'}",
            )
    for at in found:
        if following <= entries[at]["from_attempt"]:  # at once, or it never applied
            del entries[at]
        else:
            entries[at] = {**entries[at], "until_attempt": following}
    return [name for _, name in found]


def _is_active(entry: Mapping[str, Any] | None) -> bool:
    """Whether an entry exists and is not released."""
    return entry is not None and entry["until_attempt"] is None


def _bound(entries: Iterable[Mapping[str, Any]], most: int | None) -> None:
    shards = sum(entry["kind"] == "shard" and _is_active(entry) for entry in entries)
    if most is not None and shards > most:
        raise StoreError(
            f"{shards} shards would be in quarantine, and the limit is {most}",
            hint="raise max_fraction to allow more; so many bad shards rarely mean bad data",
        )
