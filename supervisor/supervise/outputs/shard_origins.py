"""The data shards of the steps before an incident, for its evidence. Pure functions.

The probe's record of the newest batches is the best source. For a rank that does not answer, the
shard numbers in its frames and the names in its last status are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ..core.model.events import Frame

BEFORE = 5  # steps before the first breach: the cause may be a slightly earlier batch
NAMED = 12  # shards in the summary

Frames = Iterable[tuple[Sequence[str], Frame]]
Row = dict[str, Any]


class Onset(Protocol):
    """The part of an incident that is needed."""

    @property
    def id(self) -> str: ...
    @property
    def breach_step(self) -> int: ...


def trace(
    tapes: Mapping[int, Any],
    ranks: Mapping[int, Mapping[str, Any]],
    window: Frames,
    breach_step: int | None,
) -> dict[str, Any] | None:
    """Return the shards of the steps from `BEFORE` before the first breach to it; None if unknown.

    Args:
        tapes: the probe's record of the newest batches, by rank.
        ranks: the view of each rank, with its `status`.
        window: the newest frames with their names.
        breach_step: None takes the newest steps instead.

    Returns:
        `breach_step`, `steps` (rank, attempt, step, fingerprint, shards with their offsets) and
        `shards`: name -> its steps, as text.
    """
    rows = [
        {"rank": rank, "attempt": int(batch.get("attempt", 0)), **batch}
        for rank, tape in tapes.items()
        for batch in (tape if isinstance(tape, list) else ())
        if isinstance(batch, dict) and isinstance(batch.get("step"), int) and batch.get("shards")
    ]
    recorded = {row["rank"] for row in rows}
    rows += [row for row in _of_frames(window, ranks) if row["rank"] not in recorded]
    if not rows:
        return None
    last = max(row["step"] for row in rows) if breach_step is None else breach_step
    rows = [row for row in rows if last - BEFORE <= row["step"] <= last]
    rows.sort(key=lambda row: (row["attempt"], row["step"], row["rank"]))
    return {"breach_step": breach_step, "steps": rows, "shards": _summary(rows)}


def _of_frames(window: Frames, ranks: Mapping[int, Mapping[str, Any]]) -> Iterable[Row]:
    for names, frame in window:
        values = dict(zip(names, frame.values, strict=False))
        number = values.get("batch_shard")
        if number is None:
            continue
        known = (ranks.get(frame.rank, {}).get("status") or {}).get("shards") or {}
        shard = "several shards" if number < 0 else f"shard number {number:.0f}"
        yield {
            "rank": frame.rank,
            "attempt": frame.attempt,
            "step": frame.step,
            "fingerprint": values.get("batch_fingerprint"),
            "shards": [
                {
                    "shard": str(known.get(f"{number:.0f}", shard)),
                    "offset": values.get("batch_offset"),
                }
            ],
        }


def _summary(rows: Sequence[Row]) -> dict[str, str]:
    """Return the steps of each shard; shards of the newest step come first."""
    steps: dict[str, dict[int, set[int]]] = {}
    for row in reversed(rows):
        for origin in row["shards"]:
            by_attempt = steps.setdefault(str(origin["shard"]), {})
            by_attempt.setdefault(row["attempt"], set()).add(row["step"])
    summary = {
        shard: ", ".join(_span(attempt, found) for attempt, found in sorted(by_attempt.items()))
        for shard, by_attempt in list(steps.items())[:NAMED]
    }
    if len(steps) > NAMED:
        summary["more"] = f"{len(steps) - NAMED} shards"
    return summary


def _span(attempt: int, steps: set[int]) -> str:
    first, last = min(steps), max(steps)
    text = f"step {first}" if first == last else f"steps {first} to {last}"
    return text + (f" of attempt {attempt}" if attempt else "")
