"""Shard of a step's data and the position in it, as `data.shard_tracker` knows them.

A frame holds numbers only. The names that stand behind them go into the status, into a notice when
they are new, and beside the fingerprints of the newest batches, which evidence is made of.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Deque, Dict, List, Mapping, Optional, Tuple

from ..data.shard_tracker import SEVERAL, Origin, ShardTracker
from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step, Update

SHARDS_METRICS = (
    MetricSpec(
        "batch_shard",
        "1",
        "Number of the shard that the step's data came from, in the order heard of; -1 for several,"
        " absent where nobody says.",
        "supervise_probe.shard, or what batch and dataset tell of it",
    ),
    MetricSpec(
        "batch_offset",
        "1",
        "Where in its one shard the step's data began, as told; absent without a number.",
        "supervise_probe.shard, or what batch and dataset tell of it",
    ),
)

DEPTH = 32  # steps that may wait for a device, as in ipc/publisher.py
PER_NOTICE = 6
BYTES, TEXT = 560, 200  # of names, and characters of the sentence: what a letter holds unclipped
# Steps to the next notice, by how many there were: endless names must not fill the record.
GAPS = ((32, 1), (256, 16), (1 << 62, 256))
IN_STATUS = 8


class ShardsCollector(Collector):
    """Shard of a step's data and the position in it, as `data.shard_tracker` knows them.

    Numbers the shards of a step. Sleeps until anybody says anything of shards.
    """

    METRICS = SHARDS_METRICS

    ASLEEP = True

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._notice = context.reporter.notice
        self.shards = ShardTracker(context.torch, self.wake)
        self._backwards = 0
        self._of_step: Optional[Dict[Origin, None]] = None
        self._waiting: Deque[Tuple[int, int, List[Origin]]] = deque(maxlen=DEPTH)
        self._next_notice = self._notices = 0

    def after_backward(self, loss: Number) -> None:
        self._backwards += 1

    def forget(self) -> None:
        self._backwards = 0

    def after_update(self, update: Update) -> None:
        backwards, self._backwards = self._backwards, 0
        if backwards or self._of_step is None:  # else the second optimizer after one backward
            self._of_step = {**(self._of_step or {}), **self.shards.take(backwards)}

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        if not self._of_step:
            self._of_step = None
            return
        origins, self._of_step = list(self._of_step)[:SEVERAL], None
        numbers = {self.shards.number(origin.shard) for origin in origins}
        values["batch_shard"] = -1.0 if len(numbers) > 1 else float(numbers.pop())
        if values["batch_shard"] >= 0 and isinstance(origins[0].offset, int):
            values["batch_offset"] = float(origins[0].offset)
        self._waiting.append((step.number, step.attempt, origins))
        if self.shards.unreported and not self._next_notice > step.number:
            self._tell(step.number)

    def join(self, record: Dict[str, Any]) -> None:
        """Add the shards of a step to what is kept of its batch, by step and attempt."""
        while self._waiting:
            step, attempt, origins = self._waiting.popleft()
            if (step, attempt) == (record["step"], record["attempt"]):
                record["shards"] = [origin._asdict() for origin in origins]
                return

    def newest(self) -> Dict[str, str]:
        """Return the names used last by their number, for the status."""
        return self.shards.newest(IN_STATUS)

    def rewind(self, state: Mapping[str, float]) -> None:
        self._backwards, self._of_step = 0, None
        self.shards.clear()
        self._next_notice = 0

    def _tell(self, step: int) -> None:
        new = self.shards.take_unreported(PER_NOTICE, BYTES)
        self._notices += 1
        self._next_notice = step + next(gap for below, gap in GAPS if self._notices < below)
        text = ", ".join(f"{number} is {shard}" for number, shard in new.items())
        self._notice("shard", f"new shards: {text}"[:TEXT], {"shards": new})
