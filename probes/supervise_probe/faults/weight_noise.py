"""Noise on weights that stay plausible, as from a damaged file that loads, or on one rank only."""

from __future__ import annotations

from typing import Any, ClassVar, List

from . import CannotActError, Fault, Params


class WeightNoise(Fault):
    """Acts once, in the last parameter of its kind."""

    MEANING = "add noise to one weight matrix or vector, once"
    MOVES = "train_loss_raw"
    PARAMS: ClassVar[Params] = {
        "target": ("matrix", "matrix or vector"),
        "std": (8.0, "in standard deviations of the parameter; of a constant one, in its size"),
        "seed": (0, "of the fault's own generator"),
    }

    _done = False

    def before_update(self, params: List[Any]) -> None:
        wanted = 1 if self.params["target"] == "vector" else 2
        victims = [p for p in params if p.dim() == wanted and p.is_floating_point()]
        if self._done:
            return
        if not victims:
            raise CannotActError(f"no {self.params['target']} of floats is trained")
        victim, generator = victims[-1], self.torch.Generator()
        generator.manual_seed(int(self.params["seed"]))
        with self.torch.no_grad():
            size = float(victim.std()) if victim.numel() > 1 else 0.0
            size = size or float(victim.abs().mean())
            noise = self.torch.randn(tuple(victim.shape), generator=generator)
            victim.add_(noise.to(victim) * (size * float(self.params["std"])))
        self._done = True
