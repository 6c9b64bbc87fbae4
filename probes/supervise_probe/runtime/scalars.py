"""Numbers that may live on an accelerator: read without ever making the host wait for it.

A value that the CPU holds is read at once. Values on an accelerator are packed into one copy to
pinned memory, and read at a later boundary, when the copy has long arrived; a frame is then one
step late. `tensor.item()` one step later would not do: it waits for everything queued since.

Knows no metric. `late=True` treats CPU tensors as an accelerator's, so that tests on machines
without one walk the same path.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional, Union

Number = Union[float, Any]  # a float, or a 0-dim tensor on an accelerator


class Scalars:
    """Reads 0-dim tensors for one process."""

    def __init__(self, torch: Any, late: bool = False) -> None:
        self._torch = torch
        self._late = late
        self._buffers: list[Any] = []

    def value(self, tensor: Any) -> Number:
        """Return what a one-element tensor holds now.

        Returns:
            A float if the host has it; else a private wide copy on its device, which no later
            in-place operation of the job can change. Both take part in arithmetic alike.
        """
        if tensor.is_cpu and not self._late:  # as `can_read_now`
            return float(tensor.item())
        torch = self._torch
        wide = torch.float32 if tensor.device.type == "mps" else torch.float64  # mps has no 64
        return tensor.detach().reshape(()).to(wide, copy=True)

    def can_read_now(self, tensor: Any) -> bool:
        """Whether the host can look into `tensor` without waiting."""
        return bool(tensor.is_cpu) and not self._late  # .device.type costs 20 us behind a forward

    def on_host(self, value: Number) -> bool:
        """Whether `value` is a number that can be looked at now."""
        return not isinstance(value, self._torch.Tensor)

    def larger(self, a: Number, b: Number) -> Number:
        """Return the larger of two numbers, wherever they are."""
        if self.on_host(a) and self.on_host(b):
            return max(a, b)
        return self._torch.maximum(*map(self._torch.as_tensor, (a, b)))

    def pack(self, values: Mapping[str, Number]) -> Optional[Pending]:
        """Start to bring `values` to the host; None if all of them are there."""
        if self._torch.Tensor not in set(map(type, values.values())):
            return None
        host: dict[str, float] = {}
        names: list[str] = []
        tensors: list[Any] = []
        for name, value in values.items():
            if isinstance(value, self._torch.Tensor):
                names.append(name)
                tensors.append(value)
            else:
                host[name] = value
        with self._torch.no_grad():
            device = tensors[0].device
            packed = self._torch.stack([t.to(device, non_blocking=True) for t in tensors])
            buffer = self._buffer(len(names), device)
            buffer[: len(names)].copy_(packed, non_blocking=True)
        return Pending(host, names, buffer, self.event(device), self._buffers)

    def _buffer(self, size: int, device: Any) -> Any:
        if self._buffers and self._buffers[-1].numel() >= size:
            return self._buffers.pop()
        pinned = device.type == "cuda"
        return self._torch.empty(
            max(64, size), dtype=self._torch.float64, device="cpu", pin_memory=pinned
        )

    def event(self, device: Any) -> Any:
        """Return an event whose `query()` is true when all that is queued on `device` is done.

        It stands in the stream of that device, which need not be the current one: behind a copy on
        another, an event of the current device would be over before the copy is.
        """
        backend: Any = None if device.type == "cpu" else getattr(self._torch, device.type, None)
        if not hasattr(backend, "Event"):
            return _NextLook()
        event = backend.Event()
        stream = getattr(backend, "current_stream", None)  # mps has one stream, and no name for it
        event.record(*(() if stream is None else (stream(device),)))
        return event


class Pending:
    """Values on their way to the host."""

    __slots__ = ("_buffer", "_event", "_host", "_names", "_pool")

    def __init__(
        self, host: dict[str, float], names: list[str], buffer: Any, event: Any, pool: list[Any]
    ) -> None:
        self._host = host
        self._names = names
        self._buffer = buffer
        self._event = event
        self._pool = pool

    def ready(self) -> bool:
        """Whether `read` finds everything. Never waits."""
        return bool(self._event.query())

    def read(self) -> dict[str, float]:
        """Return the values; those that have not arrived are left out."""
        if self._buffer is not None and self.ready():
            arrived: list[float] = self._buffer[: len(self._names)].tolist()
            self._host.update(zip(self._names, arrived))
            self._pool.append(self._buffer)
            self._buffer = None
        return self._host


class _NextLook:
    """Stands in for a device's event: over at the second look."""

    def __init__(self) -> None:
        self._looks = 0

    def query(self) -> bool:
        self._looks += 1
        return self._looks > 1
