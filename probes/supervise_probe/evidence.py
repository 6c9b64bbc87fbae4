"""What a snapshot can only learn from inside the job: stacks, random states, the last batches.

Writes plain files into the directory it is given; the supervisor adds the rest of the bundle.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import os
import random
import sys
from typing import Any, Dict, List, Mapping


def write(directory: str, rank: int, torch: Any, batches: List[Mapping[str, Any]]) -> List[str]:
    """Write the three files of one rank and return their paths.

    Raises:
        OSError: the directory cannot be written.
    """
    os.makedirs(directory, exist_ok=True)
    paths = []
    stacks = os.path.join(directory, f"rank-{rank}-stacks.txt")
    with open(stacks, "w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    paths.append(stacks)
    for name, content in (("rng", random_states(torch)), ("batches", batches)):
        path = os.path.join(directory, f"rank-{rank}-{name}.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, default=_plain)
        paths.append(path)
    return paths


def random_states(torch: Any) -> Dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, read without drawing."""
    states: Dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if hasattr(numpy, "random"):
        states["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _plain(value: Any) -> Any:
    """JSON for arrays and tensors: their bytes in base64."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if hasattr(value, "tobytes"):
        return base64.b64encode(value.tobytes()).decode("ascii")
    return str(value)
