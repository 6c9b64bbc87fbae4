"""Outputs of a model's blocks, and its output logits, of one forward.

Of each block at most ROWS rows of its output are looked at, evenly spread; a row is the last
dimension, in a language model one token. A block that is called again is looked at once.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Set, Tuple

from ..torch_state.structure import leaves
from .attention import spread

ROWS = 256
LOGITS = 1 << 20  # numbers of the output that are looked at
OUTLIER = 6.0
PERCENTILES = 50, 99
BLOCKS = 4  # whose percentiles get columns


class Activations:
    """What the blocks of one forward put out."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._blocks: Dict[int, Tuple[Any, Any, Any]] = {}
        self.logz: Optional[Any] = None

    def block(self, index: int, output: Any) -> None:
        """Block `index` returned `output`."""
        tensor = _floating(self._torch, output)
        if tensor is None or index in self._blocks:
            return
        rows = some_rows(tensor.detach(), ROWS).float()
        squares = rows.square().mean(-1)
        rms = squares.mean().sqrt()
        self._blocks[index] = rms, (rows.abs() > OUTLIER * rms).float().mean(), squares

    def output(self, output: Any, vocabularies: Set[int]) -> None:
        """The model returned `output`: its logits, if it is as wide as one of its vocabularies."""
        tensor = _floating(self._torch, output)
        if self.logz is None and tensor is not None and int(tensor.shape[-1]) in vocabularies:
            self.logits(tensor)

    def logits(self, logits: Any) -> None:
        """These are logits; classes are in the last dimension, in dimension 1 for a loss."""
        width = int(logits.shape[-1])
        rows = some_rows(logits.detach(), max(16, min(ROWS, LOGITS // width)))
        self.logz = rows.float().logsumexp(-1).mean()

    def values(self) -> Dict[str, Any]:
        """Return the metrics as tensors of one element."""
        values: Dict[str, Any] = {} if self.logz is None else {"logz_mean": self.logz}
        if self._blocks:
            order = sorted(self._blocks)
            rms = self._torch.stack([self._blocks[i][0] for i in order])
            values["residual_rms"] = rms.amax()
            outliers = self._torch.stack([self._blocks[i][1] for i in order])
            values["activation_outlier_rate"] = 100.0 * outliers.amax()
            for block in spread(len(order)):
                values[f"residual_rms.{order[block]}"] = rms[block]
            values.update(self._percentiles([order[i] for i in spread(len(order), BLOCKS)]))
        return values

    def _percentiles(self, indices: List[int]) -> Dict[str, Any]:
        squares = [self._blocks[index][2] for index in indices]
        pad = self._torch.nn.utils.rnn.pad_sequence
        rows = pad(squares, batch_first=True, padding_value=float("inf")).sort()[0].sqrt()
        return {
            f"residual_rms_p{p}.{index}": row[(len(square) - 1) * p // 100]
            for index, square, row in zip(indices, squares, rows)
            for p in PERCENTILES
        }


def _floating(torch: Any, output: Any) -> Optional[Any]:
    """Return the first plain floating tensor in `output` that has rows."""
    for item in leaves(output):
        if type(item) is torch.Tensor and item.is_floating_point() and item.dim() > 1:
            return item
    return None


def some_rows(tensor: Any, limit: int) -> Any:
    """Return at most so many rows, evenly spread; a row is the last dimension."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat[:: -(-flat.shape[0] // limit)] if flat.shape[0] > limit else flat
