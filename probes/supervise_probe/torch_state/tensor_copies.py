"""Host copies of tensors, made without a device sync and without allocating when they repeat.

Rule 1: a tensor of the job is referenced weakly; only the copy is held.
Rule 2: all copies of one savepoint are made by one call, into the buffers of an evicted savepoint.
Rule 3: nothing is written into memory that already holds the right bytes: a tensor may be a view of
a read-only file, where a write would kill the job.

Copies from CUDA go to pinned memory and are not waited for; the stream orders them before the next
kernel, and an event shows when the host may read them.

Of a DTensor each rank copies its own part, and writes it back into that part: no rank needs another
for it.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any, Callable, Iterable, Optional

_LARGE_BYTES = 1 << 18  # a larger copy is shared between savepoints while nothing changed
_SAMPLES = 256  # elements compared to find out whether a large tensor changed behind torch's back


def local_part(tensor: Any) -> Any:
    """Return the part of a DTensor that this rank holds, any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


class BufferPool:
    """Buffers of evicted savepoints, for reuse."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[Any]] = {}

    def put(self, key: tuple[Any, ...], buffer: Any) -> None:
        """Add a buffer that is no longer used."""
        self._free.setdefault(key, []).append(buffer)

    def take_buffer(self, key: tuple[Any, ...]) -> Any:
        """Return a buffer for a copy of such a tensor, or None."""
        free = self._free.get(key)
        return free.pop() if free else None


class _Slot:
    """One tensor of the job and its copy."""

    __slots__ = (
        "buffer",
        "bulk",
        "device",
        "key",
        "layout",
        "owner",
        "requires_grad",
        "sample",
        "shared",
        "spec",
        "version",
    )

    def __init__(self, tensor: Any, owner: Any) -> None:
        self.owner: Callable[[], Any] = weakref.ref(owner)
        # How a DTensor is spread over the ranks, with its class; None of any other tensor.
        spec = getattr(owner, "_spec", None)
        self.spec = None if spec is None else (type(owner), spec)
        shape, stride = tensor.shape, tensor.stride()
        # Tensors with overlapping memory or of inference mode cannot be written in bulk.
        repeats = 0 in stride and any(s == 0 and n > 1 for s, n in zip(stride, shape))
        self.bulk = not repeats and not tensor.is_inference()
        self.device = tensor.device
        self.requires_grad: bool = tensor.requires_grad
        self.key = (tensor.dtype, shape, stride, tensor.is_cuda)
        self.buffer: Any = None
        self.layout: tuple[int, ...] = ()  # strides of the buffer, while it is on disk
        self.shared = False  # with another savepoint
        self.version = -1
        self.sample: Any = None  # only of a large tensor that may be shared


class TensorCopies:
    """The tensors of one savepoint, each under the number that `add` returned for it.

    Attributes:
        nbytes: of all planned or made copies. in_memory: false while they are on disk only.
    """

    def __init__(self, torch: ModuleType, older: Optional["TensorCopies"] = None) -> None:
        """`before`: the copies of the previous savepoint, to share what has not changed."""
        self._torch = torch
        self.slots: list[_Slot] = []
        self.nbytes = 0
        self.in_memory = True
        self._numbers: dict[int, int] = {}
        self._sources: list[Any] = []
        self._owners: list[Any] = []  # keeps the ids in _numbers valid until `copy`
        self._events: list[Any] = []
        self._shareable: dict[int, _Slot] = {}
        if older is not None:
            self._shareable = {
                id(slot.owner()): slot for slot in older.slots if slot.sample is not None
            }

    def add(self, owner: Any) -> int:
        """Plan a copy of a dense tensor; the same tensor twice gets the same number."""
        number = self._numbers.get(id(owner))
        if number is not None:
            return number
        tensor = local_part(owner)
        self.slots.append(_Slot(tensor, owner))
        self._numbers[id(owner)] = number = len(self.slots) - 1
        self._sources.append(tensor)
        self.nbytes += tensor.numel() * tensor.element_size()
        self._owners.append(owner)
        return number

    def share(self) -> None:
        """Share what has not changed with the previous savepoint, before it may be dropped."""
        for slot, tensor in zip(self.slots, self._sources):
            self._share(slot, tensor)
        self._shareable = {}

    def copy(self, pool: BufferPool) -> None:
        """Make all copies. Afterwards no tensor of the job is held."""
        torch: Any = self._torch
        targets, sources, devices = [], [], set()
        for slot, tensor in zip(self.slots, self._sources):
            if slot.buffer is not None:
                continue
            slot.buffer = pool.take_buffer(slot.key)
            if slot.buffer is None:
                slot.buffer = torch.empty_like(
                    tensor, device="cpu", requires_grad=False, pin_memory=slot.key[-1]
                )
            targets.append(slot.buffer)
            sources.append(tensor)
            if slot.key[-1]:
                devices.add(slot.device)
        with torch.no_grad():
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=bool(devices))
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)
        self._sources, self._owners, self._numbers = [], [], {}

    def copy_from_older(self, older: "TensorCopies", tensors: Iterable[Any]) -> bool:
        """Let the copies of some tensors be as those of an older savepoint, which is in memory.

        Returns whether it has one of each, in the same shape. Tensors without a copy stay so.
        """
        slots = {id(slot.owner()): slot for slot in self.slots}
        older_slots = {id(slot.owner()): slot for slot in older.slots}
        for tensor in tensors:
            slot, old = slots.get(id(tensor)), older_slots.get(id(tensor))
            if slot is None:
                continue
            if old is None or old.key != slot.key:
                return False
            if slot.buffer is not old.buffer:  # else nothing changed, and they share it
                slot.buffer.copy_(old.buffer)
            slot.sample = None  # no later savepoint may share it: the tensor has another content
        return True

    def release(self, pool: BufferPool) -> None:
        """Release the memory; the content is on disk, or no longer needed."""
        self.wait()
        for slot in self.slots:
            slot.layout = slot.buffer.stride()
            if not slot.shared:
                pool.put(slot.key, slot.buffer)
            slot.buffer = slot.sample = None
        self.in_memory = False

    def allocate(self, torch: ModuleType, pool: BufferPool) -> None:
        """Allocate memory for content that is about to be read."""
        for slot in self.slots:
            slot.shared = False
            slot.buffer = pool.take_buffer(slot.key)
            if slot.buffer is None or slot.buffer.stride() != slot.layout:
                dtype, shape = slot.key[:2]
                slot.buffer = torch.empty_strided(
                    shape, slot.layout, dtype=dtype, pin_memory=slot.key[-1]
                )
        self.in_memory = True

    def _share(self, slot: _Slot, tensor: Any) -> None:
        """Use the previous savepoint's copy of a large tensor that has not been written since.

        The version shows writes through torch, a sample most others (`.data`).
        """
        if slot.requires_grad or tensor.numel() * tensor.element_size() < _LARGE_BYTES:
            return
        if slot.key[-1] or not writes_are_counted(tensor):
            return
        if not tensor.is_contiguous():
            return
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)]
        slot.version = tensor._version
        old = self._shareable.get(id(slot.owner()))
        if (
            old is not None
            and old.version == slot.version
            and old.key == slot.key
            and self._torch.equal(old.sample, sample)
        ):
            slot.buffer, slot.sample = old.buffer, old.sample
            slot.shared = old.shared = True
        else:
            slot.sample = sample.clone()

    def wait(self) -> None:
        """Wait for the copies to arrive; they have, except right after `copy`."""
        for event in self._events:
            event.synchronize()
        self._events = []

    def live_tensor(self, number: int) -> Any:
        """Return the job's own tensor, or None when it no longer exists."""
        owner = self.slots[number].owner()
        fix = getattr(owner, "_fix_weakref", None)
        if fix is not None:
            fix()  # torch may own the object, and must know of a new Python reference
        return owner

    def write(self) -> None:
        """Write the copies back into those tensors that still exist, in place."""
        self.wait()
        targets, sources = [], []
        for number, slot in enumerate(self.slots):
            tensor = self.live_tensor(number) if slot.bulk else None
            if tensor is not None:
                targets.append(local_part(tensor))
                sources.append(slot.buffer)
        if targets:
            with self._torch.no_grad():
                self._torch._foreach_copy_(targets, sources, non_blocking=False)

    def shape_changed(self, number: int) -> bool:
        """Whether the job's tensor exists but has another shape or type."""
        tensor, key = local_part(self.live_tensor(number)), self.slots[number].key
        return tensor is not None and (tensor.dtype, tensor.shape) != key[:2]

    def any_freed(self) -> bool:
        """Whether the job has freed the memory of a tensor since: writing there ends it."""
        tensors = (local_part(self.live_tensor(number)) for number in range(len(self.slots)))
        return not all(tensor is None or has_readable_memory(tensor) for tensor in tensors)

    def any_shape_changed(self) -> bool:
        """Whether `write` would fail."""
        return any(slot.bulk and self.shape_changed(i) for i, slot in enumerate(self.slots))

    def restored_tensor(self, number: int) -> Any:
        """Return the tensor with its saved content: the job's own, else a new one."""
        slot, owner = self.slots[number], self.live_tensor(number)
        if owner is None:
            return self._new(slot)
        return owner if slot.bulk or self._write(slot, owner) else self._new(slot)

    def _new(self, slot: _Slot) -> Any:
        """Return a new tensor with the saved content, on its device."""
        self.wait()
        tensor = slot.buffer.clone() if slot.device.type == "cpu" else slot.buffer.to(slot.device)
        if slot.spec is not None:
            kind, spec = slot.spec
            return kind(tensor, spec, requires_grad=slot.requires_grad)
        return tensor.requires_grad_(slot.requires_grad)

    def _write(self, slot: _Slot, owner: Any) -> bool:
        """Write the saved content into `owner` where it differs; False if it cannot be."""
        self.wait()
        try:
            tensor = local_part(owner)
            if tensor.device.type == "cpu" and same_bits(self._torch, tensor, slot.buffer):
                return True
            if tensor.shape != slot.buffer.shape:
                return False
            with self._torch.no_grad():
                tensor.copy_(slot.buffer)
        except (RuntimeError, TypeError):  # inference tensors, overlapping memory
            return False
        return True


