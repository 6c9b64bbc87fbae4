"""Which shards the steps before an incident had their data from, for its evidence.

The probe's tape of the newest batches knows it best. Of a rank that does not answer, the numbers in
its frames are left, and the names in its last status. Pure: reads what it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ..core.model.events import Frame

BEFORE = 5  # steps before the first breach: its cause may have been fed a little earlier
NAMED = 12  # shards in the short account

Window = Iterable[tuple[Sequence[str], Frame]]
Row = dict[str, Any]


class Onset(Protocol):
    """What is asked of an incident."""

    @property
    def id(self) -> str: ...
    @property
    def breach_step(self) -> int: ...


def trace(
    tapes: Mapping[int, Any],
    ranks: Mapping[int, Mapping[str, Any]],
    window: Window,
    breach_step: int | None,
) -> dict[str, Any] | None:
    """Return the shards of the steps from 5 before the first breach to it; None where nobody says.

    Args:
        tapes: what the probe of each rank wrote of its newest batches, by rank.
        ranks: what is known of each rank, its `status` among it.
        window: the newest frames with their names.
        breach_step: None takes the newest steps instead.

    Returns:
        `breach_step`, `steps` (rank, attempt, step, fingerprint, shards with their offsets) and
        `shards`: name -> in which of the steps, in words.
    """
    rows = [row for rank, tape in tapes.items() for row in _of_tape(rank, tape)]
    told = {row["rank"] for row in rows}
    rows += [row for row in _of_frames(window, ranks) if row["rank"] not in told]
    if not rows:
        return None
    last = max(row["step"] for row in rows) if breach_step is None else breach_step
    rows = [row for row in rows if last - BEFORE <= row["step"] <= last]
    rows.sort(key=lambda row: (row["attempt"], row["step"], row["rank"]))
    return {"breach_step": breach_step, "steps": rows, "shards": _in_words(rows)}


def _of_tape(rank: int, tape: Any) -> Iterable[Row]:
    for batch in tape if isinstance(tape, list) else ():
        if isinstance(batch, dict) and isinstance(batch.get("step"), int) and batch.get("shards"):
            yield {"rank": rank, "attempt": int(batch.get("attempt", 0)), **batch}


def _of_frames(window: Window, ranks: Mapping[int, Mapping[str, Any]]) -> Iterable[Row]:
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


def _in_words(rows: Sequence[Row]) -> dict[str, str]:
    """Return for each shard the steps it was in; those of the newest step come first."""
    steps: dict[str, dict[int, set[int]]] = {}
    for row in reversed(rows):
        for origin in row["shards"]:
            of = steps.setdefault(str(origin["shard"]), {})
            of.setdefault(row["attempt"], set()).add(row["step"])
    told = {
        shard: ", ".join(_span(attempt, found) for attempt, found in sorted(of.items()))
        for shard, of in list(steps.items())[:NAMED]
    }
    if len(steps) > NAMED:
        told["more"] = f"{len(steps) - NAMED} shards"
    return told


def _span(attempt: int, steps: set[int]) -> str:
    first, last = min(steps), max(steps)
    text = f"step {first}" if first == last else f"steps {first} to {last}"
    return text + (f" of attempt {attempt}" if attempt else "")
