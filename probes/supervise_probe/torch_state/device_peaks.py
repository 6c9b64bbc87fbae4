"""Peak operations per second of devices, by their torch names.

Dense peaks of the tensor or matrix cores in BF16, or FP16 where there is no BF16, with accumulation
in FP32; those are what training uses. Data sheets often list twice as much, for sparse matrices.
For one device of torch: that is half a card for an MI250X.

Source: the data sheets and architecture papers of NVIDIA and AMD.
"""

from __future__ import annotations

import re
from typing import Optional

# Words of a name, all of which must be there; the first line that fits holds. 1e12 a second.
_PEAKS = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIE", 756.0),
    ("H100", 989.4),
    ("H800 PCIE", 756.0),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L20", 119.5),
    ("L4", 121.0),
    ("T4", 65.0),
    ("V100 PCIE", 112.0),
    ("V100", 125.0),
    ("RTX 6000 ADA", 182.1),
    ("RTX A6000", 154.8),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI355X", 2516.0),
    ("MI350X", 2307.0),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI300A", 980.6),
    ("MI250X", 191.5),
    ("MI250", 181.0),
    ("MI210", 181.0),
)
_LESS = {"MIG", "LAPTOP", "D"}  # a slice of a device, or a slower edition of that name


def peak_of(name: str) -> Optional[float]:
    """Return the peak of the device called `name` in FLOP/s; None if it is not in the table."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if words & _LESS:
        return None
    for needed, peak in _PEAKS:
        if words.issuperset(needed.split()):
            return peak * 1e12
    return None
