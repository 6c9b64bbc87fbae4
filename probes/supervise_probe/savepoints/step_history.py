"""What is kept of the newest steps: for evidence, and to see that a run that went back goes on.

A step that is made again must see the same batch and come to the same loss, at the same rate of the
job's own schedule. In the same process all of it bit for bit; after a new start the loss within
`CLOSE`, since other threads may add up in another order. What the probe batch came to is told with
it (`reference_batch.py`), or by itself where no step is compared.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Deque, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ..runtime import files

if TYPE_CHECKING:
    from ..collectors.shards import Collector as ShardsCollector
    from ..context import ProbeContext
    from ..runtime.background import Background

ROWS = 256  # steps
BATCHES = 64  # for evidence
WRITE_EVERY = 50  # steps between two writes to disk
CLOSE = 1e-3  # of the loss; project default


class Row(NamedTuple):
    """One step. What was not seen is None; `lr` is the rate before the probe scaled it."""

    step: int
    attempt: int
    fingerprint: Optional[float]
    loss: Optional[float]
    lr: Optional[float]


class StepHistory:
    """The newest steps of one rank, and of the launch before.

    Attributes:
        seen: the newest batches, oldest first, for evidence: step, attempt, fingerprint, shards.
        finite: whether the newest frame held finite values only.
    """

    def __init__(
        self, context: ProbeContext, background: Background, shards: ShardsCollector
    ) -> None:
        self._guard, self._position = context.guard, context.position
        self._reporter, self._shards = context.reporter, shards
        self._background = background
        self.seen: Deque[Dict[str, Any]] = deque(maxlen=BATCHES)
        self.finite = True
        # Rows as plain tuples: the garbage collector of the job forgets those at its first visit.
        self._plain: Deque[Tuple[Any, ...]] = deque(maxlen=ROWS)
        self._expected: Optional[Row] = None
        self._exact = True
        self._proof: Optional[Dict[str, Any]] = None
        self._path = os.path.join(context.config.marks, f"tape.{self._position.rank}.json")
        self._unwritten = 0
        config = context.config
        self._kept = config.tape  # on disk too
        if config.attempt:
            self._plain.extend(map(tuple, _read(self._path, config.attempt)))
            if config.first_step:
                self.expect(config.first_step, exact=False)

    def expect(self, step: int, exact: bool) -> None:
        """The next `step` is made again: compare it with how it was."""
        self._expected, self._exact = self._newest(step), exact

    def expect_nothing(self) -> None:
        """Steps to come see other data than those before."""
        self._expected = None

    def proved(self, proof: Dict[str, Any]) -> None:
        """The run was taken back, and this is what the probe batch came to.

        Args:
            proof: `{"verdict": "equal" or "differs", "was", "is"}`, or `{"verdict": "not judged",
                "why"}`.
        """
        self._proof = proof
        if self._expected is None:
            self._tell(self._position.step, "unknown", {}, {}, [])

    def batches(self, first: int, last: int) -> Dict[int, float]:
        """The fingerprints of the steps `first` to `last`, as far as they are known."""
        return {
            row.step: row.fingerprint
            for row in self._rows()
            if first <= row.step <= last and row.fingerprint is not None
        }

    def remember(self, step: int, attempt: int, values: Mapping[str, float]) -> None:
        """Keep a step whose values are all on the host."""
        get = values.get
        self.finite = not get("nan_inf_events")
        fingerprint = get("batch_fingerprint")
        row = (step, attempt, fingerprint, get("train_loss_raw"), get("learning_rate_scheduled"))
        self._plain.append(row)
        if fingerprint is not None or "batch_shard" in values:
            # Kept for the evidence of an incident.
            seen: Dict[str, Any] = {"step": step, "attempt": attempt, "fingerprint": fingerprint}
            self.seen.append(seen)
            if "batch_shard" in values:
                self._add_shards(seen)
        if self._expected is not None and step >= self._expected.step:
            was, self._expected = self._expected, None
            if step == was.step and attempt > was.attempt:
                self._compare(was, Row(*row))
            elif self._proof is not None:
                self._tell(step, "unknown", {}, {}, [])
        if self._kept:
            self._unwritten += 1
            if self._unwritten >= WRITE_EVERY:
                self._unwritten = 0
                self._background.do(_write, self._path, self._rows())

    def close(self) -> None:
        """Write what a new launch will want to know of this one."""
        if self._kept and self._plain:
            _write(self._path, self._rows())

    def _rows(self) -> List[Row]:
        return [Row(*row) for row in self._plain]

    def _add_shards(self, seen: Dict[str, Any]) -> None:
        self._guard.run(self._guard.part("shards"), self._shards.join, seen)

    def _newest(self, step: int) -> Optional[Row]:
        return next((row for row in reversed(self._rows()) if row.step == step), None)

    def _compare(self, was: Row, now: Row) -> None:
        """Tell whether the run goes on as it did."""
        batch = "unknown"
        if was.fingerprint is not None and now.fingerprint is not None:
            batch = "same" if was.fingerprint == now.fingerprint else "other"
        wrong = [] if batch != "other" else ["another batch"]
        if not _equal(was.loss, now.loss, 0.0 if self._exact else CLOSE):
            wrong.append(f"loss {now.loss!r} instead of {was.loss!r}")
        if not _equal(was.lr, now.lr, 0.0):
            wrong.append(f"learning rate {now.lr!r} instead of {was.lr!r}")
        loss, lr = {"was": was.loss, "is": now.loss}, {"was": was.lr, "is": now.lr}
        self._tell(now.step, batch, loss, lr, wrong)

    def _tell(
        self,
        step: int,
        batch: str,
        loss: Dict[str, Optional[float]],
        lr: Dict[str, Optional[float]],
        wrong: List[str],
    ) -> None:
        """Tell what was compared; `loss` and `lr` are empty where no step was."""
        proof, self._proof = self._proof or {}, None
        data = {"step": step, "fingerprint": batch, "loss": loss, "lr": lr}
        if proof:
            data["probe_batch"] = proof
        if proof.get("verdict") == "differs":
            wrong.append(f"probe batch {proof['is']!r} instead of {proof['was']!r}")
        data["ok"] = not wrong
        said = "it goes on as it was" if not wrong else "it is not as it was: " + ", ".join(wrong)
        if proof.get("verdict") == "not judged":
            said = said if loss else "nothing was compared"
            said += f"; its probe batch was not judged: {proof['why']}"
        begin = f"step {step} was made again and" if loss else f"from step {step} on"
        self._reporter.notice("continuity", f"{begin} {said}", data)


def _equal(was: Optional[float], now: Optional[float], close: float) -> bool:
    """Whether two numbers agree, or one of them is unknown. NaN agrees with NaN."""
    if was is None or now is None or was == now:
        return True
    return (was != was and now != now) or (
        close > 0 and math.isfinite(was) and abs(was - now) <= close * abs(was)
    )


def _write(path: str, rows: List[Row]) -> None:
    files.replace(path, json.dumps(rows).encode())


def _read(path: str, attempt: int) -> List[Row]:
    """Return the rows of earlier attempts; none where there is no such file."""
    try:
        rows = [Row(*row) for row in json.loads(files.read(path))]
    except (OSError, ValueError, TypeError):
        return []
    return [row for row in rows if row.attempt < attempt]
