"""Quarantine: the next generation goes to disk first, then every rank is told to read it.

For any thread but the main loop's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ...errors import ActionError, StoreError


class Manifest(Protocol):
    """What this needs of the manifest in the run directory."""

    @property
    def path(self) -> Path: ...
    def change(self, change: Mapping[str, Any], *, key: str, live: bool) -> dict[str, Any]: ...


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

    With one rank it takes effect at the next step boundary. With several it waits for the next
    launch: ranks that pass over different numbers of batches would wait for each other for ever.
    """
    job.raise_if_withdrawn()
    if manifest is None:
        raise ActionError("this run keeps no quarantine")
    live = job.world_size == 1
    try:
        written = manifest.change(args, key=key, live=live)
    except StoreError as error:
        raise ActionError(str(error), hint=error.hint) from error
    told = {"generation": written["generation"], "path": str(manifest.path)}
    seen = job.command("quarantine", told, key=key, deadline_s=deadline_s)
    return {
        **seen,
        "generation": written["generation"],
        "entries": len(written["entries"]),
        "takes_effect": "now" if live else "at the next launch",
    }
