"""The data of a step: its fingerprint, its token statistics, its shard."""

from __future__ import annotations

import functools
import weakref
from collections import Counter, UserDict, deque
from ctypes import c_char, string_at
from itertools import islice
from math import inf, log
from time import thread_time_ns
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Optional
from zlib import crc32

from ..sampling.sample_sets import FLOOR_NS, LEAST, SPARSEST, TOKENS
from ..shards import SEVERAL, Origin, ShardTracker
from ..torch_state.structure import own_attributes
from ..torch_state.tensor_copies import is_readable
from . import Collector, MetricSpec
from .token_statistics import (
    BUCKETS,
    LONGEST,
    MOST,
    OUTSIDE,
    STEPS,
    UNSEEN,
    BlockSkew,
    SequenceLengths,
    SourceMix,
    TokenTable,
    named_inputs,
)

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..sampling.sample_sets import SampleSets
    from ..torch_state.records import Step, Update

DEPTH = 4  # levels
WHOLE_NUMBERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")


class BatchTensor(NamedTuple):
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

    def find(self, values: Iterable[Any]) -> Optional[BatchTensor]:
        """Return the first of whole numbers, else of floats, in the first level that has one.

        One of truth values, if there is nothing else at all: it may be a mask that stays.
        """
        mask: Optional[BatchTensor] = None
        level = [(value, True) for value in values]
        for _ in range(DEPTH):
            floats: Optional[BatchTensor] = None
            inner: list[tuple[Any, bool]] = []
            for value, alone in level:
                if not isinstance(value, self._tensor):
                    sole = alone and not isinstance(value, list)
                    inner += [(item, sole) for item in islice(_contents(value), MOST)]
                elif value.numel() > 1 and value.layout is self._strided and not value.is_nested:
                    kind = value.dtype
                    if kind in self._whole:
                        return BatchTensor(value, alone and kind in self._indices)
                    if kind.is_floating_point:
                        floats = floats or BatchTensor(value, alone)
                    elif kind is self._bool:
                        mask = mask or BatchTensor(value, False)
            if floats:
                return floats
            level = inner[:MOST]
        return mask

    def detached_tensors(self, values: Iterable[Any]) -> tuple[Any, ...]:
        """Return what `find` and `iterate_tensors` see of these; it holds no graph."""
        room = [MOST] * DEPTH  # of each level, as theirs; a limit of each container multiplies
        return tuple([self._copy(value, room, 1) for value in values])

    def _copy(self, value: Any, room: list[int], level: int) -> Any:
        if isinstance(value, self._tensor):
            return value.detach() if value.requires_grad else value
        if level >= DEPTH:
            return None
        if isinstance(value, UserDict):
            data = own_attributes(value).get("data")
            inner = self._copy(data, room, level + 1) if isinstance(data, dict) else None
            return None if inner is None else UserDict(inner)
        if isinstance(value, dict):
            items = list(islice(dict.items(value), room[level]))
            room[level] -= len(items)
            return {key: self._copy(item, room, level + 1) for key, item in items}
        contents = list(islice(_contents(value), room[level]))
        room[level] -= len(contents)
        kind = list if isinstance(value, list) else tuple
        return kind([self._copy(item, room, level + 1) for item in contents])

    def iterate_tensors(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the tensors of all levels."""
        level = list(values)
        for _ in range(DEPTH):
            inner: list[Any] = []
            for value in level:
                if not isinstance(value, self._tensor):
                    inner += islice(_contents(value), MOST)
                elif value.numel() > 1 and value.layout is self._strided and not value.is_nested:
                    yield value
            level = inner[:MOST]


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return dict.values(value)
    if isinstance(value, tuple):
        return tuple.__iter__(value)
    if isinstance(value, list):
        return list.__iter__(value)
    if isinstance(value, UserDict) or hasattr(type(value), "__dataclass_fields__"):
        return own_attributes(value).values()
    return ()


BATCH_METRICS = (
    MetricSpec(
        "batch_fingerprint",
        "1",
        "Hash of the step's input as a whole number below 2^52; absent if no input was seen.",
        "CRC-32 of 512 bytes of its first tensor, and its size; on a device a weighted sum of its "
        "first 16384 values. Whole numbers come before floats; dicts, sequences and dataclasses "
        "are looked into. Once it is the same twice, 8192 bytes of it, and all of its first 16 "
        "tensors, on the host",
        "one look at 512 bytes; on a device one pass over 16384 values",
    ),
    MetricSpec(
        "forwards_per_update",
        "forwards",
        "Calls of the model for this step on this rank: one, the micro-batches, or the steps of an "
        "episode; absent if none was seen.",
        "calls of the outermost modules with gradients",
    ),
    MetricSpec(
        "batch_samples_differ",
        "1",
        "0 where all samples of what goes into the model are the same, else 1; absent of single "
        "samples, beside tokens, without floating-point numbers as input, where these are on a "
        "device, and where the first 8 steps had 0, until samples differ.",
        "rows of the largest floating-point tensor of each call",
        "one look at two rows; one pass over the input, where these are the same",
    ),
)

PIECE = 128  # bytes
SMALL = 512  # bytes; up to so many all are hashed
SEVERAL_INPUTS = 16  # of them, where the first one stays; project default
LAYOUTS = 64  # shapes that are remembered: a job mostly has one or two
FEW_PIECES, MANY_PIECES = SMALL // PIECE, 64  # of the first tensor; many where it repeated
ABSENCES = (2, 16, 128)  # steps without a batch, at which the model is looked for
_MASK = (1 << 52) - 1
_MIX = 6364136223846793005  # odd; keeps the order of micro-batches


class BatchCollector(Collector):
    """Fingerprint of a step's data: an order-sensitive hash of what went into the model.

    Hashes on the device where the batch is; only the hash travels.

    Attributes:
        inputs: finds the tensors of a call.
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
        self._weights: dict[Any, Any] = {}
        self._layouts: dict[Any, Layout] = {}
        self._integers = (self.torch.int64, self.torch.int32)
        self._strided = self.torch.strided
        self.inputs = Inputs(self.torch)
        self._views = {
            1: self.torch.uint8,
            2: self.torch.int16,
            4: self.torch.int32,
            8: self.torch.int64,
        }
        self._look_inside = look_inside
        self._absent = 0
        self._forwards = self._forwards_of_step = 0
        # Offsets or edges may stay while the other inputs change. Where the first look is the same
        # twice, both are taken once: what stays has the same fingerprint from then on.
        self._of_all, self._before, self._offset = False, -1, 0
        self._deepens = False
        self._deep: Any = None
        self._deep_of_step: Any = None
        self._differs: Optional[bool] = None  # a sample from another one of its call, in this step
        self._equal_steps = 0.0  # from the first one on; none where samples have differed
        self._by_loader = False  # steps were told by it before a model was found: so it stays
        self.seen = self.on_device = False

    def hash_loaded_batch(self, values: Iterable[Any]) -> None:
        """These came out of a loader."""
        tensor = self._first_tensor(values)
        if tensor is None:
            inner = self.inputs.find(values)
            tensor = inner and inner.tensor
        if tensor is not None and is_readable(self.torch, tensor):
            digest = self._digest_of(values, tensor, of_all=self._of_all)
            self._loaded = digest if self._loaded is None else self._mix(self._loaded, digest)

    def digest_of_memory(self, batch: Any) -> Optional[int]:
        """Return a number for all tensors of a batch, None where the host does not have them."""
        tensors = list(islice(self.inputs.iterate_tensors([batch]), SEVERAL_INPUTS))
        if not tensors or not all(map(self._reads, tensors)):
            return None
        digests = (_digest_of_memory(tensor, self._layouts, MANY_PIECES) for tensor in tensors)
        return functools.reduce(self._mix, digests)

    def hash_model_input(self, values: Iterable[Any]) -> Optional[Any]:
        """These went into the model; return what was hashed, if its shape gives how much it is."""
        self._forwards += 1
        tensor = counted = self._first_tensor(values)
        if tensor is None:
            inner = self.inputs.find(values)
            if inner is None:
                return None
            tensor = inner.tensor
            counted = tensor if inner.counts else None
        if not self._differs:
            self._compare_samples(values, tensor)
        if self._by_loader or not is_readable(self.torch, tensor):
            return counted
        digest = self._digest_of(values, tensor, of_all=self._of_all)
        self._hash = digest if self._hash is None else self._mix(self._hash, digest)
        if self._deepens:
            deep = self._digest_of(values, tensor, of_all=True)
            self._deep = deep if self._deep is None else self._mix(self._deep, deep)
        self.seen = True
        return counted

    def _compare_samples(self, values: Iterable[Any], largest: Any) -> None:
        """Look whether the samples of a call differ, in its data: labels may stand before them.

        Beside tokens the largest tensor may be their mask, or images that only some samples have.
        """
        tensor = self.torch.Tensor
        plain = [value for value in values if type(value) is tensor]
        for value in plain:
            if value.is_floating_point() and value.numel() > largest.numel():
                largest = value
        if not largest.is_floating_point() or largest.dim() < 2 or not self._reads(largest):
            return
        rows = len(largest)
        if rows > 1 and not any(v.dtype in self._integers and v.numel() > rows for v in plain):
            equal = are_rows_equal(largest, of_all=self._equal_steps < BY_DESIGN)
            self._differs = self._differs if equal is None else not equal

    def forget(self) -> None:
        self._hash, self._deep, self._forwards = None, None, 0
        self._differs = None

    def after_update(self, update: Update) -> None:
        self._forwards_of_step += self._forwards
        self._forwards = 0
        digest = self._loaded if self._hash is None else self._hash
        self._hash = self._loaded = None
        deep, self._deep = self._deep, None
        if self._deep_of_step is None:
            self._deep_of_step = deep
        elif deep is not None:
            self._deep_of_step = self._mix(self._deep_of_step, deep)
        if self._of_step is None:
            self._of_step = digest
        elif digest is not None:
            self._of_step = self._mix(self._of_step, digest)

    def newest(self) -> Optional[float]:
        """Return the fingerprint of the update under way, None where the host does not have it."""
        digest = self._loaded if self._hash is None else self._hash
        return float(digest + self._offset & _MASK) if isinstance(digest, int) else None

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        digest, self._of_step = self._of_step, None
        deep, self._deep_of_step = self._deep_of_step, None
        if self._forwards_of_step:
            values["forwards_per_update"] = float(self._forwards_of_step)
            self._forwards_of_step = 0
        if self._differs is not None:
            values["batch_samples_differ"] = float(self._differs)
            self._equal_steps = -inf if self._differs else self._equal_steps + 1.0
            self._differs = None
        if isinstance(digest, int):
            masked = digest + self._offset & _MASK
            values["batch_fingerprint"] = float(masked)
            stays, self._before = masked == self._before, masked
            if stays and self._deepens:  # of a loader's batches there is one look only
                self._of_all = True
                self._offset = masked - deep if isinstance(deep, int) else 0
            self._deepens = stays and not self._of_all
        elif digest is not None:
            self.on_device = True
            values["batch_fingerprint"] = self.scalars.value(digest & _MASK)
        if not self.seen:
            self._absent += 1
            if self._absent in ABSENCES:
                self._by_loader |= digest is not None
                self._look_inside()

    def step_fingerprint(self) -> Optional[int]:
        """Return the fingerprint of the step if no more goes in; None where it is on a device."""
        digest = self._loaded if self._hash is None else self._hash
        combined = self._of_step
        if digest is not None:
            combined = digest if combined is None else self._mix(combined, digest)
        return combined + self._offset & _MASK if isinstance(combined, int) else None

    def _reads(self, tensor: Any) -> bool:
        return self.scalars.can_read_now(tensor) and is_readable(self.torch, tensor)

    def _first_tensor(self, values: Iterable[Any]) -> Optional[Any]:
        fallback = None
        tensor = self.torch.Tensor
        for value in values:
            if (type(value) is tensor or isinstance(value, tensor)) and value.numel() > 1:
                kind = value.dtype
                if value.layout is not self._strided or value.is_nested:
                    continue
                if kind in self._integers:
                    return value
                if fallback is None and kind is self.torch.float32:
                    fallback = value
        return fallback

    def _mix(self, so_far: Any, digest: Any) -> Any:
        return (
            (so_far & _MASK) * _MIX + digest if isinstance(digest, int) else so_far * _MIX + digest
        )

    def _digest_of(self, values: Iterable[Any], tensor: Any, *, of_all: bool) -> Any:
        digest = self._digest(tensor, MANY_PIECES if of_all else FEW_PIECES)
        if of_all:
            for other in islice(self.inputs.iterate_tensors(values), SEVERAL_INPUTS):
                if other is not tensor and self._reads(other):
                    digest = self._mix(digest, self._digest(other))
        return digest

    def _digest(self, tensor: Any, pieces: int = FEW_PIECES) -> Any:
        torch = self.torch
        if self.scalars.can_read_now(tensor):
            return _digest_of_memory(tensor, self._layouts, pieces)
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


STREAM = 1  # torch.utils.data._DatasetKind.Iterable
GROUPS = 4  # of equal batches, after which the workers are known to read the same; our choice
PATIENCE = 256  # batches of all loaders, in which one with workers is to come


class WorkerCopyDetector:
    """How often each batch of a stream comes: once from each worker that reads all of it.

    Workers take turns, so that these batches are neighbours.

    Attributes:
        is_open: it is not known yet.
    """

    def __init__(
        self, digest: Callable[[Any], Optional[int]], report: Callable[[int], None]
    ) -> None:
        self._digest, self._report = digest, report
        self._passes: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._patience = PATIENCE
        self.is_open = True

    def add_loader_batch(self, iterator: Any, batch: Any) -> None:
        """A loader hands out a batch."""
        self._patience -= 1
        self.is_open = self._patience > 0
        workers = getattr(iterator, "_num_workers", 0)
        if workers < 2 or getattr(iterator, "_dataset_kind", None) != STREAM:
            return
        if getattr(iterator, "_num_yielded", 1) == 1:  # workers that persist begin another pass
            self._passes[iterator] = []
        digest, digests = self._digest(batch), self._passes.get(iterator)
        if digest is None:  # nothing can be known of it
            self.is_open = False
        if digest is None or digests is None:
            return
        digests.append(digest)
        if len(digests) < GROUPS * workers:
            return
        self.is_open = False
        groups = [set(digests[i : i + workers]) for i in range(0, len(digests), workers)]
        distinct = set().union(*groups)
        is_copied = len(distinct) == GROUPS and all(len(group) == 1 for group in groups)
        self._report(workers if is_copied else 1)


BY_DESIGN = 8  # steps of equal samples, from the first one on, as of a mask; our choice
PROBES, CHUNK = 64, 1 << 16  # places of a row that are looked at first; bytes


def are_rows_equal(tensor: Any, *, of_all: bool) -> Optional[bool]:
    """Return whether all rows of a tensor on the host are the same, None where it is not known.

    Read from memory: torch takes ten times as long to say that two rows differ.

    Args:
        tensor: of two rows at least. of_all: look at all values, where a few places are the same.
    """
    size, stride = _row_size(tensor), int(tensor.stride(0)) * int(tensor.element_size())
    if not size:
        return None
    start, others = tensor.data_ptr(), len(tensor) - 1
    for number in range(PROBES):
        place = start + (size // 2 + number * size // PROBES) % size
        length = min(PIECE, start + size - place)
        row = 1 + number % others
        if string_at(place, length) != string_at(place + row * stride, length):
            return False
    if stride == 0:  # one row, repeated
        return True
    if not of_all:
        return None
    for place in range(start, start + size, CHUNK):
        length = min(CHUNK, start + size - place)
        if string_at(place, length) != string_at(place + stride, length):
            return False
    rows = tensor.detach()
    return bool((rows == rows[0]).all())


def _row_size(tensor: Any) -> int:
    """Return how many bytes in a row a row of a tensor is, 0 where others lie between them."""
    span = places = 1
    for count, stride in zip(tensor.shape[1:], tensor.stride()[1:]):
        if stride:
            span += (count - 1) * stride
            places *= count
    return span * int(tensor.element_size()) if span == places else 0


_Piece = c_char * PIECE


class Layout(NamedTuple):
    """Where the pieces of a tensor of some shape lie.

    Attributes:
        offsets: in bytes behind its first value; none where it has to be copied first.
        length: of each piece, in bytes. size: of the whole, as a part of the hash.
    """

    offsets: tuple[int, ...]
    length: int
    size: int


def _digest_of_memory(tensor: Any, layouts: dict[Any, Layout], pieces: int) -> int:
    """Return a number below 2^52 that identifies the values of a tensor on the host.

    Read from memory, since one call of torch costs as much as all of this; and by one array type of
    ctypes, since each new one is a cycle that waits for the garbage collector. `layouts` remembers
    where to look.
    """
    key = tensor.dtype, tensor.shape, tensor.stride(), pieces
    layout = layouts.get(key)
    if layout is None:
        if len(layouts) >= LAYOUTS:
            layouts.clear()
        layout = layouts[key] = _layout(tensor, pieces)
    offsets, length, size = layout
    if not offsets:
        return _digest_of_memory(tensor.contiguous(), layouts, pieces)
    start, checksum = tensor.data_ptr(), 0
    if length == PIECE:
        for offset in offsets:
            checksum = crc32(_Piece.from_address(start + offset), checksum)
    else:
        for offset in offsets:
            checksum = crc32(string_at(start + offset, length), checksum)
    return checksum | size


def _layout(tensor: Any, pieces: int) -> Layout:
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
    for number in range(1, pieces + 1):  # rows that are padded to some length are alike in most
        row, column = divmod(int((number * 0.6180339887498949) % 1.0 * size), line)
        offsets.append(row * stride + min(column - column % width, line - piece))
    return Layout(tuple(offsets), piece, part)


RARER = 4  # looks, of which one is at masks and rows, too, where they are every fourth step or more
COST = "one pass over the input and a table of its ids; a sort of them on a device"
BATCH_SANITY_METRICS = (
    MetricSpec(
        "batch_token_entropy",
        "nat",
        "Entropy of the batch's own token histogram; absent without whole numbers as input.",
        "-sum p log p, p: counts of the first 16384 values of each micro-batch over their number",
        COST,
        sparsest=SPARSEST,
    ),
    MetricSpec(
        "batch_unique_ratio",
        "1",
        "Different tokens over tokens of the batch, as far as they are looked at.",
        "the same counts",
        COST,
        sparsest=SPARSEST,
    ),
    MetricSpec(
        "batch_top1_share",
        "1",
        "Share of the batch's commonest token.",
        "the same counts",
        COST,
        sparsest=SPARSEST,
    ),
    MetricSpec(
        "batch_token_drift",
        "nat",
        "KL of the batch's tokens from those of the batches before it: steps where other data come "
        "in, and gets used to them; absent in the first 4 looks.",
        "sum p log(p / q), ids modulo 1024; q: running mean of p over 32 looks, with 1 % of all",
        "one more table of 1024 counts",
        sparsest=SPARSEST,
    ),
    MetricSpec(
        "shuffle_block_skew",
        "1",
        "How unlike the tokens of two blocks of 16 looks running are, over how unlike two mixtures "
        "of the same looks are, 100 at most: 1 where batches come in random order, and of fewer "
        "than 32 tokens; every 16 looks.",
        "Jensen-Shannon divergences of the same tables, means of some 4; mixed by the Thue-Morse "
        "sequence",
        "an addition of 1024 counts",
        sparsest=SPARSEST * 16,
    ),
    MetricSpec(
        "batch_token_shift",
        "1",
        "KL of the tokens of 16 looks running from those of the first 64, over how far the quarters"
        " of these are apart, at least 0.002 nat: about 1 where the data stay as they were; every "
        "16 looks behind the first 64.",
        "sum p log(p / q) of the same tables, mean over the quarters",
        "two products of 4096 numbers every 16 looks",
        sparsest=SPARSEST * 16,
    ),
    MetricSpec(
        "batch_ids_outside",
        "%",
        "Tokens that are none of the rows of the model's largest embedding; absent without one.",
        "ids below 0, or from num_embeddings on",
        sparsest=SPARSEST,
    ),
    MetricSpec(
        "batch_pad_fraction",
        "%",
        "Padding over all tokens of the batch; absent where neither a mask nor the model shows it.",
        "attention_mask, a padding mask, or what begins or ends a row: padding_idx, pad_token_id",
        "a sum over the mask, or a look at the rows",
        sparsest=SPARSEST,
    ),
    MetricSpec(
        "batch_seq_len_p50",
        "tokens",
        "Median length of the sequences: rows without padding, of packed ones by cu_seq_lens or "
        "position_ids; absent where padding is and these do not come.",
        "the same masks; nearest rank",
        "a sort of the lengths",
        sparsest=SPARSEST,
    ),
    MetricSpec(
        "batch_seq_len_p95",
        "tokens",
        "Length that 5 % of the sequences exceed.",
        "the same masks; nearest rank",
        sparsest=SPARSEST,
    ),
)

IGNORED = -100  # of targets, which may be what is looked at
MICRO_BATCHES = 16  # of a step that are looked at
FEW = 1024  # values that Python counts faster than torch, from cold caches
LARGEST = 1 << 20  # ids above are sorted
LOOKS = 32  # of the running mean
FIRST = 4  # steps between two looks, until their cost is known
# Looks that rules compare later ones with; what each may cost of the steps between two meanwhile.
BASELINE_LOOKS, BASELINE_SHARE = 64, 0.05


class BatchSanityCollector(Collector):
    """Token statistics of a batch: they show random, repeated and corrupt data in its own step.

    Keeps a copy of the values until the step is over, and counts them then.

    Attributes:
        pace: how often. rarer: looks from one at masks, rows and ids to the next, at most.
        unseen: why metrics of tokens are absent, by metric.
    """

    METRICS = BATCH_SANITY_METRICS

    def __init__(self, context: ProbeContext, sets: SampleSets) -> None:
        super().__init__(context)
        self.pace = sets.pace("batch_sanity", FIRST, TOKENS, FLOOR_NS // 2, least=2)
        self._kept: list[Any] = []
        self._usual: Any = None  # shares of the buckets
        self._looks = self._baseline_looks = 0  # since the device changed; ever
        self._order: Optional[BlockSkew] = None
        self.rarer = RARER
        self._table = TokenTable(self.torch, context.registry)
        self._sequences = SequenceLengths(self.torch, self.scalars)
        self._changed = context.reporter.status_changed
        self.unseen: dict[str, str] = {}

    def add_token_input(self, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """These whole numbers went into the model, as one of these arguments."""
        batches = self._kept
        if len(batches) >= MICRO_BATCHES or not is_readable(self.torch, tensor):
            return
        if not batches or batches[0].device == tensor.device:
            is_complete = tensor.numel() <= LONGEST
            batches.append(tensor.clone() if is_complete else tensor.reshape(-1)[:LONGEST].clone())
            if self._looks_closer():
                if len(batches) == 1:
                    self._table.find_embedding()
                named = named_inputs(args, kwargs)
                self._sequences.add_micro_batch(tensor, batches[-1], named, self._table.padding)

    def _looks_closer(self) -> bool:
        """Whether the look under way is one at masks, rows and ids: at least every 16 steps."""
        return self._looks % max(1, self.rarer // max(1, self.pace.every // LEAST)) == 0

    def forget(self) -> None:
        self._kept = []
        self._sequences.forget()

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        batches, self._kept = self._kept, []
        if batches:
            began = thread_time_ns()
            self._count(batches, values)
            self._baseline_looks += 1
            cost_ns, step_ns = thread_time_ns() - began, step.elapsed_ns
            if step_ns is not None and not self._is_for_baseline(cost_ns, step_ns):
                self.pace.adjust_interval(cost_ns, step_ns)

    def _is_for_baseline(self, cost_ns: int, step_ns: int) -> bool:
        """Whether a look that is too dear in the long run is one of the first, and no slowdown.

        In short steps one in 16 is affordable: then rules would be blind for 900 steps.
        """
        if self._baseline_looks >= BASELINE_LOOKS:
            return False
        every = self.pace.every
        return self.pace.allowed(step_ns) * every < cost_ns <= BASELINE_SHARE * every * step_ns

    def rewind(self, state: Mapping[str, float]) -> None:
        self.forget()

    def _count(self, batches: list[Any], values: dict[str, Number]) -> None:
        flat = [ids.reshape(-1) for ids in batches]
        ids = flat[0] if len(flat) == 1 else self.torch.cat(flat)
        size = ids.numel()
        mean, kinds, top = self._shares(ids, size)
        # A value that is there c times adds its log c c times: sum c log c, without a table.
        values["batch_token_entropy"] = log(size) - mean
        values["batch_unique_ratio"] = kinds / size
        values["batch_top1_share"] = top / size
        if self._looks_closer():
            if self._table.rows:
                values[OUTSIDE] = self._outside(ids, size, self._table.rows)
            values.update(self._sequences.take_step_metrics())
            previous, self.unseen = self.unseen, {**self._table.unseen, **self._sequences.unseen}
            if previous != self.unseen:
                self._changed()
        drift = self._drift(ids, size)
        if self._looks > FIRST:
            values["batch_token_drift"] = self.scalars.value(drift)
        if self._order is not None:
            for name, newest in self._order.newest.items():
                values[name] = self.scalars.value(newest)

    def _outside(self, ids: Any, size: int, rows: int) -> Number:
        """Return the percentage of ids that are no row of the table."""
        if self.scalars.can_read_now(ids):
            least, highest = self.torch.aminmax(ids)
            if least >= 0 and highest < rows:
                return 0.0
        outside = ((ids < 0) & (ids != IGNORED)) | (ids >= rows)
        return self.scalars.value(outside.sum()) * (100.0 / size)

    def _drift(self, ids: Any, size: int) -> Any:
        """Return how far these tokens are from the usual ones, which follow them."""
        torch = self.torch
        table = torch.zeros(BUCKETS, device=ids.device)
        places = ids.remainder(BUCKETS).long()
        shares = table.scatter_add_(0, places, torch.ones_like(places, dtype=table.dtype)) / size
        usual = self._usual
        if usual is None or usual.device != shares.device or self._order is None:
            usual, self._looks, self._order = shares, 0, BlockSkew(torch, shares.device)
        self._order.add(shares)
        self._looks += 1
        self._usual = usual + (shares - usual) / min(self._looks, LOOKS)
        expected = (1.0 - UNSEEN) * usual + UNSEEN / BUCKETS
        return torch.special.xlogy(shares, shares / expected).sum()

    def _shares(self, ids: Any, size: int) -> tuple[Number, Number, Number]:
        """Return the mean log of each value's count, how many differ, and the largest count."""
        if size <= FEW and self.scalars.can_read_now(ids):
            counts = Counter(ids.tolist()).values()
            return sum(n * log(n) for n in counts) / size, len(counts), max(counts)
        wide = self.torch.float32 if ids.device.type == "mps" else self.torch.float64
        if self.scalars.can_read_now(ids):
            least, highest = self.torch.aminmax(ids)
            if least >= 0 and highest < LARGEST:
                table = self.torch.bincount(ids)
                rows = table.index_select(0, ids).to(wide)
                return self._summed(rows)
        ids = ids.sort()[0]
        search = self.torch.searchsorted
        return self._summed((search(ids, ids, right=True) - search(ids, ids)).to(wide))

    def _summed(self, rows: Any) -> tuple[Number, Number, Number]:
        value = self.scalars.value
        return value(rows.log().mean()), value(rows.reciprocal().sum()), value(rows.max())


SHARDS_METRICS = (
    MetricSpec(
        "batch_shard",
        "1",
        "Number of the shard that the step's data came from, by first report; -1 for several,"
        " absent without a report.",
        "supervise_probe.shard, or attributes of batch and dataset",
    ),
    MetricSpec(
        "batch_offset",
        "1",
        "Where in its one shard the step's data began, as reported; absent without a number.",
        "supervise_probe.shard, or attributes of batch and dataset",
    ),
    MetricSpec(
        "batch_source_shift",
        "%",
        "Largest change of a source's share of the steps, relative to its share in the first 256, "
        "that neither chance nor their own differences explain; 0 for none. A source is the names "
        "of shards that differ in digits only; absent where two do not take turns from the first "
        "on. Every 64 steps.",
        "4 standard deviations of a binomial, or 4 times the range of the first four shares",
        sparsest=STEPS,
    ),
)

BUFFER_DEPTH = 32  # steps that may wait for a device, as in ipc/publisher.py
PER_NOTICE = 6
BYTES, TEXT = 560, 200  # of names, and characters of the sentence: what a letter holds unclipped
# Steps to the next notice, by how many there were: endless names must not fill the record.
GAPS = ((32, 1), (256, 16), (1 << 62, 256))
IN_STATUS = 8


class ShardsCollector(Collector):
    """Shard of a step's data and the position in it, as `data.shard_tracker` knows them.

    Numbers the shards of a step. Sleeps until anybody says anything of shards.
    """

    METRICS = SHARDS_METRICS

    ASLEEP = True

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._notice, self._changed = context.reporter.notice, context.reporter.status_changed
        self.shards = ShardTracker(context.torch, self.wake)
        self._backwards = 0
        self._of_step: Optional[dict[Origin, None]] = None
        self._waiting: deque[tuple[int, int, list[Origin]]] = deque(maxlen=BUFFER_DEPTH)
        self._next_notice = self._notices = 0
        self.mix = SourceMix()

    def after_backward(self, loss: Number) -> None:
        self._backwards += 1

    def forget(self) -> None:
        self._backwards = 0

    def after_update(self, update: Update) -> None:
        backwards, self._backwards = self._backwards, 0
        if backwards or self._of_step is None:  # else the second optimizer after one backward
            self._of_step = {**(self._of_step or {}), **self.shards.take_step_origins(backwards)}

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        if not self._of_step:
            self._of_step = None
            return
        origins, self._of_step = list(self._of_step)[:SEVERAL], None
        numbers = {self.shards.number(origin.shard) for origin in origins}
        shift = self.mix.add([origin.shard for origin in origins])
        if shift is not None:
            values["batch_source_shift"] = shift
            self._changed()
        values["batch_shard"] = -1.0 if len(numbers) > 1 else float(numbers.pop())
        if values["batch_shard"] >= 0 and isinstance(origins[0].offset, int):
            values["batch_offset"] = float(origins[0].offset)
        self._waiting.append((step.number, step.attempt, origins))
        if self.shards.unreported and not self._next_notice > step.number:
            self._tell(step.number)

    def join(self, record: dict[str, Any]) -> None:
        """Add the shards of a step to what is kept of its batch, by step and attempt."""
        while self._waiting:
            step, attempt, origins = self._waiting.popleft()
            if (step, attempt) == (record["step"], record["attempt"]):
                record["shards"] = [origin._asdict() for origin in origins]
                return

    def newest(self) -> dict[str, str]:
        """Return the names used last by their number, for the status."""
        return self.shards.newest(IN_STATUS)

    def rewind(self, state: Mapping[str, float]) -> None:
        self._backwards, self._of_step = 0, None
        self.shards.clear()
        self._next_notice = 0

    def _tell(self, step: int) -> None:
        new = self.shards.take_unreported(PER_NOTICE, BYTES)
        self._notices += 1
        self._next_notice = step + next(gap for below, gap in GAPS if self._notices < below)
        text = ", ".join(f"{number} is {shard}" for number, shard in new.items())
        self._notice("shard", f"new shards: {text}"[:TEXT], {"shards": new})
