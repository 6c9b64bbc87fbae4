"""Token counts of the routers of one forward pass.

A router's output holds its scores over all experts: logits, or probabilities, or the scores of a
sigmoid gate, which are then made to add up to 1. Which they are is decided on the device, so that
nothing waits. The experts of a token are the router's own choice where it returns one, else its
highest scores; how many, see `structure.Router`.

Shares are those of assignments: a token that goes to two experts counts in both, and all of them
add up to 1, so that the balance is 1 when the load is even, however many a token goes to.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Tuple

from ..torch_state.structure import Router, leaves

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
