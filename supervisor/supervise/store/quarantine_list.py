"""The quarantine of a run: what the job must not train on again, in numbered generations.

`<run>/quarantine.json` holds the newest generation, written whole and through a power cut. It
outlives the process that it was written for: every launch of the run reads it again, and workers of
a loader read it too. What was released is gone from it; `changes` says what came and went.

An entry is in force in processes launched as an attempt from `from_attempt` up to, and without,
`until_attempt`. So one that may not take effect in the middle of an epoch, since the ranks would
part, waits for the next launch, and all processes of a launch agree without a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import StoreError
from . import files

CHANGES = 64  # newest ones that are kept; a repeated key is older in no retry

WRITTEN = 'by hand: {"entries": [{"kind": "shard", "name": "a.tar"}]}'
# Of an entry that a person wrote.
UNTOLD = {
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
    """The manifest at `path`; one supervisor writes it, any number of probes read it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Document:
        """Return `{"generation", "entries", "changes"}`; generation 0 where there is no file.

        One that a person wrote needs only the `kind` and `name` of each entry: such an entry is in
        force in every process. The probe reads it in the same way.

        Raises:
            StoreError: it cannot be read, or is no manifest.
        """
        try:
            found = files.read_json(self.path)
        except FileNotFoundError:
            return {"generation": 0, "entries": [], "changes": []}
        except (OSError, ValueError) as error:
            raise StoreError(
                f"cannot read {self.path}: {error}",
                hint="the quarantine is as it was when the job was last launched",
            ) from error
        try:
            entries = [_whole(entry) for entry in found["entries"]]
            changes = [dict(change) for change in found.get("changes", ())]
            generation = int(found.get("generation", 0))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StoreError(f"{self.path} is no quarantine: {error}", hint=WRITTEN) from error
        return {"generation": generation, "entries": entries, "changes": changes}

    def change(self, change: Mapping[str, Any], *, key: str, live: bool) -> Document:
        """Write the next generation and return it; the same `key` again changes nothing.

        Args:
            change: either `add`, a list of `{"kind": "shard" | "batch", "name"}`, with `most`, the
                number of shards that may be in quarantine at once (None: any); or `release`, a
                list of names, or `{"incident"}` for all that it brought in. And for the record
                `step`, `attempt`, `incident`, `by` and `why`.
            live: takes effect in processes that run now, not first in the next launch.

        Raises:
            StoreError: it would change nothing, or too much; or it cannot be written.
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
        following = 0 if live else facts["attempt"] + 1  # first attempt that it counts in
        entries = {(entry["kind"], entry["name"]): entry for entry in before["entries"]}
        if "add" in change:
            told = {"added": _add(entries, change["add"], facts, following)}
            _bound(entries.values(), change.get("most"))
        else:
            told = {"released": _release(entries, change["release"], following)}
        if not any(told.values()):
            return before
        generation = before["generation"] + 1
        after = {
            "generation": generation,
            "entries": list(entries.values()),
            "changes": [
                *before["changes"][1 - CHANGES :],
                {"generation": generation, "key": key, **told, **facts},
            ],
        }
        text = json.dumps(after, indent=1) + "\n"
        try:
            files.replace(self.path, text.encode(), durable=True)
        except OSError as error:
            raise StoreError(f"cannot write {self.path}: {error.strerror}") from error
        return after


def _whole(entry: Mapping[str, Any]) -> Document:
    """Return an entry with all of its keys. Raises what is told of as no manifest."""
    whole = {**UNTOLD, **entry, "name": _name(entry["kind"], entry["name"])}
    until = whole["until_attempt"]
    whole["from_attempt"] = int(whole["from_attempt"])
    whole["until_attempt"] = None if until is None else int(until)
    return whole


def _name(kind: Any, name: Any) -> str:
    """Return the name of an entry as the job would tell it: a shard may be known by a number."""
    if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
        raise ValueError(f"{name!r} is no name")
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
    """Put what is asked for into `entries`; return the names of what was not there."""
    wanted = [(str(each["kind"]), str(each["name"])) for each in asked]
    new = [each for each in wanted if not _stays(entries.get(each))]
    if not new:
        names = ", ".join(name for _, name in wanted) or "nothing"
        raise StoreError(f"nothing to add to the quarantine: {names} is in it already")
    for kind, name in new:
        waits = entries.get((kind, name), {"from_attempt": following})  # released, and not yet gone
        span = {"from_attempt": min(following, waits["from_attempt"]), "until_attempt": None}
        entries[kind, name] = {"kind": kind, "name": name, **facts, **span}
    return [name for _, name in new]


def _release(
    entries: dict[tuple[str, str], Document],
    asked: Sequence[str] | Mapping[str, Any],
    following: int,
) -> list[str]:
    """Take what is asked for out of `entries`; return its names."""
    if isinstance(asked, Mapping):
        brought = asked["incident"]
        found = [at for at, e in entries.items() if e["incident"] == brought and _stays(e)]
    else:
        found = [at for at, e in entries.items() if e["name"] in asked and _stays(e)]
        missing = [name for name in asked if name not in {name for _, name in found}]
        if missing or not found:
            names = ", ".join(missing) or "nothing"
            raise StoreError(
                f"nothing to release: {names} is not in the quarantine",
                hint=f"it holds {', '.join(sorted(name for _, name in entries)) or 'nothing'}",
            )
    for at in found:
        if following <= entries[at]["from_attempt"]:  # at once, or it never came into force
            del entries[at]
        else:
            entries[at] = {**entries[at], "until_attempt": following}
    return [name for _, name in found]


def _stays(entry: Mapping[str, Any] | None) -> bool:
    """Whether an entry is there and nobody released it."""
    return entry is not None and entry["until_attempt"] is None


def _bound(entries: Iterable[Mapping[str, Any]], most: int | None) -> None:
    shards = sum(entry["kind"] == "shard" and _stays(entry) for entry in entries)
    if most is not None and shards > most:
        raise StoreError(
            f"{shards} shards would be in quarantine, and at most {most} may",
            hint="a larger max_fraction allows more; so many bad shards are rarely the data",
        )
