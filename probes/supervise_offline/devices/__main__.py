"""`python -I devices SECONDS`: prints one JSON line, `{"torch": version, "devices": [...]}`.

The rows are those of `products.multiply`. Exit status 3, with `{"error": ...}`: torch cannot be
imported.
"""

import json
import os
import signal
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

sys.path.append(ROOT)  # for the next import only: other packages there are not the job's
try:
    from supervise_offline.devices import products
    from supervise_offline.torch_import import find_torch
finally:
    sys.path.remove(ROOT)


def main() -> None:
    """Multiply for as long as the command line says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job
    try:
        torch = find_torch()
    except ImportError as error:
        print(json.dumps({"error": f"torch cannot be imported: {error}"}), flush=True)
        raise SystemExit(3) from None
    rows = products.multiply(torch, products.devices(torch), float(sys.argv[1]))
    print(json.dumps({"torch": str(torch.__version__), "devices": rows}), flush=True)


if __name__ == "__main__":
    main()
