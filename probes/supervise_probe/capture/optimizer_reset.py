"""Reset an optimizer's moments and step count to zero, as before its first step."""

from __future__ import annotations

from typing import Any, List

from ..errors import Refused

# State that starts at zero: Adam and variants, SGD, Muon, RMSprop, Adadelta, Adamax, Adafactor.
# Others (Rprop's step sizes, L-BFGS's history) do not start at zero.
STARTS_AT_ZERO = frozenset(
    (
        *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
        *("square_avg", "grad_avg", "acc_delta", "row_var", "col_var", "variance"),
    )
)


def check(optimizers: List[Any]) -> None:
    """Raise Refused unless `zero` can reset all state."""
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
