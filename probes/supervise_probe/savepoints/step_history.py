"""The newest steps, to compare a relaunched run with, and the steps whose update is dropped.

A repeated step must see the same batch and have the same loss within `CLOSE`, since threads may add
in another order, at the same rate of the job's own schedule. The result of the probe batch
(`reference_batch.py`) is reported with it, or by itself where no step is compared, as after a
rollback.

The batches that did harm are skipped when they come again: weights and optimizer do not change, the
loop and its data go on. Where the fingerprint of a step's batch is known, the fingerprint decides
and not the step number.
"""

from __future__ import annotations

import json
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Optional, Sequence

from ..context import Refused
from ..runtime import files
from ..sampling.side_forward import is_close

if TYPE_CHECKING:
    from ..collectors.batch import BatchCollector, ShardsCollector
    from ..context import ProbeContext
    from ..runtime.files import Background
    from ..torch_state.records import Optimizers

ROWS = 256  # steps
BATCHES = 64  # for evidence
WRITE_EVERY = 50  # steps between two writes to disk
CLOSE = 1e-3  # of the loss; project default


class Row(NamedTuple):
    """One step. What is not known is None; `lr` is the rate before the probe scaled it."""

    step: int
    attempt: int
    fingerprint: Optional[float]
    loss: Optional[float]
    lr: Optional[float]


