"""Host copies are made without allocating, once the job repeats itself."""

SCRIPT = """
import pytest
import gc, json, weakref, torch
from supervise_probe.capture.tensor_copies import TensorCopies, BufferPool

pytestmark = pytest.mark.slow

state = [torch.randn(300), torch.randn(20, 30), torch.tensor(1.0), torch.randn(4, 6).t()]
frozen = torch.randn(1 << 19)
kept, pool, before, addresses, shared = [], BufferPool(), None, [], []
for step in range(12):
    for tensor in state:
        tensor.add_(1)
    if step == 9:
        frozen.data[::7].mul_(2)  # not counted as a change by torch
    copies = TensorCopies(torch, before)
    numbers = [copies.add(tensor, bulk=True) for tensor in (*state, *state)]
    shared.append(copies.add(frozen))
    copies.share()
    if len(kept) == 3:
        kept.pop(0).release(pool)
    copies.copy(pool)
    kept.append(copies)
    before = copies
    addresses.append([slot.buffer.data_ptr() for slot in copies.slots])

bulk = [set(column) for column in zip(*addresses)][:4]
frozen_at = [row[4] for row in addresses]
once = len(numbers) == 2 * len(set(numbers))

saved = [tensor.clone() for tensor in state]
for tensor in state:
    tensor.zero_()
kept[-1].write_training_state()
equal = all(map(torch.equal, state, saved))

held = torch.arange(6)[:3]
once_only = TensorCopies(torch)
alive = once_only.add(held)
gone = once_only.add(torch.arange(3.0))
nan = torch.full((2,), float("nan")).expand(3, 2)
same_bits = once_only.add(nan)
once_only.copy(BufferPool())
held.zero_()
back = [once_only.restored(n) for n in (alive, gone, same_bits)]
reference = weakref.ref(held)
in_place = back[0] is held
del held, back[0]
gc.collect()
print(json.dumps([
    [len(column) for column in bulk], [len(set(frozen_at[:9])), frozen_at[8] != frozen_at[9]],
    once, equal, in_place, back[0].tolist(), back[1] is nan, reference() is None,
]))
"""


def test_buffers_are_used_again_and_large_constant_tensors_copied_once(jobs):
    """Three savepoints use three buffers per tensor, whatever the length of the run."""
    buffers, frozen, once, equal, in_place, fresh, same, gone = jobs.run(SCRIPT)[0]
    assert buffers == [3, 3, 3, 3]
    assert frozen == [1, True]
    assert once
    assert equal
    assert in_place
    assert fresh == [0.0, 1.0, 2.0]
    assert same  # never written to: it repeats its memory, and already holds the right bits
    assert gone
