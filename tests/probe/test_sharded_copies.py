"""A savepoint of sharded weights holds this rank's part, and puts it back into that part."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# One rank is enough: how a part is copied does not depend on how many there are.
SCRIPT = """
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from supervise_probe.torch_state.tensor_copies import BufferPool, TensorCopies, is_copyable

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
weight = distribute_tensor(torch.arange(12.0).view(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
moment = weight.clone()
assert is_copyable(torch, weight)
copies = TensorCopies(torch)
first, second = copies.add(weight), copies.add(moment)
copies.copy(BufferPool())
part = weight.to_local()
weight.mul_(3.0)
del moment
copies.write()
assert torch.equal(part, torch.arange(12.0).view(4, 3)) and copies.original(first) is weight
again = copies.restored(second)
assert isinstance(again, DTensor) and again.placements == weight.placements
assert torch.equal(again.to_local(), part)
print("done")
"""


def test_a_part_goes_back_where_it_was_and_a_lost_one_is_made_again():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )

    assert run.stdout.endswith("done\n"), run.stderr
