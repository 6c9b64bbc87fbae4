"""What an optimizer has learned from gradients, set to zero: as if it had never made a step."""

from __future__ import annotations

from typing import Any, List

from ..errors import Refused

# State that starts at zero and is no schedule: Adam and its kin, SGD, Muon, RMSprop, Adadelta,
# Adamax, Adafactor. Others (Rprop's step sizes, L-BFGS's history) have no zero to go back to.
STARTS_AT_ZERO = frozenset(
    (
        *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
        *("square_avg", "grad_avg", "acc_delta", "row_var", "col_var", "variance"),
    )
)


def check(optimizers: List[Any]) -> None:
    """Raise Refused unless `zero` knows all that they hold."""
    for optimizer in optimizers:
        for held in optimizer.state.values():
            unknown = set(held) - STARTS_AT_ZERO if isinstance(held, dict) else {type(held)}
            if unknown:
                name = type(optimizer).__name__
                raise Refused(f"moments cannot be zeroed: {name} holds {sorted(map(str, unknown))}")


def zero(torch: Any, optimizers: List[Any]) -> None:
    """Set first and second moments and the count of steps to zero, in place."""
    with torch.no_grad():
        for optimizer in optimizers:
            for held in optimizer.state.values():
                for key, value in held.items():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
                    elif value is not None:
                        held[key] = type(value)(0)
