"""Progress of the run: counts of steps and tokens, and what a training library reports of it.

Counts, and what is derived from them, go on over a relaunch. What a library reports (see
`hooks/libraries.py`) costs nothing where there is none: epoch and time of a save cannot be seen
from torch. Which loss is that of an evaluation the names of the library show; without one see
`stepping/hand_written.py`.
"""

from __future__ import annotations

from math import exp, inf, isfinite
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Optional

from ..torch_state.records import Average, StepShareWindow
from ..torch_state.tensor_copies import is_readable
from . import Collector, MetricSpec

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step, Update
    from ..torch_state.structure import WeightCopies

COUNTERS_METRICS = (
    MetricSpec("steps_seen", "steps", "Steps whose update was applied, so far.", "this project"),
    MetricSpec(
        "update_skipped",
        "1",
        "1 when an update of this step was not applied: overflow under a GradScaler, standing "
        "order or command; else 0.",
        "torch.amp.GradScaler: found_inf",
    ),
    MetricSpec("skipped_updates", "steps", "Sum of update_skipped so far.", "this project"),
)


class CountersCollector(Collector):
    """Counts of applied and of skipped steps, with the reason.

    Counts in `add_derived_values`: under a fused optimizer the device alone knows of an overflow.
    """

    METRICS = COUNTERS_METRICS

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._skipped: Number = 0.0
        self._applied_so_far = 0.0
        self._skipped_so_far = 0.0

    def after_update(self, update: Update) -> None:
        if update.skip:
            self._skipped = self._skipped + 1.0
        elif update.found_inf is not None:
            self._skipped = self._skipped + update.found_inf

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        skipped, self._skipped = self._skipped, 0.0
        values["update_skipped"] = skipped

    def add_derived_values(self, values: dict[str, float]) -> None:
        skipped = 1.0 if values.get("update_skipped", 0.0) > 0.0 else 0.0
        self._skipped_so_far += skipped
        self._applied_so_far += 1.0 - skipped
        values["update_skipped"] = skipped
        values["skipped_updates"] = self._skipped_so_far
        values["steps_seen"] = self._applied_so_far

    def state(self) -> dict[str, float]:
        return {"steps_seen": self._applied_so_far, "skipped_updates": self._skipped_so_far}

    def rewind(self, state: Mapping[str, float]) -> None:
        self._applied_so_far = state.get("steps_seen", self._applied_so_far)
        self._skipped_so_far = state.get("skipped_updates", self._skipped_so_far)


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
    MetricSpec(
        "losses_without_targets",
        "1",
        "Losses of this step that are a mean over no target, and so NaN; absent where neither "
        "targets are counted nor such a loss was seen, and where the host does not have it.",
        "the loss is NaN, and all targets are ignored, or it is the mean of an empty tensor, or a "
        "sum of nothing, or with weights of 0, that was divided by 0",
        "a walk over the first nodes of the graph, where a loss is NaN",
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


class LossCall(NamedTuple):
    """A call of a loss function.

    Attributes:
        targets: class indices. ignore_index: the one that is left out.
        is_sum: whether `loss` is the sum of theirs, not the mean. loss: None where it is unknown.
    """

    targets: Any
    ignore_index: int
    is_sum: bool
    loss: Optional[Number]


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
        self._empty = 0  # losses of this step that are a mean over no target, used or not
        self._without_targets = 0.0
        self._looks = LOOKS
        self._of_step: dict[str, Number] = {}
        self._seen = 0.0

    def add_loss_calls(self, calls: list[LossCall]) -> None:
        """Add the targets of the calls of a loss function, and the sum of their losses."""
        for target, ignored, summed, value in calls:
            is_class_index = target.dtype is self.torch.int64
            if is_class_index and not target.numel():  # it has no memory, and its mean loss is NaN
                self._targets = 0.0 if self._targets is None else self._targets
                self._empty += self._is_nan(value)
            elif is_class_index and is_readable(self.torch, target):
                count = self.count(target, ignored)
                self._targets = count if self._targets is None else self._targets + count
                if value is None:
                    self._unknown = True
                else:
                    self._empty += self._is_nan(value) and self.scalars.on_host(count) and not count
                    self._loss = self._loss + (value if summed else value * count)
            else:
                self._unknown = True

    def count(self, target: Any, ignored: int) -> Number:
        """Return how many targets are not the class `ignored`."""
        count: Number = float(target.numel())
        look = ignored < 0 and count > 0 and self.scalars.can_read_now(target)
        if not (look and target.min().item() >= 0):  # mostly one look: nothing can be ignored
            count = self.scalars.value((target != ignored).sum())
        return count

    def _is_nan(self, loss: Optional[Number]) -> bool:
        return loss is not None and self.scalars.on_host(loss) and loss != loss

    def inspect_nan(self, losses: list[Any]) -> None:
        """The sum of these is NaN; count those that are a mean over nothing."""
        count = self._empty
        if not count and self._looks > 0:
            self._looks -= 1
            count = sum(is_mean_of_nothing(loss.grad_fn) for loss in losses)
        self._without_targets = max(self._without_targets, float(count))

    def add_input_tokens(self, count: int) -> None:
        """So many integers went into the model."""
        self._inputs += count

    def forget(self) -> None:
        self._targets, self._inputs = None, 0
        self._loss, self._unknown = 0.0, False
        self._empty, self._without_targets = 0, 0.0

    def after_update(self, update: Update) -> None:
        targets, self._targets = self._targets, None
        inputs, self._inputs = self._inputs, 0
        loss, self._loss = self._loss, 0.0
        for name, count in (("targets", targets), ("inputs", inputs), ("loss", loss)):
            if count is not None:
                self._of_step[name] = self._of_step.get(name, 0.0) + count

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        counted, self._of_step = self._of_step, {}
        if self._copies.has_other_ranks:
            self._readers = values["batch_copies"] = self._readers or self._copies.batch_copies()
        unknown, self._unknown, self._empty = self._unknown, False, 0
        if "targets" in counted or self._without_targets:
            values["losses_without_targets"] = self._without_targets
            self._without_targets = 0.0
        if "targets" in counted:
            targets = values["tokens_per_update"] = counted["targets"]
            if not unknown and not (self.scalars.on_host(targets) and targets == 0.0):
                values["train_loss"] = counted["loss"] / targets
        elif counted.get("inputs"):
            values["tokens_per_update"] = counted["inputs"]

    def add_derived_values(self, values: dict[str, float]) -> None:
        tokens = values.get("tokens_per_update")
        if tokens is None:
            return
        self._seen += tokens
        values["tokens_seen"] = self._seen
        elapsed = values.get("step_time")
        if elapsed:
            values["tokens_per_sec"] = tokens / elapsed

    def state(self) -> dict[str, float]:
        return {"tokens_seen": self._seen}

    def rewind(self, state: Mapping[str, float]) -> None:
        self._seen = state.get("tokens_seen", self._seen)


# Losses that are NaN whose graph is looked at: what a job has packed (a checkpoint) is made again
# for it, as for its backward. Project default.
LOOKS = 4
NODES = 16  # of a graph, from the loss on: what a job makes of the losses of its samples


def is_mean_of_nothing(node: Any) -> bool:
    """Return whether a loss is, or is made of, a mean over no value: what is left is 0 / 0.

    Args:
        node: of the graph; what it has saved is still there.
    """
    nodes = [node]
    for _ in range(NODES):
        node = nodes.pop(0) if nodes else None
        name = "" if node is None else node.name()
        if name.startswith("MeanBackward") and getattr(node, "_saved_self_sym_numel", 1) == 0:
            return True
        parents = [parent for parent, _ in node.next_functions] if name else []
        is_by_constant = name == "DivBackward0" and parents[-1] is None
        divisor: Any = _saved(node, "other") if is_by_constant else None
        rows = 0 if divisor is None else int((divisor == 0).sum())
        if rows and (not divisor.is_floating_point() or _sums_nothing(parents[0], divisor, rows)):
            return True
        nodes += parents
    return False


def _sums_nothing(node: Any, divisor: Any, rows: int) -> bool:
    """Return whether so many rows of a dividend are sums of no value, or with weights of 0.

    Others that are 0, or a spread or largest value of 0 as a divisor, are of the model.
    """
    for _ in range(NODES):
        name = "" if node is None else node.name()
        if name.startswith("SumBackward") and 0 in getattr(node, "_saved_self_sym_sizes", ()):
            return True
        weights = None
        if name.startswith("NllLoss"):
            target = _saved(node, "target")
            weights = None if target is None else target != node._saved_ignore_index
        elif name == "WhereBackward0":
            condition = _saved(node, "condition")
            is_last = node.next_functions[0][0] is None
            weights = condition if condition is None or not is_last else ~condition
        elif name == "MaskedFillBackward0":
            mask = _saved(node, "mask")
            weights = None if mask is None else ~mask
        elif name == "MulBackward0":
            weights = _saved(node, "self" if node.next_functions[0][0] is None else "other")
        if weights is not None and _empty_rows(weights, divisor) == rows:
            return True
        parents = (
            [parent for parent, _ in node.next_functions if parent is not None] if name else []
        )
        if len(parents) != 1:
            return False
        node = parents[0]
    return False


def _empty_rows(weights: Any, divisor: Any) -> int:
    """Return in how many rows all weights are 0; there is one row where there is one divisor."""
    if divisor.numel() == 1 or not weights.dim() or not weights.numel():
        return int(not weights.any())
    return int((weights.reshape(len(weights), -1) == 0).all(1).sum())


def _saved(node: Any, name: str) -> Any:
    try:
        return getattr(node, f"_saved_{name}", None)
    except Exception:  # the job has changed it since, or cannot unpack it: its backward will fail
        return None


DERIVED_METRICS = (
    MetricSpec(
        "train_loss_ema",
        "loss",
        "Bias-corrected moving average of train_loss_raw, decay 0.99, finite losses only.",
        "m = 0.99 m + 0.01 loss; m / (1 - 0.99^t)",
    ),
    MetricSpec(
        "train_ppl",
        "1",
        "exp of the same average of train_loss; absent where that is.",
        "this project",
    ),
    MetricSpec(
        "train_val_gap",
        "nat",
        "val_loss less the same average of train_loss, in the frames that have both.",
        "this project",
    ),
    MetricSpec(
        "overflow",
        "1",
        "1 when a GradScaler skipped this step's update, else 0, also where something else skipped "
        "it; absent in a job without one.",
        "torch.amp.GradScaler: found_inf",
    ),
    MetricSpec(
        "overflow_rate",
        "%",
        "Share of the last 100 steps that a GradScaler skipped; absent in a job without one.",
        "torch.amp.GradScaler: found_inf",
    ),
    MetricSpec(
        "grad_spike_score",
        "1",
        "grad_global_norm over its bias-corrected moving average, decay 0.97, of the steps before; "
        "absent in the first step and where it is not finite.",
        "|g_t| / EMA(|g|)_(t-1)",
    ),
    MetricSpec(
        "tokens_applied",
        "tokens",
        "Sum of tokens_per_update over the steps whose update was applied; a rollback takes it "
        "back.",
        "this project",
    ),
    MetricSpec(
        "nan_inf_events",
        "1",
        "How many of loss, gradient norm and update norm are NaN or Inf in this step; an overflow "
        "that a GradScaler caught counts 0.",
        "this project",
    ),
)

OVERFLOWS = 100  # steps
EXP_LIMIT = 700.0  # exp of more does not fit a float64


class DerivedCollector(Collector):
    """Numbers derived from a frame and those before it: averages, shares, sums.

    Keeps eight numbers and a word of 100 bits.
    """

    METRICS = DERIVED_METRICS

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._loss = Average("train_loss_ema", 0.99)
        self._of_target = Average("train_ppl", 0.99)
        self._norm = Average("grad_spike_score", 0.97)
        self._overflows = StepShareWindow("overflow_rate", OVERFLOWS)
        self._parts = (self._loss, self._of_target, self._norm, self._overflows)
        self._applied = 0.0

    def add_derived_values(self, values: dict[str, float]) -> None:
        value_of = values.get
        mean = self._follow(self._loss, value_of("train_loss_raw"))
        if mean is not None:
            values["train_loss_ema"] = mean
        mean = self._follow(self._of_target, value_of("train_loss"))
        if mean is not None:
            values["train_ppl"] = exp(mean) if mean < EXP_LIMIT else inf
            if "val_loss" in values:
                values.setdefault("train_val_gap", values["val_loss"] - mean)
        norm = value_of("grad_global_norm")
        if norm is not None and isfinite(norm):
            average = self._norm
            if average.value:
                values["grad_spike_score"] = norm / average.value
            average.add(norm)
        skipped = value_of("update_skipped", 0.0) > 0.0
        if "loss_scale" in values:
            overflow = value_of("skip_reason", float(skipped)) == 1.0
            self._overflows.add_step(overflow)
            values["overflow"] = float(overflow)
            values["overflow_rate"] = self._overflows.percent
        tokens = value_of("tokens_per_update")
        if tokens is not None:
            if not skipped:
                self._applied += tokens
            values["tokens_applied"] = self._applied
        finite = isfinite(value_of("train_loss_raw", 0.0)) + isfinite(value_of("update_norm", 0.0))
        # NaN and Inf spread through a 2-norm, so the norms stand for all gradients and weights.
        is_overflow = "loss_scale" in values and value_of("update_skipped")
        finite += bool(is_overflow or isfinite(value_of("grad_global_norm", 0.0)))
        values["nan_inf_events"] = float(3 - finite)

    @staticmethod
    def _follow(average: Average, value: Optional[float]) -> Optional[float]:
        """Return the average with this value in it; None where there is no value."""
        if value is None:
            return None
        if isfinite(value):
            average.add(value)
        return average.value

    def state(self) -> dict[str, float]:
        state = {"tokens_applied": self._applied}
        for part in self._parts:
            part.save_state(state)
        return state

    def rewind(self, state: Mapping[str, float]) -> None:
        self._applied = state.get("tokens_applied", self._applied)
        for part in self._parts:
            part.load_state(state)


SLICES = 8  # evaluation sets that get a column

FRAMEWORK_METRICS = (
    MetricSpec(
        "epoch",
        "1",
        "Passes over the training data that were done when the step began; absent without a "
        "library that counts them.",
        "Trainer: state.epoch; Lightning: current_epoch and the batch's share of it",
    ),
    MetricSpec(
        "val_loss",
        "nat",
        "Loss of an evaluation, in the frame of the next step; a job may report its own. Without a "
        "library: mean over the targets of all that the trained model is evaluated on between two "
        "steps, in eval mode and without gradients; absent where a loss is not plain.",
        "Trainer: eval_loss; Lightning: what is logged as val_loss, or spelt alike; else "
        "cross_entropy and nll_loss, the first of each call of the model",
    ),
    MetricSpec(
        "slice_val_loss",
        "nat",
        "val_loss of one evaluation set; append its name or number: `.code`. 8 sets at most.",
        "Trainer: eval_<name>_loss; Lightning: val_loss/dataloader_idx_<i>",
    ),
    MetricSpec(
        "checkpoint_time",
        "s",
        "Wall time of the saves since the last step, in the frame of the next one.",
        "CLOCK_MONOTONIC around the save of a library, torch, DCP or safetensors",
    ),
)


class FrameworkCollector(Collector):
    """Values that a training library reports. Costs nothing where there is none.

    Adds what it is given to the next frame.

    Attributes:
        total_steps: length of the run in the library's own count; None where unknown.
        steps_before: the library's count at the probe's step 0, as after a resume.
        trainer: name of the library whose loop trains now, "" for none.
        names_saves: it names its checkpoints itself.
    """

    METRICS = FRAMEWORK_METRICS

    def __init__(
        self, context: ProbeContext, extra: dict[str, Number], step_is_over: Callable[[], None]
    ) -> None:
        """Begin.

        Args:
            extra: what joins the next frame.
            step_is_over: called between two steps: one that waits for another optimizer is over.
        """
        super().__init__(context)
        self._position, self._reporter = context.position, context.reporter
        self._extra, self._step_is_over = extra, step_is_over
        self._names = {"val_loss"}
        self.total_steps: Optional[int] = None
        self.steps_before = 0
        self.trainer, self.names_saves = "", False
        self._ordered: Optional[str] = None

    def set_training_library(self, name: str, names_saves: bool = False) -> None:
        """The loop of this library begins, or ends ("")."""
        self.trainer, self.names_saves, self._ordered = name, names_saves, None

    def order_save(self, path: str) -> None:
        """Let the library save a checkpoint when its step is over; "": where it sees fit."""
        self._ordered = path

    def take_order(self) -> Optional[str]:
        """The step is over: return where to save what was ordered, None if nothing was."""
        path, self._ordered = self._ordered, None
        return path

    def epoch(self, epoch: float) -> None:
        """A batch begins; only the first of a step counts."""
        self._next_frame().setdefault("epoch", epoch)

    def length(self, total: float, steps: int) -> None:
        """Training begins: `total` steps are planned (0 or less: unknown), `done` are made."""
        self.total_steps = int(total) if 0 < total < float("inf") else None
        self.steps_before = steps - self._position.step

    @property
    def planned_steps(self) -> Optional[int]:
        """Steps of the whole training, as the probe counts them; None where nobody says."""
        if not self.trainer or self.total_steps is None:
            return None
        return self.total_steps - self.steps_before

    def record_loop_end(self, steps: Optional[int] = None, stopped: bool = False) -> None:
        """The loop of the library ends, or the process does before it.

        Args:
            steps: in the library's own count; default: as the probe counted. stopped: somebody
                asked the library to stop, such as a callback for early stopping.
        """
        trainer, total = self.trainer, self.total_steps
        self.set_training_library("")
        if not trainer or total is None:
            return
        steps = self._position.step + self.steps_before if steps is None else steps
        data = {"done": steps, "total": total, "stopped": bool(stopped)}
        message = f"{trainer} ended after {steps} of {total} steps"
        self._reporter.notice("training-ended", message, data)

    def report(self, name: str, value: Any) -> None:
        """An evaluation gave this loss, a number or a one-element tensor."""
        if len(self._names) > SLICES and name not in self._names:
            return
        self._names.add(name)
        tensor = isinstance(value, self.torch.Tensor)
        self._next_frame()[name] = self.scalars.value(value) if tensor else float(value)

    def save_ended(self, seconds: float) -> None:
        """A checkpoint was written."""
        frame = self._next_frame()
        frame["checkpoint_time"] = frame.get("checkpoint_time", 0.0) + seconds

    def _next_frame(self) -> dict[str, Number]:
        self._step_is_over()
        return self._extra