class StepHistory:
    """The newest steps of one rank, and of the previous launch.

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
        self.seen: deque[dict[str, Any]] = deque(maxlen=BATCHES)
        self.finite = True
        # Rows as plain tuples, which the job's garbage collector untracks at its first visit.
        self._plain: deque[tuple[Any, ...]] = deque(maxlen=ROWS)
        self._expected: Optional[Row] = None
        self._reference_result: Optional[dict[str, Any]] = None
        self._path = os.path.join(context.config.marks, f"tape.{self._position.rank}.json")
        self._unwritten = 0
        config = context.config
        self._kept = config.tape  # on disk too
        if config.attempt:
            self._plain.extend(map(tuple, _read(self._path, config.attempt)))
            if config.first_step:
                self._expected = self._newest(config.first_step)

    def stop_comparing(self) -> None:
        """Compare nothing: the next steps see other data."""
        self._expected = None

    def set_reference_result(self, result: dict[str, Any]) -> None:
        """Take the result of the probe batch after a rollback or a resume.

        Args:
            result: `{"verdict": "equal" or "differs", "was", "is"}`, or `{"verdict": "not judged",
                "why"}`.
        """
        self._reference_result = result
        if self._expected is None:
            self._report(self._position.step, "unknown", {}, {}, [])

    @property
    def newest_loss(self) -> Optional[float]:
        """Loss of the newest step, if it is known."""
        return Row(*self._plain[-1]).loss if self._plain else None

    def batch_fingerprints(self, start: int, end: int) -> dict[int, float]:
        """Return the fingerprints of the steps `first` to `last` that are known."""
        return {
            row.step: row.fingerprint
            for row in self._rows()
            if start <= row.step <= end and row.fingerprint is not None
        }

    def remember(self, step: int, attempt: int, values: Mapping[str, float]) -> None:
        """Add a step whose values are all on the host."""
        get = values.get
        self.finite = not get("nan_inf_events")
        fingerprint = get("batch_fingerprint")
        row = (step, attempt, fingerprint, get("train_loss_raw"), get("learning_rate_scheduled"))
        self._plain.append(row)
        if fingerprint is not None or "batch_shard" in values:
            record: dict[str, Any] = {"step": step, "attempt": attempt, "fingerprint": fingerprint}
            self.seen.append(record)
            if "batch_shard" in values:
                self._add_shards(record)
        if self._expected is not None and step >= self._expected.step:
            was, self._expected = self._expected, None
            if step == was.step and attempt > was.attempt:
                self._compare(was, Row(*row))
            elif self._reference_result is not None:
                self._report(step, "unknown", {}, {}, [])
        if self._kept:
            self._unwritten += 1
            if self._unwritten >= WRITE_EVERY:
                self._unwritten = 0
                self._background.do(_write, self._path, self._rows())

    def close(self) -> None:
        """Write the rows for the next launch."""
        if self._kept and self._plain:
            _write(self._path, self._rows())

    def _rows(self) -> list[Row]:
        return [Row(*row) for row in self._plain]

    def _add_shards(self, record: dict[str, Any]) -> None:
        self._guard.run(self._guard.part("shards"), self._shards.join, record)

    def _newest(self, step: int) -> Optional[Row]:
        return next((row for row in reversed(self._rows()) if row.step == step), None)

    def _compare(self, was: Row, now: Row) -> None:
        """Report whether the run continues as before."""
        batch = "unknown"
        if was.fingerprint is not None and now.fingerprint is not None:
            batch = "same" if was.fingerprint == now.fingerprint else "other"
        wrong = [] if batch != "other" else ["another batch"]
        if not _equal(was.loss, now.loss, CLOSE):
            wrong.append(f"loss {now.loss!r} instead of {was.loss!r}")
        if not _equal(was.lr, now.lr, 0.0):
            wrong.append(f"learning rate {now.lr!r} instead of {was.lr!r}")
        loss, lr = {"was": was.loss, "is": now.loss}, {"was": was.lr, "is": now.lr}
        self._report(now.step, batch, loss, lr, wrong)

    def _report(
        self,
        step: int,
        batch: str,
        loss: dict[str, Optional[float]],
        lr: dict[str, Optional[float]],
        wrong: list[str],
    ) -> None:
        """Report what was compared; `loss` and `lr` are empty where no step was."""
        reference, self._reference_result = self._reference_result or {}, None
        data = {"step": step, "fingerprint": batch, "loss": loss, "lr": lr}
        if reference:
            data["probe_batch"] = reference
        if reference.get("verdict") == "differs":
            wrong.append(f"probe batch {reference['is']!r} instead of {reference['was']!r}")
        data["ok"] = not wrong
        text = "training continues as before"
        if wrong:
            text = "training differs from before: " + ", ".join(wrong)
        if reference.get("verdict") == "not judged":
            text = text if loss else "nothing was compared"
            text += f"; the probe batch was not judged: {reference['why']}"
        start = f"step {step} was repeated" if loss else f"from step {step} on"
        self._reporter.notice("continuity", f"{start}: {text}", data)


def _equal(was: Optional[float], now: Optional[float], close: float) -> bool:
    """Whether two numbers agree, or one of them is unknown. NaN agrees with NaN."""
    return was is None or now is None or is_close(was, now, close)


def _write(path: str, rows: list[Row]) -> None:
    files.replace_file(path, json.dumps(rows).encode())


def _read(path: str, attempt: int) -> list[Row]:
    """Return the rows of earlier attempts; none where there is no such file."""
    try:
        rows = [Row(*row) for row in json.loads(files.read_file(path))]
    except (OSError, ValueError, TypeError):
        return []
    return [row for row in rows if row.attempt < attempt]


RANGES_MAX = 64


class Range(NamedTuple):
    """Steps `first` to `last`, and the fingerprints of their batches as far as they are known."""

    first: int
    last: int
    batches: dict[int, float]


def parse_step_range(text: Any) -> Sequence[int]:
    """Return `[first, last]`.

    Raises:
        Refused: it is no such pair.
    """
    is_list = isinstance(text, (list, tuple)) and all(type(step) is int for step in text)
    if not is_list or len(text) != 2 or not 0 <= text[0] <= text[1]:
        raise Refused(f"skip must be the first and the last step, not {text!r}")
    return list(text)


class SkipRanges:
    """The steps that are skipped.

    Attributes:
        ranges: of these steps, newest last.
    """

    def __init__(
        self,
        context: ProbeContext,
        batch: BatchCollector,
        optimizers: Optimizers,
        history: StepHistory,
    ) -> None:
        self._position, self._batch = context.position, batch
        self._optimizers, self._history = optimizers, history
        self.ranges: list[Range] = []
        for skip in context.config.skip:
            self.add(*parse_step_range(skip))

    def add(self, first: int, last: int) -> None:
        """Skip the steps `first` to `last` from now on."""
        self.ranges.append(Range(first, last, self._history.batch_fingerprints(first, last)))
        del self.ranges[:-RANGES_MAX]

    def skips_current_step(self) -> bool:
        """Whether the current step, whose input was seen, is one of them."""
        step = self._position.step
        return any(
            span.first <= step <= span.last and self._has_batch_of(span) for span in self.ranges
        )

    def _has_batch_of(self, span: Range) -> bool:
        fingerprint = self._batch.newest()
        if (
            fingerprint is None or len(self._optimizers.living()) > 1
        ):  # the fingerprint covers a part only
            return True
        return self._position.step not in span.batches or fingerprint in span.batches.values()
