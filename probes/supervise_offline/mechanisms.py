"""`python -I mechanisms.py NICENESS`: spectra of weights and of their changes, of pairs of copies.

Reads paths from standard input, one a line, and answers each with one JSON line: `{"path", "step",
"attempt", "values", "cpu_s"}`, or `{"path", "error"}`. It runs in the job's interpreter,
on one thread of the CPU, and is the first that the kernel kills where memory ends.

A file holds a JSON line and then float32 numbers: of each matrix the weights before, and the
weights `steps` later. Queries and keys have a row for each number of a head, heads one after the
other. Of a head, Q and K are these rows and logits are x Q'K y: they change by dQ'K + Q'dK,
of first order in the changes dQ and dK, and by dQ'dK, of second order. Few directions in
what should be noise show a systematic error, such as that of a biased kernel.

Ranks are effective ones, exp of the entropy of the squared singular values. All are exact, from the
eigenvalues of the smaller Gram matrix: of 2048 rows a randomised method was no faster and up to a
fifth off.

Source: arXiv:2510.04212 and arXiv:2606.28116 for the changes of Q K'; Martin and Mahoney,
arXiv:1810.01075, for the tail; Clauset et al., arXiv:0706.1062, for its fit.
"""

import json
import math
import os
import sys
import time
from typing import Any, BinaryIO, Callable, NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

sys.path.append(ROOT)  # for the next import only: other packages there are not the job's
try:
    from supervise_offline import find_torch, renice_self
finally:
    sys.path.remove(ROOT)

FIT_FEWEST, FIT_CANDIDATES = 10, 200
QUERY, KEY, ROUTER = "query", "key", "router"
SMALL = 1e-30
SEED, STEP = 20220405, 0.01  # of the curvature: of signs; of the weights' root mean square


class Matrix(NamedTuple):
    """One matrix of a pair.

    Attributes:
        layer: number of the attention layer or router, -1: of none.
        role: QUERY, KEY, ROUTER, or "" for any other. heads: how many it is made of.
    """

    name: str
    rows: int
    columns: int
    layer: int = -1
    role: str = ""
    heads: int = 1


class Pair(NamedTuple):
    """A matrix before and after."""

    matrix: Matrix
    before: Any
    after: Any


def singular_squares(torch: Any, matrix: Any) -> Any:
    """Return the squared singular values, ascending; computed in float32."""
    rows, columns = matrix.shape
    scale = float(matrix.abs().amax()) or 1.0  # else squares of small changes are subnormal
    scaled = matrix / scale
    gram = scaled @ scaled.T if rows <= columns else scaled.T @ scaled
    return torch.linalg.eigvalsh(gram).clamp(min=0.0).double() * scale**2


def effective_rank(squares: Any) -> float:
    """Return exp of the entropy of the squared singular values; 0 where all are zero."""
    total = float(squares.sum())
    return math.exp(_entropy(squares / total)) if total > 0.0 else 0.0


def singular_entropy(squares: Any) -> float:
    """Return the entropy of the singular values over the log of their number; 1 is flat."""
    values = squares.sqrt()
    total = float(values.sum())
    return _entropy(values / total) / math.log(len(values)) if total > 0.0 else 0.0


def _entropy(shares: Any) -> float:
    present = shares[shares > 0.0]
    return float(-(present * present.log()).sum())


