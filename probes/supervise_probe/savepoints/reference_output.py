"""Output of the model on the probe batch: its loss, also where the job takes that of logits, and
how sure its outputs are and how far they have moved.

Where the job takes the loss, the targets are needed: those of the first loss in the step whose
input was kept, of logits that have the rows of the batch in front. A loss that is taken in chunks,
as litgpt does it, is that of the first one. Logits are those of a loss that the model takes itself,
else of one that the job took. Where no loss can be told (other shapes, another loss than
`cross_entropy` and `nll_loss`), none is.
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Tuple

from ..sampling.activations import LOGITS, ROWS, some_rows
from ..sampling.side_forward import ROWS as SEQUENCES
from ..sampling.side_forward import floating

LIKELIEST = 10  # tokens; of fewer than 100 classes a tenth
CHUNK = 1024  # targets of a chunk that are kept


class Targets(NamedTuple):
    """Those of the rows that were kept.

    Attributes:
        rows: of the first rows of the batch, one by one or (rows, positions), int64.
        classes: how many there are. ignored: is none of them.
        batch: rows that the batch had. taken: targets that the loss was taken of, along the first
            dimension.
    """

    rows: Any
    classes: int
    ignored: int
    batch: int
    sampled: int


class ReferenceOutput:
    """The outputs of the newest runs.

    Attributes:
        targets: of the job's loss, None where it takes none that is known.
    """

    def __init__(self, torch: Any, sequences: int = SEQUENCES) -> None:
        """`sequences`: rows of a batch that its runs have, at most."""
        self._torch, self._sequences = torch, sequences
        take = torch.nn.functional.cross_entropy
        self._take = getattr(take, "__original_fn", take)  # no loss of the job's
        self.targets: Optional[Targets] = None
        self._logits: Any = None  # some rows, of the run under way or the newest one
        self._before: Any = None  # the log-probabilities of these rows at the savepoint before

    def keep_targets(self, batch: int, logits: Any, targets: Any, ignored: int) -> None:
        """A loss was taken of these; `batch`: the rows of the input."""
        count = targets.shape[0] if targets.dim() else 0
        if targets.dtype != self._torch.int64 or logits.dim() < 2 or not batch or not count:
            return
        limit = count // batch * self._sequences
        if targets.dim() == 1:
            limit = max(limit, CHUNK)  # it may be a chunk
        rows = targets.detach()[:limit].clone()
        self.targets = Targets(rows, int(logits.shape[1]), ignored, batch, count)

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
        several, targets = floating(self._torch, output), self.targets
        loss = next((v for v in several if v.numel() == 1), None)
        if loss is not None or targets is None or not several:
            return None if loss is None else loss.double().reshape(())
        logits, rows = several[0].float(), targets.rows.to(several[0].device)
        if logits.shape[-1] == targets.classes and rows.dim() == 1:
            logits = logits.reshape(-1, targets.classes)
        logits, rows = _matched(targets, self._sequences, logits, rows)
        shape = (logits.shape[0], *logits.shape[2:])
        if logits.dim() < 2 or logits.shape[1] != targets.classes or shape != rows.shape:
            return None
        self.saw(logits)
        return self._take(logits, rows, ignore_index=targets.ignored).double()

    def describe(self) -> Dict[str, Any]:
        """Return metrics of the newest run's logits, as tensors of one element."""
        logits, self._logits = self._logits, None
        if logits is None:
            return {}
        logs = logits.log_softmax(-1)
        shares, previous, self._before = logs.exp(), self._before, logs
        width = int(logs.shape[-1])
        likeliest = shares.topk(max(1, min(LIKELIEST, width // LIKELIEST)), -1).values
        values = {
            "logit_entropy_probe": -(shares * logs.clamp(min=-1e4)).sum(-1).mean(),
            "topk_mass_probe": 100.0 * likeliest.sum(-1).mean(),
        }
        if previous is not None and previous.shape == logs.shape:
            moved = previous.exp() * (previous - logs).clamp(min=-1e4, max=1e4)
            values["output_kl_to_prev"] = moved.sum(-1).mean()
        return values

    def forget(self) -> None:
        """The weights are others than those that the next run follows upon."""
        self._before = None


def _matched(targets: Targets, sequences: int, logits: Any, rows: Any) -> Tuple[Any, Any]:
    """Return the logits whose targets are known, and these.

    A loss was taken in chunks if it had half as many targets as the batch has logits, or fewer; a
    shift by one position does not come to that.
    """
    rows_compared, count = min(sequences, targets.batch), int(logits.shape[0])
    if count * targets.batch >= 2 * targets.sampled * rows_compared:
        rows_known = min(count, int(rows.shape[0]))
        return logits[:rows_known], rows[:rows_known]
    return logits, rows[: targets.sampled // targets.batch * sequences]
