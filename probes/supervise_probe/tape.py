"""What is kept of the newest batches, for the evidence of an incident."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Mapping

if TYPE_CHECKING:
    from .probe import Probe


def remember(probe: Probe, step: int, attempt: int, values: Mapping[str, float]) -> None:
    """Keep the fingerprint of a step's batch, and its shards; all values are on the host."""
    if "batch_fingerprint" not in values and "batch_shard" not in values:
        return
    fingerprint = values.get("batch_fingerprint")
    seen: Dict[str, Any] = {"step": step, "attempt": attempt, "fingerprint": fingerprint}
    probe.fingerprints.append(seen)
    if "batch_shard" in values:
        part = probe.guard.part("shards")
        probe.guard.run(part, probe.collectors["shards"].join, seen)
