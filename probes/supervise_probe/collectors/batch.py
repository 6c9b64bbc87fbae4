"""Fingerprint of a step's data: an order-sensitive hash of what went into the model.

It distinguishes batches and finds them again; it is no checksum of the data set. The first tensor
that goes into the outermost module is hashed, with gradients on: one of whole numbers before one of
floats, and what is passed as it is before what is inside something else
(`collectors/batch.py`). Before that module is known, or where it is given no tensor, it is
the first tensor of a DataLoader's batch.

Of more than 512 bytes a sample is hashed, in pieces all over it: batches often begin alike, with
the same prompt or a white border. Two that differ in a few values only may get the same number.
"""

from __future__ import annotations

from collections import UserDict
from ctypes import c_char, string_at
from itertools import islice
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple
from zlib import crc32

from ..spec import MetricSpec
from ..torch_state.structure import attributes
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step, Update

DEPTH = 4  # levels
MOST = 64  # values of one container, and of one level
WHOLE_NUMBERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")


class Found(NamedTuple):
    """A tensor, and whether its shape gives how much went into the model.

    It does not for whole numbers that are no indices, and in a list, which may hold samples.
    """

    tensor: Any
    counts: bool


class Inputs:
    """Looks for tensors of this torch."""

    def __init__(self, torch: Any) -> None:
        self._tensor = torch.Tensor
        self._strided, self._bool = torch.strided, torch.bool
        self._indices = (torch.int64, torch.int32)
        self._whole = {getattr(torch, name, None) for name in WHOLE_NUMBERS}

    def find(self, values: Iterable[Any]) -> Optional[Found]:
        """Return the first of whole numbers, else of floats, in the first level that has one.

        One of truth values, if there is nothing else at all: it may be a mask that stays.
        """
        mask: Optional[Found] = None
        level = [(value, True) for value in values]
        for _ in range(DEPTH):
            floats: Optional[Found] = None
            inner: List[Tuple[Any, bool]] = []
            for value, alone in level:
                if not isinstance(value, self._tensor):
                    sole = alone and not isinstance(value, list)
                    inner += [(item, sole) for item in islice(_contents(value), MOST)]
                elif value.numel() > 1 and value.layout is self._strided and not value.is_nested:
                    kind = value.dtype
                    if kind in self._whole:
                        return Found(value, alone and kind in self._indices)
                    if kind.is_floating_point:
                        floats = floats or Found(value, alone)
                    elif kind is self._bool:
                        mask = mask or Found(value, False)
            if floats:
                return floats
            level = inner[:MOST]
        return mask


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return dict.values(value)
    if isinstance(value, tuple):
        return tuple.__iter__(value)
    if isinstance(value, list):
        return list.__iter__(value)
    if isinstance(value, UserDict) or hasattr(type(value), "__dataclass_fields__"):
        return attributes(value).values()
    return ()


BATCH_METRICS = (
    MetricSpec(
        "batch_fingerprint",
        "1",
        "Hash of the step's input as a whole number below 2^52; absent if no input was seen.",
        "CRC-32 of 512 bytes of its first tensor, and its size; on a device a weighted sum of its "
        "first 16384 values. Whole numbers come before floats; dicts, sequences and dataclasses "
        "are looked into",
        "one look at 512 bytes; on a device one pass over 16384 values",
    ),
)

