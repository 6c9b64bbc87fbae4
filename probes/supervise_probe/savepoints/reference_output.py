"""What the model makes of the probe batch: its loss, also where the job takes that of logits, and
how sure its outputs are and how far they have moved.

Where the job takes the loss, the targets are needed: those of the first loss in the step whose
input was kept, of logits that have the rows of the batch in front. Logits are those of a loss that
the model takes itself, else of one that the job took. Where no loss can be told (other shapes,
another loss than `cross_entropy` and `nll_loss`), none is.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

from ..sampling.activations import LOGITS, ROWS, some_rows
from ..sampling.side_forward import ROWS as SEQUENCES
from ..sampling.trial import floating

LIKELIEST = 10  # tokens; of fewer than 100 classes a tenth


class ReferenceOutput:
    """The targets of the rows that were kept, and the outputs of the newest runs."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        take = torch.nn.functional.cross_entropy
        self._take = getattr(take, "__original_fn", take)  # no loss of the job's
        self._targets: Any = None
        self._classes, self._ignored = 0, -100
        self._logits: Any = None  # some rows, of the run under way or the newest one
        self._before: Any = None  # the log-probabilities of these rows at the savepoint before

    def keep_targets(self, batch: int, logits: Any, targets: Any, ignored: int) -> None:
        """A loss was taken of these; `batch`: the rows of the input."""
        count = targets.shape[0] if targets.dim() else 0
        if targets.dtype != self._torch.int64 or logits.dim() < 2 or not batch or count % batch:
            return
        self._targets = targets.detach()[: count // batch * SEQUENCES].clone()
        self._classes, self._ignored = int(logits.shape[1]), ignored

    def saw(self, logits: Any) -> None:
        """The model takes a loss of these, in the run under way."""
        if self._logits is None and logits.dim() > 1:
            wide = logits.transpose(1, -1) if logits.dim() > 2 else logits
            self._logits = some_rows(wide, max(16, min(ROWS, LOGITS // wide.shape[-1]))).float()

    def begin(self) -> None:
        """A run begins."""
        self._logits = None

    def loss(self, output: Any) -> Optional[Any]:
        """Return the loss that a model's output holds or has, None where it cannot be told."""
        several = floating(self._torch, output)
        loss = next((v for v in several if v.numel() == 1), None)
        if loss is not None or self._targets is None or not several:
            return None if loss is None else loss.double().reshape(())
        logits, targets = several[0].float(), self._targets
        if logits.shape[-1] == self._classes and targets.dim() == 1:
            logits = logits.reshape(-1, self._classes)
        shape = (logits.shape[0], *logits.shape[2:])
        if logits.dim() < 2 or logits.shape[1] != self._classes or shape != targets.shape:
            return None
        self.saw(logits)
        return self._take(logits, targets, ignore_index=self._ignored).double()

    def describe(self) -> Dict[str, Any]:
        """Return metrics of the newest run's logits, as tensors of one element."""
        logits, self._logits = self._logits, None
        if logits is None:
            return {}
        logs = logits.log_softmax(-1)
        shares, before, self._before = logs.exp(), self._before, logs
        width = int(logs.shape[-1])
        likeliest = shares.topk(max(1, min(LIKELIEST, width // LIKELIEST)), -1).values
        found = {
            "logit_entropy_probe": -(shares * logs.clamp(min=-1e4)).sum(-1).mean(),
            "topk_mass_probe": 100.0 * likeliest.sum(-1).mean(),
        }
        if before is not None and before.shape == logs.shape:
            moved = before.exp() * (before - logs).clamp(min=-1e4, max=1e4)
            found["output_kl_to_prev"] = moved.sum(-1).mean()
        return found

    def forget(self) -> None:
        """The weights are others than those that the next run follows upon."""
        self._before = None
