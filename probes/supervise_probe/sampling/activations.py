"""Outputs of a model's blocks and of its routers, and its output logits, of one forward.

Of each block at most ROWS rows of its output are looked at, evenly spread; a row is the last
dimension, in a language model one token. A block that is called again is looked at once.

A router's output holds its scores over all experts: logits, or probabilities, or the scores of a
sigmoid gate, which are then made to add up to 1. Which they are is decided on the device, so that
nothing waits. The experts of a token are the router's own choice where it returns one, else its
highest scores; how many, see `structure.Router`.

Shares are those of assignments: a token that goes to two experts counts in both, and all of them
add up to 1, so that the balance is 1 when the load is even, however many a token goes to.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Set, Tuple

from ..torch_state.structure import Router, leaves
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


ELEMENTS = 1 << 22  # scores of one router that are looked at
SMALL = 1e-30


class Routing:
    """What the routers of one forward did."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        # per router: entropy of the load, balance, entropy of a token; dropped and routed tokens
        self._found: Dict[str, Tuple[Any, Any, Any]] = {}
        self._dropped: List[Tuple[Any, float]] = []

    def router(self, router: Router, output: Any) -> None:
        """`router` returned `output`."""
        torch, experts = self._torch, router.experts
        scores, choices = self._read(router, output)
        if scores is None or router.name in self._found:
            return
        tokens = scores.shape[0]
        stride = -(-tokens * experts // ELEMENTS)
        scores = scores[::stride].float()
        best = choices is None
        choices = scores.topk(router.top_k, -1).indices if best else choices[::stride]
        shares = self._probabilities(scores)
        numbers = torch.arange(experts, device=scores.device)
        counts = sum((column[:, None] == numbers).sum(0) for column in choices.unbind(-1))
        load = counts.float() / choices.numel()
        self._found[router.name] = (
            _entropy(load) / math.log(experts),
            experts * (load * shares.mean(0)).sum(),
            _entropy(shares).mean() / math.log(experts),
        )
        room = router.capacity
        if router.factor is not None:
            room = math.ceil(router.factor * tokens * choices.shape[-1] / experts)
        if room is not None and stride == 1:
            self._dropped.append(((counts - room).clamp(min=0).sum().float(), choices.numel()))

    def values(self) -> Dict[str, Any]:
        """Return the metrics as tensors of one element."""
        if not self._found:
            return {}
        load, balance, token = (self._torch.stack(values) for values in zip(*self._found.values()))
        results = {
            "moe_util_entropy": load.amin(),
            "moe_load_balance_loss": balance.amax(),
            "router_token_entropy": token.mean(),
        }
        if self._dropped:
            routed = sum(number for _, number in self._dropped)
            dropped = self._torch.stack([number for number, _ in self._dropped]).sum()
            results["moe_drop_rate"] = 100.0 * dropped / routed
        return results

    def _read(self, router: Router, output: Any) -> Tuple[Any, Any]:
        scores = experts = None
        for item in leaves(output):
            if type(item) is not self._torch.Tensor or item.dim() < 2:
                continue
            is_integer = not item.is_floating_point() and item.dtype != self._torch.bool
            if scores is None and item.is_floating_point() and item.shape[-1] == router.experts:
                scores = item.detach().reshape(-1, router.experts)
            elif experts is None and is_integer and item.shape[-1] < router.experts:
                experts = item.detach().reshape(-1, item.shape[-1])
        if scores is not None and experts is not None and len(experts) != len(scores):
            experts = None
        return scores, experts

    def _probabilities(self, scores: Any) -> Any:
        """Return the scores as shares that add up to 1; logits by their softmax."""
        positive = (scores >= 0).all() & (scores <= 1).all()
        total = scores.sum(-1, keepdim=True).clamp(min=SMALL)
        return self._torch.where(positive, scores / total, scores.softmax(-1))


def _entropy(shares: Any) -> Any:
    return -(shares * shares.clamp(min=SMALL).log()).sum(-1)