LONGEST = 16384  # values hashed per input on a device
PIECE = 128  # bytes
SMALL = 512  # bytes; up to so many all are hashed
LAYOUTS = 64  # shapes that are remembered: a job mostly has one or two
PLACES = tuple((index * 0.6180339887498949) % 1.0 for index in range(1, SMALL // PIECE + 1))
ABSENCES = (2, 16, 128)  # steps without a batch, at which the model is looked for
_MASK = (1 << 52) - 1
_MIX = 6364136223846793005  # odd; keeps the order of micro-batches


class BatchCollector(Collector):
    """Fingerprint of a step's data: an order-sensitive hash of what went into the model.

    Hashes on the device where the batch is; only the hash travels.

    Attributes:
        seen: something that went into the model was hashed.
        on_device: the hash of the newest step is known a step late only.
    """

    METRICS = BATCH_METRICS

    def __init__(self, context: ProbeContext, look_inside: Callable[[], None]) -> None:
        """`look_inside`: the outermost modules are not called; see what they are wrapped around."""
        super().__init__(context)
        self._hash: Any = None
        self._loaded: Any = None
        self._of_step: Any = None
        self._weights: Dict[Any, Any] = {}
        self._layouts: Dict[Any, Layout] = {}
        self._integers = (self.torch.int64, self.torch.int32)
        self._inputs = Inputs(self.torch)
        self._views = {
            1: self.torch.uint8,
            2: self.torch.int16,
            4: self.torch.int32,
            8: self.torch.int64,
        }
        self._look_inside = look_inside
        self._absent = 0
        self._by_loader = False  # steps were told by it before a model was found: so it stays
        self.seen = self.on_device = False

    def saw_loaded(self, values: Iterable[Any]) -> None:
        """These came out of a loader."""
        tensor = self._first_tensor(values)
        if tensor is None:
            inner = self._inputs.find(values)
            tensor = inner and inner.tensor
        if tensor is not None:
            digest = self._digest(tensor)
            self._loaded = digest if self._loaded is None else self._mix(self._loaded, digest)

    def saw(self, values: Iterable[Any]) -> Optional[Any]:
        """These went into the model; return what was hashed, if its shape gives how much it is."""
        tensor = counted = self._first_tensor(values)
        if tensor is None:
            inner = self._inputs.find(values)
            if inner is None:
                return None
            tensor = inner.tensor
            counted = tensor if inner.counts else None
        if self._by_loader:
            return counted
        digest = self._digest(tensor)
        self._hash = digest if self._hash is None else self._mix(self._hash, digest)
        self.seen = True
        return counted

    def forget(self) -> None:
        self._hash = None

    def after_update(self, update: Update) -> None:
        digest = self._loaded if self._hash is None else self._hash
        self._hash = self._loaded = None
        if self._of_step is None:
            self._of_step = digest
        elif digest is not None:
            self._of_step = self._mix(self._of_step, digest)

    def newest(self) -> Optional[float]:
        """Return the fingerprint of the update under way, None where the host does not have it."""
        digest = self._loaded if self._hash is None else self._hash
        return float(digest & _MASK) if isinstance(digest, int) else None

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        digest, self._of_step = self._of_step, None
        if isinstance(digest, int):
            values["batch_fingerprint"] = float(digest & _MASK)
        elif digest is not None:
            self.on_device = True
            values["batch_fingerprint"] = self.scalars.value(digest & _MASK)
        if not self.seen:
            self._absent += 1
            if self._absent in ABSENCES:
                self._by_loader |= digest is not None
                self._look_inside()

    def so_far(self) -> Optional[int]:
        """Return the fingerprint of the step if no more goes in; None where it is on a device."""
        digest = self._loaded if self._hash is None else self._hash
        combined = self._of_step
        if digest is not None:
            combined = digest if combined is None else self._mix(combined, digest)
        return combined & _MASK if isinstance(combined, int) else None

    def _first_tensor(self, values: Iterable[Any]) -> Optional[Any]:
        fallback = None
        tensor = self.torch.Tensor
        for value in values:
            if (type(value) is tensor or isinstance(value, tensor)) and value.numel() > 1:
                kind = value.dtype
                if kind in self._integers:
                    return value
                if fallback is None and kind is self.torch.float32:
                    fallback = value
        return fallback

    def _mix(self, so_far: Any, digest: Any) -> Any:
        return (
            (so_far & _MASK) * _MIX + digest if isinstance(digest, int) else so_far * _MIX + digest
        )

    def _digest(self, tensor: Any) -> Any:
        torch = self.torch
        if self.scalars.reads(tensor):
            return _digest_of_memory(tensor, self._layouts)
        flat = tensor.detach().reshape(-1)[:LONGEST]
        if flat.dtype not in self._integers:
            double = flat.dtype is torch.float64
            flat = flat.view(self._views[flat.element_size()])
            if double:  # short numbers have all of their bits above those that are kept
                flat = flat ^ flat >> 32
        weights = self._weights.get(flat.device)
        if weights is None:
            places = torch.arange(1, LONGEST + 1, dtype=torch.int64, device=flat.device)
            weights = self._weights[flat.device] = places * 2654435761 | 1
        return (flat.to(torch.int64) * weights[: flat.numel()]).sum()


_Piece = c_char * PIECE


class Layout(NamedTuple):
    """Where the pieces of a tensor of some shape lie.

    Attributes:
        offsets: in bytes behind its first value; none where it has to be copied first.
        length: of each piece, in bytes. size: of the whole, as a part of the hash.
    """

    offsets: Tuple[int, ...]
    length: int
    size: int


def _digest_of_memory(tensor: Any, layouts: Dict[Any, Layout]) -> int:
    """Return a number below 2^52 that identifies the values of a tensor on the host.

    Read from memory, since one call of torch costs as much as all of this; and by one array type of
    ctypes, since each new one is a cycle that waits for the garbage collector. `layouts` remembers
    where to look.
    """
    key = tensor.dtype, tensor.shape, tensor.stride()
    layout = layouts.get(key)
    if layout is None:
        if len(layouts) >= LAYOUTS:
            layouts.clear()
        layout = layouts[key] = _layout(tensor)
    offsets, length, size = layout
    if not offsets:
        return _digest_of_memory(tensor.contiguous(), layouts)
    start, checksum = tensor.data_ptr(), 0
    if length == PIECE:
        for offset in offsets:
            checksum = crc32(_Piece.from_address(start + offset), checksum)
    else:
        for offset in offsets:
            checksum = crc32(string_at(start + offset, length), checksum)
    return checksum | size


def _layout(tensor: Any) -> Layout:
    width = int(tensor.element_size())
    size = int(tensor.numel()) * width
    line, stride = size, 0  # bytes in a row, and from one row to the next
    if not tensor.is_contiguous():
        if tensor.dim() != 2 or tensor.stride(1) != 1 or size <= SMALL:
            return Layout((), 0, 0)
        line, stride = int(tensor.size(1)) * width, int(tensor.stride(0)) * width
    part = (size & 0xFFFFF) << 32
    if size <= SMALL:
        return Layout((0,), size, part)
    piece = min(PIECE, line)
    offsets = []
    for fraction in PLACES:
        row, column = divmod(int(fraction * size), line)
        offsets.append(row * stride + min(column - column % width, line - piece))
    return Layout(tuple(offsets), piece, part)
