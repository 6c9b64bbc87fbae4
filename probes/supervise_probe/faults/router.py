"""A damaged router of a mixture of experts: harmless, winner-take-all, or without a preference."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

from . import Args, Call, CannotActError, Fault, Kwargs, Params, Value

HOW = ("common", "sharp", "flat")
NAMES = ("router", "gate")


class Router(Fault):
    """Acts once, in the weights of every router, one row per expert.

    `common` halves the rows and adds one vector to all: softmax does not see it. `sharp` multiplies
    the centred rows by 6: the first expert takes all. `flat` multiplies them by 0.05.
    """

    MEANING = "damage the routers of a mixture of experts, once"
    MOVES = "router_token_entropy"
    PARAMS: ClassVar[Params] = {"how": ("sharp", "common, sharp or flat")}

    _done = False

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        super().__init__(torch, params)
        if params["how"] not in HOW:
            raise ValueError(f"router: how={params['how']!r} must be one of {', '.join(HOW)}")

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        if not self._done:
            found = [
                parameter
                for name, parameter in root.named_parameters()
                if parameter.dim() == 2 and any(n in name.split(".")[-2:][0] for n in NAMES)
            ]
            if not found:
                raise CannotActError("no matrix of the model is called router or gate")
            with self.torch.no_grad():
                for weight in found:
                    weight.copy_(self._damaged(weight))
            self._done = True
        return args, kwargs

    def _damaged(self, weight: Any) -> Any:
        mean = weight.mean(dim=0, keepdim=True)
        if self.params["how"] == "common":
            return weight * 0.5 + mean
        return mean + (weight - mean) * (6.0 if self.params["how"] == "sharp" else 0.05)
