"""Loss, tokens and norms of a whole job, combined from those of its ranks.

Means are weighted by targets. Tokens are sums, where ranks that read one batch count once. The
square of a norm is the sum of what each rank adds to it; replicas agree on the whole.

Source: the design of the ranks, section 2; the stability metrics report, `train_loss_raw`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

MEANS = ("train_loss_raw", "train_loss", "train_loss_ema", "val_loss")
TOKENS = "tokens_per_update"
SUMS = (TOKENS, "tokens_seen", "tokens_applied", "tokens_per_sec")
NORMS = {  # metric -> norm, what its square is the sum of, and what that is divided by
    "grad_global_norm": ("grad_global_norm", "grad_norm_share", ""),
    "update_norm": ("update_norm", "update_square_share", ""),
    "update_to_weight": ("update_norm", "update_square_share", "weight_square_share"),
}
EQUAL = 1e-9  # relative: shares of replicas
ALIKE = 1e-5  # relative: ranks that hold the same gradients add them in the same order

Values = Mapping[str, float | None]


def fold(
    rows: Mapping[int, Values],
    leader: int,
    names: Collection[str],
    world_size: int,
    *,
    whole: bool = True,
) -> dict[str, float | None]:
    """Return what the job says of the metrics in `JOB` that its leader has.

    Args:
        rows: the values of each rank.
        whole: no rank is missing that should be there.
    """
    scale = max(1.0, world_size / len(rows)) if whole else None
    every = list(rows.values())
    found: dict[str, float | None] = {name: _mean(every, name) for name in MEANS if name in names}
    for name in SUMS:
        if name in names:
            parts = [_over(values.get(name), values.get("batch_copies") or 1.0) for values in every]
            found[name] = _total(parts, scale)
    for name in NORMS:
        if name in names:
            found[name] = _norm(every, name, rows[leader].get(name), world_size, scale)
    return found


def adds_up(ranks: Sequence[Values], name: str) -> bool:
    """Return whether ranks say how a norm of the job is made of theirs, or all have the same."""
    root, share, _ = NORMS[name]
    known = [values[name] for values in ranks if values.get(name) is not None]
    if all(values.get(root) is None or values.get(share) is not None for values in ranks):
        return True
    return len(known) == len(ranks) and all(
        math.isclose(value or 0.0, known[0] or 0.0, rel_tol=ALIKE) for value in known
    )


def _mean(rows: Sequence[Values], name: str) -> float | None:
    """Return the mean over ranks, weighted by their targets where all know these."""
    known = [(value, v.get(TOKENS)) for v in rows if (value := v.get(name)) is not None]
    if not known:
        return None
    weights = [weight for _, weight in known if weight is not None]
    if len(weights) < len(known) or not sum(weights):
        weights = [1.0] * len(known)
    pairs = [(value, w) for (value, _), w in zip(known, weights, strict=True) if w]
    if len({value for value, _ in pairs}) == 1:
        return pairs[0][0]
    return _sum(value * w for value, w in pairs) / _sum(w for _, w in pairs)


def _norm(
    rows: Sequence[Values], name: str, own: float | None, world_size: int, scale: float | None
) -> float | None:
    root, share, below = NORMS[name]
    values = [v[name] for v in rows if v.get(name) is not None]
    alike = own is not None and values.count(own) == len(values)
    shares = [v.get(share) for v in rows]
    if root == name == "grad_global_norm":  # a root itself
        shares = [None if x is None else x * x for x in shares]
    replicas = (_is_replica(v.get(root), x, world_size) for v, x in zip(rows, shares, strict=True))
    if alike and all(replicas):
        return own  # of replicas: that of one is that of the job
    if any(value is not None and value - value != 0.0 for value in values):
        return math.nan
    if any(v.get(root) is not None and x is None for v, x in zip(rows, shares, strict=True)):
        return own  # nobody knows how the weights are spread: the leader's part stands for all
    square = _total(shares, scale)
    of = _total([v.get(below) for v in rows], scale) if below else 1.0
    return math.sqrt(square / of) if square is not None and of else None


def _is_replica(root: float | None, share: float | None, world_size: int) -> bool:
    """Return whether a rank holds all of it, as the others do; True where nobody knows."""
    if root is None or share is None:
        return True
    return math.isclose(share * world_size, root * root, rel_tol=EQUAL)


def _total(parts: Sequence[float | None], scale: float | None) -> float | None:
    """Return the sum over the job, None where a part of it is missing."""
    known = [part for part in parts if part is not None]
    if scale is None or not known or len(known) < len(parts):
        return None
    return _sum(known) * scale


def _sum(parts: Iterable[float]) -> float:
    """Return the sum, in which the order of the ranks does not matter to the last bit."""
    known = list(parts)
    return math.fsum(known) if all(map(math.isfinite, known)) else sum(known)


def tokens_of(values: Values) -> float:
    """Return what one rank adds to the tokens of its step: ranks that read one batch share it."""
    tokens = _over(values.get(TOKENS), values.get("batch_copies") or 1.0)
    return tokens if tokens is not None and math.isfinite(tokens) else 0.0


def _over(value: float | None, copies: float) -> float | None:
    return None if value is None else value / copies
