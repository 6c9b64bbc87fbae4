"""`python -I checkpoint < request.json`: verifies checkpoints one after another.

Request: `{"paths": [...], "load": true, "finite": true, "optimizer": false}`. The first line of the
answer is `{"environment": {...}}`, followed by one line of `verify_checkpoint` per path, so that a
crash loses no earlier result. Exit status 3: torch cannot be imported.
"""

import hashlib
import json
import os
import platform
import signal
import sys
from importlib import metadata
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

sys.path.append(ROOT)  # for the next import only: other packages there are not the job's
try:
    from supervise_offline import find_torch
    from supervise_offline.checkpoint import verify
finally:
    sys.path.remove(ROOT)


def yield_memory() -> None:
    """Be the first process to be killed when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:  # not Linux
        pass


def describe_environment(torch: Any) -> dict[str, Any]:
    """Return the versions of the packages that are installed here.

    `lock` is the SHA-256 over all `name==version`, sorted.
    """
    installed = {f"{d.metadata['Name']}=={d.version}".lower() for d in metadata.distributions()}
    lock = "\n".join(sorted(installed))
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "packages": len(installed),
        "lock": "sha256:" + hashlib.sha256(lock.encode()).hexdigest(),
    }


def main() -> None:
    """Answer the request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job
    yield_memory()
    request = json.load(sys.stdin)
    try:
        torch = find_torch()
    except ImportError as error:
        print(json.dumps({"error": f"torch cannot be imported: {error}"}), flush=True)
        raise SystemExit(3) from None
    torch.set_num_threads(1)
    print(json.dumps({"environment": describe_environment(torch)}), flush=True)
    for path in request["paths"]:
        verify.exit_when_stalled()
        print(json.dumps(verify.verify_checkpoint(torch, path, request)), flush=True)


if __name__ == "__main__":
    main()
