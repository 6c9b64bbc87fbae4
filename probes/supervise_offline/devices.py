"""`python -I devices.py SECONDS`: matrix products known to the last bit, on all devices at once.

Prints one JSON line, `{"torch": version, "devices": [...]}`; the rows are those of
`multiply_matrices`. Exit status 3, with `{"error": ...}`: torch cannot be imported.

The factors hold whole numbers from -127 to 127. They fit into each format that a matrix unit may
round its inputs to (TF32, bfloat16), and every sum of their products is far below 2**24, so that
float32 holds it exactly, in whatever order it is added up. So one wrong bit anywhere is an error
and never rounding, and all devices are compared with one truth, which the host has worked out: the
sums of each row and of each column, for which it needs no product of matrices.

Source: K.-H. Huang and J. Abraham, Algorithm-based fault tolerance for matrix operations, IEEE
Transactions on Computers C-33 (1984); the sizes are project defaults.
"""

import json
import os
import signal
import sys
import time
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

sys.path.append(ROOT)  # for the next import only: other packages there are not the job's
try:
    from supervise_offline import find_torch
finally:
    sys.path.remove(ROOT)

LARGEST = 127  # 7 bits
OTHERS = 0.2  # of a device's memory; less may be a desktop's, or our own context's; project default
ON_DEVICE, ON_CPU = 4096, 512  # rows and columns: 137 and 0.3 GFLOP a product


def visible_devices(torch: Any) -> list[str]:
    """Return the devices that the job sees, the CPU where it sees none."""
    if not torch.cuda.is_available():
        return ["cpu"]
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def multiply_matrices(torch: Any, names: list[str], seconds: float) -> list[dict[str, Any]]:
    """Multiply on all devices for as long as that, each product compared, one at least.

    Returns:
        One row per device: `device`, `name`; bytes `free` and `total` before, 0 for the CPU;
        `products` that were made and how many were `wrong`; `no_memory`: there was none for the
        matrices; `in_use`: others have so much of its memory that it was not asked; `error`: what
        ended it, "" for nothing.
    """
    torch.set_float32_matmul_precision("high")  # the matrix units, where there are any
    size = ON_CPU if "cpu" in names else ON_DEVICE
    lhs, right, rows, columns = make_factors(torch, size)
    report, placed = [], []
    for name in names:
        row = _row(name)
        report.append(row)
        try:
            _describe(torch, row)
            if row["in_use"]:
                continue
            on = [factor.to(name) for factor in (lhs, right, rows, columns)]
            placed.append((row, on, torch.empty(size, size, device=name)))
        except RuntimeError as error:
            _failed(torch, row, error)
    until = time.monotonic() + seconds
    while placed:
        placed = _one_each(torch, placed)
        if time.monotonic() >= until:
            break
    return report


def make_factors(torch: Any, size: int) -> Any:
    """Return two matrices, and the sums of the rows and of the columns of their product."""
    generator = torch.Generator().manual_seed(20)
    lhs, right = (
        torch.randint(-LARGEST, LARGEST + 1, (size, size), generator=generator).float()
        for _ in range(2)
    )
    rows = lhs.double() @ right.double().sum(1)  # whole numbers below 2**53: exact
    columns = lhs.double().sum(0) @ right.double()
    return lhs, right, rows, columns


def _one_each(torch: Any, placed: Any) -> Any:
    """Start a product on each device, then wait for all; return the devices that go on."""
    started = []
    for row, on, product in placed:
        lhs, right, rows, columns = on
        try:
            torch.mm(lhs, right, out=product)
            differs = (product.sum(1, dtype=torch.float64) != rows).any()
            differs |= (product.sum(0, dtype=torch.float64) != columns).any()
            started.append((row, on, product, differs))
        except RuntimeError as error:
            _failed(torch, row, error)
    products = []
    for row, on, product, differs in started:
        if _counted(torch, row, differs):
            products.append((row, on, product))
    return products


def _counted(torch: Any, row: dict[str, Any], differs: Any) -> bool:
    """Wait for a product and count it; return whether the device goes on."""
    try:
        row["wrong"] += int(bool(differs))
        row["products"] += 1
    except RuntimeError as error:
        _failed(torch, row, error)
        return False
    return True


def _row(name: str) -> dict[str, Any]:
    counts = dict.fromkeys(("free", "total", "products", "wrong"), 0)
    return {"device": name, "name": "", **counts, "no_memory": False, "in_use": False, "error": ""}


def _describe(torch: Any, row: dict[str, Any]) -> None:
    if row["device"] != "cpu":
        row["name"] = torch.cuda.get_device_name(row["device"])
        row["free"], row["total"] = torch.cuda.mem_get_info(row["device"])
        row["in_use"] = row["total"] - row["free"] > OTHERS * row["total"]


def _failed(torch: Any, row: dict[str, Any], error: Exception) -> None:
    row["no_memory"] = isinstance(error, torch.cuda.OutOfMemoryError)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    row["error"] = lines[0][:200]


def main() -> None:
    """Multiply for as long as the command line says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job
    try:
        torch = find_torch()
    except ImportError as error:
        print(json.dumps({"error": f"torch cannot be imported: {error}"}), flush=True)
        raise SystemExit(3) from None
    rows = multiply_matrices(torch, visible_devices(torch), float(sys.argv[1]))
    print(json.dumps({"torch": str(torch.__version__), "devices": rows}), flush=True)


if __name__ == "__main__":
    main()
