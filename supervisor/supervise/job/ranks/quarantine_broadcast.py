"""Quarantine: the next generation goes to disk first, then every rank is told to read it.

For any thread but the main loop's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ...errors import ActionError, StoreError

NOW, LATER = "now", "at the next launch"
WHEN = {
    "asks": NOW,
    "lists": "from the next pass over the data on",
}  # by how a rank leaves shards out
LEAST_S = 5.0  # for a command whose deadline the one before it took


class Manifest(Protocol):
    """What this needs of the manifest in the run directory."""

    @property
    def path(self) -> Path: ...
    def change(self, change: Mapping[str, Any], *, key: str, live: bool) -> dict[str, Any]: ...
    def hasten(self, key: str) -> dict[str, Any]: ...


class Ranks(Protocol):
    """What this needs of the job."""

    @property
    def world_size(self) -> int: ...
    def raise_if_withdrawn(self) -> None: ...
    def command(
        self, verb: str, args: Mapping[str, Any], *, key: str, deadline_s: float
    ) -> dict[str, Any]: ...


def quarantine(
    job: Ranks,
    manifest: Manifest | None,
    args: Mapping[str, Any],
    key: str,
    deadline_s: float,
) -> dict[str, Any]:
    """Carry out `core.model.action.Job.quarantine`.

    With one rank it takes effect at the next step boundary. With several it is kept for the next
    launch, and takes effect before that where all ranks can take it up at the end of one step:
    ranks that pass over different numbers of batches would wait for each other for ever.
    """
    job.raise_if_withdrawn()
    if manifest is None:
        raise ActionError("this run keeps no quarantine")
    until = time.monotonic() + deadline_s
    live = job.world_size == 1
    try:
        written = manifest.change(args, key=key, live=live)
    except StoreError as error:
        raise ActionError(str(error), hint=error.hint) from error
    seen = job.command("quarantine", _order(manifest, written), key=key, deadline_s=deadline_s)
    more = {"takes_effect": NOW} if live else _at_one_step(job, manifest, written, key, until)
    return {
        **seen,
        "generation": written["generation"],
        "entries": len(written["entries"]),
        **more,
    }


def _order(manifest: Manifest, written: Mapping[str, Any]) -> dict[str, Any]:
    return {"generation": written["generation"], "path": str(manifest.path)}


def _at_one_step(
    job: Ranks, manifest: Manifest, written: Mapping[str, Any], key: str, until: float
) -> dict[str, Any]:
    """Let all ranks take it up at one step; where one cannot, it stays with the next launch.

    The file says so when they have: of a supervisor that dies before, the next one goes on here.

    Args:
        until: CLOCK_MONOTONIC in seconds.
    """
    left_s = max(LEAST_S, until - time.monotonic())
    try:
        order = _order(manifest, written)
        seen = job.command("quarantine_now", order, key=f"{key}/now", deadline_s=left_s)
    except ActionError as error:
        if not error.refused:
            raise
        return {"takes_effect": LATER, "why": str(error)}
    try:
        kept = manifest.hasten(key)
    except StoreError as error:
        raise ActionError(str(error), hint=error.hint) from error
    left_s = max(LEAST_S, until - time.monotonic())
    held = job.command("quarantine", _order(manifest, kept), key=f"{key}/kept", deadline_s=left_s)
    return {**held, "generation": kept["generation"], "takes_effect": WHEN[seen["way"]]}
