"""Tokens: targets that carry loss, as the job's own loss function counts them.

`F.cross_entropy` and `F.nll_loss` are counted where gradients flow, so evaluation and sampling do
not count. Where neither is called, the integers that go into the model are counted instead, padding
included. What the job left out without a backward does not count (`stepping.batch_observer.py`).
A job that knows better reports `tokens_per_update` itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Tuple

from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step, Update
    from ..torch_state.weight_copies import WeightCopies

TOKENS_METRICS = (
    MetricSpec(
        "train_loss",
        "nat",
        "Mean loss of all targets with loss weight in this step on this rank, whatever the job "
        "divides by or adds to it; absent where a loss is weighted, smoothed, not reduced or "
        "compiled.",
        "sum(loss) / sum(targets != ignore_index) of cross_entropy and nll_loss",
    ),
    MetricSpec(
        "tokens_per_update",
        "tokens",
        "Targets with loss weight in this step on this rank; samples, for a classifier.",
        "targets != ignore_index of torch.nn.functional.cross_entropy and nll_loss",
        "one comparison over the targets",
    ),
    MetricSpec(
        "tokens_seen",
        "tokens",
        "Sum of tokens_per_update over all steps on this rank, skipped ones included; a rollback "
        "takes it back.",
        "this project",
    ),
    MetricSpec("tokens_per_sec", "tokens/s", "tokens_per_update / step_time.", "this project"),
    MetricSpec(
        "batch_copies",
        "ranks",
        "Ranks that read the same batch, as those of a tensor-parallel layer do; absent with one "
        "rank.",
        "ranks of the mesh of the parameters over those that FSDP2 spreads batches over",
    ),
)


class TokensCollector(Collector):
    """Tokens: targets that carry loss, as the job's own loss function counts them.

    Counts on the device where the targets are.
    """

    METRICS = TOKENS_METRICS

    def __init__(self, context: ProbeContext, copies: WeightCopies) -> None:
        super().__init__(context)
        self._copies, self._readers = copies, 0.0
        self._targets: Optional[Number] = None
        self._inputs = 0
        self._loss: Number = 0.0
        self._unknown = False  # what a loss of this step is of a target
        self._of_step: Dict[str, Number] = {}
        self._seen = 0.0

    def saw_targets(self, calls: List[Tuple[Any, int, bool, Optional[Number]]]) -> None:
        """A loss function was called with these class indices, and that one is ignored.

        Behind them: whether the number is the sum of their losses or the mean, None for unknown.
        """
        for target, ignored, summed, value in calls:
            if target.dtype is self.torch.int64 and not target.is_meta:
                count = self.count(target, ignored)
                self._targets = count if self._targets is None else self._targets + count
                if value is None:
                    self._unknown = True
                else:
                    self._loss = self._loss + (value if summed else value * count)
            else:
                self._unknown = True

    def count(self, target: Any, ignored: int) -> Number:
        """Return how many targets are not the class `ignored`."""
        count: Number = float(target.numel())
        look = ignored < 0 and count > 0 and self.scalars.reads(target)
        if not (look and target.min().item() >= 0):  # mostly one look: nothing can be ignored
            count = self.scalars.value((target != ignored).sum())
        return count

    def saw_inputs(self, count: int) -> None:
        """So many integers went into the model."""
        self._inputs += count

    def forget(self) -> None:
        self._targets, self._inputs = None, 0
        self._loss, self._unknown = 0.0, False

    def after_update(self, update: Update) -> None:
        targets, self._targets = self._targets, None
        inputs, self._inputs = self._inputs, 0
        loss, self._loss = self._loss, 0.0
        for name, count in (("targets", targets), ("inputs", inputs), ("loss", loss)):
            if count is not None:
                self._of_step[name] = self._of_step.get(name, 0.0) + count

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        counted, self._of_step = self._of_step, {}
        if self._copies.several:
            self._readers = values["batch_copies"] = self._readers or self._copies.batch_copies()
        unknown, self._unknown = self._unknown, False
        if "targets" in counted:
            targets = values["tokens_per_update"] = counted["targets"]
            if not unknown and not (self.scalars.on_host(targets) and targets == 0.0):
                values["train_loss"] = counted["loss"] / targets
        elif counted.get("inputs"):
            values["tokens_per_update"] = counted["inputs"]

    def finish(self, values: Dict[str, float]) -> None:
        tokens = values.get("tokens_per_update")
        if tokens is None:
            return
        self._seen += tokens
        values["tokens_seen"] = self._seen
        elapsed = values.get("step_time")
        if elapsed:
            values["tokens_per_sec"] = tokens / elapsed

    def state(self) -> Dict[str, float]:
        return {"tokens_seen": self._seen}

    def rewind(self, state: Mapping[str, float]) -> None:
        self._seen = state.get("tokens_seen", self._seen)
