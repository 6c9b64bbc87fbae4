"""The loss of the probe batch, also of a model that returns logits and leaves the loss to the job.

There the targets are needed: those of the first loss that the job takes, in the step whose input
was kept, against logits that have the rows of the batch in front. Where no loss can be told (other
shapes, another loss than `cross_entropy` and `nll_loss`), none is.
"""

from __future__ import annotations

from typing import Any, Optional

from ..sampling.side_forward import ROWS
from ..sampling.trial import floating


class ReferenceLoss:
    """The targets of the rows that were kept, and the loss that an output has against them."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        take = torch.nn.functional.cross_entropy
        self._take = getattr(take, "__original_fn", take)  # no loss of the job's
        self._targets: Any = None
        self._classes, self._ignored = 0, -100

    def keep(self, batch: int, logits: Any, targets: Any, ignored: int) -> None:
        """A loss was taken of these; `batch`: the rows of the input."""
        count = targets.shape[0] if targets.dim() else 0
        if targets.dtype != self._torch.int64 or logits.dim() < 2 or not batch or count % batch:
            return
        self._targets = targets.detach()[: count // batch * ROWS].clone()
        self._classes, self._ignored = int(logits.shape[1]), ignored

    def of(self, output: Any) -> Optional[Any]:
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
        return self._take(logits, targets, ignore_index=self._ignored).double()
