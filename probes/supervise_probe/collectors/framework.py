"""Values that a training library reports: see `hooks.libraries`. Costs nothing where there is none.

Epoch and time of a save cannot be seen from torch. Which loss is that of an evaluation the names of
the library show; without one see `stepping/evaluation_pass.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, Optional

from . import Collector, MetricSpec

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number

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
        self, context: ProbeContext, extra: Dict[str, Number], step_is_over: Callable[[], None]
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

    def trained_by(self, name: str, names_saves: bool = False) -> None:
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

    def ended(self, steps: Optional[int] = None, stopped: bool = False) -> None:
        """The loop of the library ends, or the process does before it.

        Args:
            done: steps in the library's own count; default: as the probe counted. stopped: somebody
                asked the library to stop, such as a callback for early stopping.
        """
        trainer, total = self.trainer, self.total_steps
        self.trained_by("")
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

    def _next_frame(self) -> Dict[str, Number]:
        self._step_is_over()
        return self._extra
