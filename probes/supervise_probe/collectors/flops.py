"""Model FLOPs utilisation: what the model needs, over what its device could have done meanwhile.

Counted are the tokens that went through the outermost module with gradients on, padding included,
since the device works for them too; where that was not seen, `tokens_per_update`, and attention is
left out. `status` says what was counted, or why nothing was.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Dict, Optional, Sequence

from ..spec import MetricSpec
from ..torch_state.device_peaks import peak_of
from ..torch_state.model_flops import ModelFlops, count
from . import Collector as Base

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step

METRICS = (
    MetricSpec(
        "mfu",
        "%",
        "Operations that the model needs for the step's tokens on this rank, over the device's "
        "dense 16-bit peak in the same time; absent without a known peak. Source and what is left "
        "out: torch_state/model_flops.py.",
        "PaLM, arXiv:2204.02311, appendix B: (6 N + 12 L H Q T) tokens_per_sec / peak",
    ),
)

PATIENCE = 64  # steps between two looks at a model whose modules come and go


class Collector(Base):
    """Looks at the model once, then multiplies.

    Attributes:
        description: what is counted, or why nothing is; for the status.
    """

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._registry = context.registry
        self._status_changed = context.reporter.status_changed
        self._peak: Optional[float] = context.config.peak_flops
        self._peak_known = self._peak is not None
        self._model: Optional[ModelFlops] = None
        self._changes = -1
        self._next_look = 0
        self._tokens = self._pairs = 0  # of a token and a position that it attends to
        self.description = "no step yet"

    def saw(self, shape: Sequence[int]) -> int:
        """Tokens of this shape went into the model; returns how many."""
        tokens = math.prod(shape)
        self._tokens += tokens
        if len(shape) > 1:
            self._pairs += tokens * shape[-1]
        return tokens

    def forget(self) -> None:
        self._tokens = self._pairs = 0

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        tokens, pairs = self._tokens, self._pairs
        self._tokens = self._pairs = 0
        peak = self._peak if self._peak_known else self._find_peak()
        if not peak:
            return
        changes = self._registry.modules.changes
        if changes != self._changes and step.number >= self._next_look:
            self._changes, self._next_look = changes, step.number + PATIENCE
            self._look()
        model = self._model
        if model is None or not tokens or not step.elapsed_ns:
            return
        flops = model.per_token * tokens + model.per_pair * pairs
        values["mfu"] = 100.0 * flops / (step.elapsed_ns / 1e9) / peak

    def finish(self, values: Dict[str, float]) -> None:
        tokens, elapsed = values.get("tokens_per_update"), values.get("step_time")
        if self._peak and self._model and tokens and elapsed and "mfu" not in values:
            values["mfu"] = 100.0 * self._model.per_token * tokens / elapsed / self._peak

    def _find_peak(self) -> Optional[float]:
        self._peak_known = True
        params = (p for root in self._registry.roots() for p in root.parameters())
        device = getattr(next(params, None), "device", self.torch.device("cpu"))
        name = str(device.type)
        if name == "cuda":
            name = str(self.torch.cuda.get_device_name(device))
        self._peak = peak_of(name)
        if self._peak is None:
            self._describe(f"no: the peak of {name} is not in the table; set job.peak_flops")
        return self._peak

    def _look(self) -> None:
        model = count(self.torch, self._registry.roots())
        if model.why_not:
            self._model = None
            self._describe(f"no: {model.why_not}")
            return
        self._model = model
        attention = f"{model.layers} attention layers" if model.layers else "no attention seen"
        peak = f"peak {(self._peak or 0.0) / 1e12:.4g} TFLOP/s"
        self._describe(f"{model.per_token / 1e6:.4g} MFLOP a token, {attention}; {peak}")

    def _describe(self, text: str) -> None:
        self.description = text
        self._status_changed()