def same_bits(torch: ModuleType, a: Any, b: Any) -> bool:
    """Whether two tensors are equal bit by bit, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    raw = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return bool(torch.equal(*raw))


def writes_are_counted(tensor: Any) -> bool:
    """Whether torch's version counter sees all writes: no numpy array shares the memory.

    Torch marks shared memory as not resizable.
    """
    return not tensor.is_inference() and bool(tensor.untyped_storage().resizable())


def has_readable_memory(tensor: Any) -> bool:
    """Whether the storage of a dense tensor, of no class of its own, covers all its elements.

    A job may free it (`untyped_storage().resize_(0)`) and fill it again before it needs it, as
    offload of optimizer state does: to touch it in between ends the process. Takes 1 us.
    """
    if not tensor.numel():
        return True
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    size_bytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() >= size_bytes)


def is_readable(torch: Any, tensor: Any) -> bool:
    """Whether the values of any tensor of the job lie in memory of its own, on whatever device.

    Neither an address nor an operator of torch leads anywhere if its class dispatches by itself
    (jagged, fake and distributed tensors), or if the job has freed its storage.
    """
    kind = torch.Tensor
    if type(tensor) is not kind and type(tensor).__torch_dispatch__ is not kind.__torch_dispatch__:
        return False
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    try:
        return bool(tensor.data_ptr()) and has_readable_memory(tensor)
    except RuntimeError:  # it has no storage, as inside a transform of functorch
        return False


def is_copyable(torch: Any, tensor: Any) -> bool:
    """Whether a tensor, or this rank's part of it, is plain memory: dense, on CPU or CUDA."""
    tensor = local_part(tensor)
    return is_plain(torch, tensor) and has_readable_memory(tensor)


def is_plain(torch: Any, tensor: Any) -> bool:
    """Whether a tensor, or this rank's part of it, is dense, on CPU or CUDA; it may be freed."""
    tensor = local_part(tensor)
    return bool(
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not torch.nn.parameter.is_lazy(tensor)
        and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    )
