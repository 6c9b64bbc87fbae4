"""The versions of all packages of the interpreter that wrote a checkpoint."""

import hashlib
import platform
import sys
from importlib import metadata
from typing import Any, Dict


def describe(torch: Any) -> Dict[str, Any]:
    """Return the versions, and under `lock` the SHA-256 over all `name==version`, sorted."""
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