def tail_exponent(torch: Any, squares: Any) -> float:
    """Return the exponent of the power law that fits the tail of the spectrum best.

    Of all places where the tail may begin that one counts from which the distribution of the values
    is nearest to the law; NaN where there are too few values.
    """
    values = squares[squares > 0.0].double().sort().values
    number = len(values)
    starts = number - FIT_FEWEST
    if starts < 1:
        return math.nan
    best = math.inf, math.nan
    logs = values.log()
    for start in range(0, starts, max(1, starts // FIT_CANDIDATES)):
        tail = logs[start:] - logs[start]
        size = number - start
        total = float(tail.sum())
        if total <= 0.0:
            continue
        exponent = 1.0 + size / total
        law = 1.0 - torch.exp((1.0 - exponent) * tail)
        seen = torch.arange(size, dtype=torch.float64) / size
        distance = max(
            float((seen - law).abs().max()), float((seen + 1.0 / size - law).abs().max())
        )
        best = min(best, (distance, exponent))
    return best[1]


class Increment(NamedTuple):
    """The change of one head's Q'K: effective ranks and norms by order."""

    first_rank: float
    second_rank: float
    first_norm: float
    second_norm: float


def head_increment(torch: Any, query: Pair, key: Pair, head: int) -> Increment:
    """Return the change of a head of `query`; of the keys several heads may share one."""
    q, dq = _head(query, head, query.matrix.heads)
    k, dk = _head(key, head * key.matrix.heads // query.matrix.heads, key.matrix.heads)
    first = _product_squares(torch, torch.cat((dq, q)), torch.cat((k, dk)))
    second = _product_squares(torch, dq, dk)
    norms = [math.sqrt(max(0.0, float(squares.sum()))) for squares in (first, second)]
    return Increment(effective_rank(first), effective_rank(second), *norms)


def _head(pair: Pair, head: int, heads: int) -> tuple[Any, Any]:
    size = pair.matrix.rows // heads
    rows = slice(head * size, (head + 1) * size)
    return pair.before[rows], pair.after[rows] - pair.before[rows]


def _product_squares(torch: Any, left: Any, right: Any) -> Any:
    """Return the squared singular values of `left.T @ right`, by its core alone."""
    cores = [torch.linalg.qr(side.T, mode="r")[1].double() for side in (left, right)]
    return torch.linalg.svdvals(cores[0] @ cores[1].T).square()


def measure_pairs(torch: Any, pairs: list[Pair]) -> dict[str, float]:
    """Return the metrics of all pairs, by id.

    What is low in a quarter of the layers or heads is in the lower quartile.
    """
    values: dict[str, float] = {}
    changes: dict[int, list[float]] = {}
    entropies, radii, tails = [], [], []
    for pair in pairs:
        if pair.matrix.role == ROUTER:
            continue
        if pair.matrix.role:
            squares = singular_squares(torch, pair.after - pair.before)
            changes.setdefault(pair.matrix.layer, []).append(effective_rank(squares))
        squares = singular_squares(torch, pair.after)
        entropies.append(singular_entropy(squares))
        largest = math.sqrt(float(squares[-1]))
        radii.append(largest / math.sqrt(pair.matrix.rows / pair.matrix.columns))
        tails.append(tail_exponent(torch, squares))
    _add(values, "dw_spectral_entropy", changes, 0.25)
    by_layer = _increments(torch, pairs)
    parts: tuple[tuple[str, Callable[[Increment], float], float], ...] = (
        ("qk_d2_spectral_entropy", lambda head: head.first_rank, 0.25),
        ("qk_d3_spectral_entropy", lambda head: head.second_rank, 0.25),
        ("qk_d2_norm", lambda head: head.first_norm, 0.75),
        ("qk_d3_ratio", lambda head: head.second_norm / max(head.first_norm, SMALL), 0.75),
    )
    for name, part, place in parts:
        _add(
            values,
            name,
            {n: [part(head) for head in heads] for n, heads in by_layer.items()},
            place,
        )
    values.update(measure_routers(pairs))
    if entropies:
        values["singular_entropy"], values["spectral_radius"] = min(entropies), max(radii)
    if tails := [tail for tail in tails if not math.isnan(tail)]:
        values["ht_sr_alpha"] = quantile(tails, 0.25)
    return values


def measure_routers(pairs: list[Pair]) -> dict[str, float]:
    """Return what the rows of each router's experts are like: of one of many a mean tells little.

    Similar are they by the mean pairwise cosine; conditioning is the largest centred row over the
    mean row. A shift that all rows have in common moves both and no choice of the router.
    """
    values: dict[str, float] = {}
    similar: dict[int, list[float]] = {}
    conditions: dict[int, list[float]] = {}
    for matrix, _, weight in pairs:
        if matrix.role == ROUTER and matrix.rows > 1:
            rows = weight.double()
            unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=SMALL)
            cosines = (matrix.rows * float(unit.mean(0).square().sum()) - 1.0) / (matrix.rows - 1)
            mean = rows.mean(0)
            centred = float((rows - mean).norm(dim=1).max())
            similar[matrix.layer] = [cosines]
            conditions[matrix.layer] = [centred / max(float(mean.norm()), SMALL)]
    _add(values, "router_similarity_max", similar, 1.0)
    _add(values, "router_conditioning_max", conditions, 1.0)
    if conditions:
        values["router_conditioning_min"] = min(min(layer) for layer in conditions.values())
    return values


def _increments(torch: Any, pairs: list[Pair]) -> dict[int, list[Increment]]:
    by_role = {(pair.matrix.layer, pair.matrix.role): pair for pair in pairs}
    by_layer: dict[int, list[Increment]] = {}
    for layer in sorted({pair.matrix.layer for pair in pairs if pair.matrix.role == QUERY}):
        query, key = by_role.get((layer, QUERY)), by_role.get((layer, KEY))
        if query is None or key is None or query.matrix.columns != key.matrix.columns:
            continue  # as of keys that are made in two products
        heads = range(query.matrix.heads)
        by_layer[layer] = [head_increment(torch, query, key, head) for head in heads]
    return by_layer


def _add(
    values: dict[str, float], name: str, by_layer: dict[int, list[float]], place: float
) -> None:
    """Add the quantile over all, and the mean of each layer."""
    members = [value for layer in by_layer.values() for value in layer]
    if members:
        values[name] = quantile(members, place)
        for layer, of_layer in by_layer.items():
            values[f"{name}.{layer}"] = sum(of_layer) / len(of_layer)


def quantile(values: list[float], place: float) -> float:
    """Return the value at `place`, 0 to 1, of the sorted ones, nearest rank."""
    return sorted(values)[round(place * (len(values) - 1))]


def read_pairs(torch: Any, file: BinaryIO) -> tuple[dict[str, Any], list[Pair]]:
    """Read a file of pairs; return its first line and the pairs."""
    head = json.loads(file.readline())
    pairs = []
    for row in head["matrices"]:
        matrix = Matrix(**row)
        both = [_read(torch, file, matrix) for _ in range(2)]
        pairs.append(Pair(matrix, *both))
    return head, pairs


def _read(torch: Any, file: BinaryIO, matrix: Matrix) -> Any:
    buffer = bytearray(4 * matrix.rows * matrix.columns)
    if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
        raise ValueError("the file ends too early")
    return torch.frombuffer(buffer, dtype=torch.float32).view(matrix.rows, matrix.columns)


def measure_file(torch: Any, path: str) -> dict[str, Any]:
    """Measure one file; `cpu_s` is what this process has used until now."""
    try:
        with open(path, "rb") as file:
            head, pairs = read_pairs(torch, file)
        values = measure_pairs(torch, pairs)
    except Exception as error:  # of a damaged file, or memory that ended
        return {"path": path, "error": f"{type(error).__name__}: {error}"[:300]}
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    result = {"path": path, "step": head["step"], "attempt": head["attempt"], "values": finite}
    return {**result, "cpu_s": round(time.process_time(), 4)}


def trace_of_hessian(torch: Any, loss: Callable[[], Any], weights: list[Any], number: int) -> float:
    """Return the mean of v'Hv over that many random v of signs; weights come back as they were."""
    chance = torch.Generator().manual_seed(SEED)
    own_weights = [weight.detach().clone() for weight in weights]
    squares = sum(float(w.double().square().sum()) for w in own_weights)
    step = max(1e-6, STEP * math.sqrt(squares / max(1, sum(w.numel() for w in own_weights))))
    total = 0.0
    for _ in range(number):
        signs = [
            torch.randint(0, 2, w.shape, generator=chance).to(w.dtype).mul_(2).sub_(1)
            for w in own_weights
        ]
        for side in (1.0, -1.0):
            with torch.no_grad():
                for weight, own, sign in zip(weights, own_weights, signs):
                    weight.copy_(own + side * step * sign)
            for sign, grad in zip(signs, torch.autograd.grad(loss(), weights, allow_unused=True)):
                if grad is not None:
                    total += side * float((grad.double() * sign).sum()) / (2.0 * step)
    with torch.no_grad():
        for weight, own in zip(weights, own_weights):
            weight.copy_(own)
    return total / number


def main() -> None:
    """Answer until the input ends."""
    renice_self(int(sys.argv[1]))
    try:
        torch = find_torch()
    except ImportError as error:
        print(json.dumps({"path": "", "error": f"torch cannot be imported: {error}"}), flush=True)
        raise SystemExit(3) from None
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(measure_file(torch, line.rstrip("\n"))), flush=True)


if __name__ == "__main__":
    main()
