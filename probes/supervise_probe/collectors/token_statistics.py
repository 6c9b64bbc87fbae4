"""Statistics of the tokens of batches, and of where they come from; kept between looks.

All is on the device where the batch is, and nothing waits for it. Names of arguments and of shards
are the only text that is looked at.
"""

from __future__ import annotations

import re
from collections import UserDict, deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Mapping, Optional, Sequence

from ..torch_state.structure import own_attributes
from ..torch_state.tensor_copies import is_readable

if TYPE_CHECKING:
    from ..runtime.scalars import Number, Scalars
    from ..torch_state.registry import Registry

LONGEST = 16384  # values of an input that are looked at
MOST = 64  # values of one container, and of one level
BUCKETS = 1024
UNSEEN = 0.01  # of the mass is spread over all buckets
OUTSIDE, PADDING = "batch_ids_outside", "batch_pad_fraction"
LENGTHS = ("batch_seq_len_p50", "batch_seq_len_p95")
BLOCK = 16  # looks
FADE, EARLIEST = 0.75, 4  # of the mean of divergences; blocks behind which there is one
SAME, MOST_SKEW = 1e-6, 100.0
FEW_KINDS = 32  # whose divergences are mostly chance
QUARTERS, LEAST_APART = 4, 0.002  # blocks of the reference; nat between them at least
MIXED = tuple(bin(look).count("1") % 2 for look in range(BLOCK))  # Thue and Morse


class TokenTable:
    """What the model says of the ids that it takes.

    Attributes:
        rows: of its largest embedding, 0 for none. padding: the id that pads, None for unknown.
        unseen: why these are not known, by metric.
    """

    PATIENCE = 16  # looks from one walk over the modules to the next

    def __init__(self, torch: Any, registry: Registry) -> None:
        self._torch, self._registry = torch, registry
        self._changes, self._waits = -1, 0
        self.rows = 0
        self.padding: Optional[int] = None
        self.unseen: dict[str, str] = {}

    def find_embedding(self) -> None:
        """Look at the modules, if they are others than before."""
        self._waits -= 1
        changes = self._registry.modules.changes
        if changes == self._changes or self._waits > 0:
            return
        self._changes, self._waits = changes, self.PATIENCE
        self.rows, padding, named = 0, None, None
        for root in self._registry.roots():
            for module in root.modules():
                if not isinstance(module, self._torch.nn.Embedding):
                    config = getattr(vars(module).get("config"), "__dict__", {})
                    named = config.get("pad_token_id") if named is None else named
                elif module.num_embeddings > self.rows:
                    self.rows, padding = int(module.num_embeddings), module.padding_idx
        padding = named if padding is None else padding
        self.padding = padding if isinstance(padding, int) else None
        self.unseen = {} if self.rows else {OUTSIDE: "the model has no nn.Embedding"}


PACKED = ("cu_seq_lens_q", "cu_seqlens", "cu_seq_lens")


class SequenceLengths:
    """Lengths of the sequences of a step, and how much of its tokens is padding.

    Attributes:
        unseen: why they are absent, by metric.
    """

    REASON = "no mask of rows and tokens goes into the model by name, and it names no padding id"

    def __init__(self, torch: Any, scalars: Scalars) -> None:
        self._torch, self._scalars = torch, scalars
        self.unseen = dict.fromkeys((PADDING, *LENGTHS), self.REASON)
        self.forget()

    def forget(self) -> None:
        self._lengths: list[Any] = []
        self._tokens = 0  # padding included
        self._inside: Number = 0.0

    def add_micro_batch(
        self, ids: Any, kept: Any, named: Mapping[str, Any], padding: Optional[int]
    ) -> None:
        """Take the ids of a micro-batch, what was kept of them, and what went in by name."""
        lengths = None
        width = int(ids.shape[1]) if ids.dim() == 2 else 0
        rows = min(int(ids.shape[0]), max(1, LONGEST // width)) if width else 0
        if rows:
            lengths = self._of_mask(ids, named, rows)
            if lengths is None and padding is not None and rows * width <= kept.numel():
                lengths = self._of_rows(kept.reshape(-1)[: rows * width].view(rows, width), padding)
        if lengths is not None:
            self._tokens += rows * width
            self._inside = self._inside + self._scalars.value(lengths.sum())
        packed = self._of_packed(ids, named)
        lengths = lengths if packed is None else packed
        if lengths is not None and lengths.numel():
            self._lengths.append(lengths)

    def take_step_metrics(self) -> dict[str, Number]:
        """Return the metrics of the step."""
        values: dict[str, Number] = {}
        if self._tokens:
            values[PADDING] = (self._tokens - self._inside) * (100.0 / self._tokens)
        if self._lengths:
            ordered = self._torch.cat(self._lengths).sort()[0]
            for name, share in zip(LENGTHS, (0.5, 0.95)):
                values[name] = self._scalars.value(ordered[int(share * (ordered.numel() - 1))])
        for name in values:
            self.unseen.pop(name, None)
        self.forget()
        return values

    def _is_readable(self, value: Any) -> bool:
        is_tensor = isinstance(value, self._torch.Tensor)
        return is_tensor and is_readable(self._torch, value)

    def _of_mask(self, ids: Any, named: Mapping[str, Any], rows: int) -> Optional[Any]:
        for name, mask in named.items():
            is_mask = name.endswith(("attention_mask", "padding_mask"))
            if is_mask and self._is_readable(mask) and mask.shape == ids.shape:
                mask = mask[:rows]
                return (mask != 0 if name.endswith("attention_mask") else mask == 0).sum(-1)
        return None

    def _of_rows(self, rows: Any, padding: int) -> Any:
        """Return the lengths of rows without what pads them at their ends."""
        width = int(rows.shape[1])
        places = self._torch.arange(width, device=rows.device)
        is_token = rows != padding
        end = self._torch.where(is_token, places + 1, 0).amax(-1)
        begin = self._torch.where(is_token, places, width).amin(-1)
        return (end - begin).clamp(min=0)

    def _of_packed(self, ids: Any, named: Mapping[str, Any]) -> Optional[Any]:
        """Return the lengths of the sequences in one row, None where that is not known."""
        for name in PACKED:
            bounds: Any = named.get(name)
            if self._is_readable(bounds) and bounds.dim() == 1:
                return bounds.diff()
        places: Any = named.get("position_ids")
        if not self._is_readable(places) or not self._scalars.can_read_now(places):
            return None
        if places.shape != ids.shape or ids.dim() != 2 or int(ids.shape[0]) > 1:
            return None
        begins = (places.reshape(-1) == 0).nonzero().reshape(-1)
        bounds = self._torch.cat([begins, begins.new_tensor([places.numel()])])
        return bounds.diff() if bounds.numel() > 2 else None


def named_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what went in by name: keywords, and items of a dict."""
    named: dict[str, Any] = {}
    for value in args:
        if isinstance(value, UserDict):
            value = own_attributes(value).get("data")
        if isinstance(value, dict):
            named.update((k, v) for k, v in islice(dict.items(value), MOST) if isinstance(k, str))
    named.update(kwargs)
    return named


class BlockSkew:
    """Whether batches come in an order, and are as the first ones were, by blocks of looks.

    Attributes:
        newest: metrics of the block that ends with the newest look.
    """

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._sums = [torch.zeros(2, BUCKETS, device=device) for _ in range(2)]  # before, now
        self._divergences = torch.zeros(2, device=device)  # of blocks, of mixtures
        self._number = 0
        self._blocks: list[tuple[Any, Any]] = []  # shares and their logs; in the end the newest
        self._apart: deque[Any] = deque(maxlen=BLOCK)  # KL of blocks from the one before each
        self._logs: Any = None  # of the first blocks
        self._usual: Any = None  # how far these are apart
        self.newest: dict[str, Any] = {}

    def add(self, shares: Any) -> None:
        """Take the shares of a look."""
        before, now = self._sums
        place = self._number % BLOCK
        now[MIXED[place]] += shares
        self._number += 1
        self.newest = {}
        if place < BLOCK - 1:
            return
        self._compare(now.sum(0) / BLOCK)
        if self._number > BLOCK:
            blocks = before.sum(0), now.sum(0)
            mixtures = before[0] + now[1], before[1] + now[0]
            found = self._torch.stack([self._divergence(*blocks), self._divergence(*mixtures)])
            self._divergences = FADE * self._divergences + found
            if self._number > EARLIEST * BLOCK:
                unlike, mixed = self._divergences + SAME
                kinds = ((blocks[0] + blocks[1]) > 0.0).sum()
                ratio = (unlike / mixed).clamp(max=MOST_SKEW)
                self.newest["shuffle_block_skew"] = ratio.masked_fill(kinds < FEW_KINDS, 1.0)
        self._sums = [now, before.zero_()]

    def _compare(self, shares: Any) -> None:
        """Compare the shares of a block with those of the first blocks.

        Blocks that are far from the one before, as where files are read in order, are so often: the
        upper quartile of these distances does not know one change.
        """
        torch = self._torch
        xlogy, logs = torch.special.xlogy, ((1.0 - UNSEEN) * shares + UNSEEN / BUCKETS).log()
        self._blocks.append((shares, logs))
        if len(self._blocks) > 1:
            self._apart.append(xlogy(shares, shares).sum() - self._blocks[-2][1] @ shares)
        if self._usual is None:
            if len(self._blocks) == QUARTERS:
                first, self._logs = map(torch.stack, zip(*self._blocks))
                apart = xlogy(first, first).sum(1, keepdim=True) - first @ self._logs.t()
                mean = (apart.sum() - apart.diagonal().sum()) / (QUARTERS * (QUARTERS - 1))
                self._usual = mean.clamp(min=LEAST_APART)
            return
        apart = xlogy(shares, shares).sum() - (self._logs @ shares).mean()
        steps = torch.stack([*self._apart])
        between = steps.sort()[0][(3 * len(self._apart)) // 4]
        self.newest["batch_token_shift"] = apart / torch.maximum(self._usual, between)
        self._blocks = self._blocks[-1:]

    def _divergence(self, p: Any, q: Any) -> Any:
        middle = ((p + q) / 2.0).clamp(min=1e-12)
        xlogy = self._torch.special.xlogy
        return (xlogy(p, p / middle) + xlogy(q, q / middle)).sum() / (2.0 * BLOCK)


STEPS = 64  # of a block of shares
SURE = 4.0  # standard deviations
RARE = 1.0 / (QUARTERS * STEPS)  # share of a source that did not come
LEAST_SHARE = 0.02  # of a source in each block of the reference
USUAL = 2 * QUARTERS  # blocks of another mix, behind which it is the reference
SOURCES, SHARDS = 64, 1024
_DIGITS = re.compile(r"\d+")


class SourceMix:
    """Shares of the sources in the steps, block by block.

    Attributes:
        shares: of the newest block, by source; a shard's name with `#` for its digits.
    """

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}
        self._sources: dict[str, str] = {}  # by shard
        self._counts: dict[str, float] = {}
        self._steps = self._moved = 0
        self._blocks: list[dict[str, float]] = []  # the reference, or what may become it

    def add(self, shards: Sequence[str]) -> Optional[float]:
        """Take the shards of a step; return the shift at the end of a block, if there is one."""
        for shard in shards:
            source = self._sources.get(shard)
            if source is None:
                source = self._source(shard)
            self._counts[source] = self._counts.get(source, 0.0) + 1.0 / len(shards)
        self._steps += 1
        if self._steps < STEPS:
            return None
        self.shares = {source: count / STEPS for source, count in self._counts.items()}
        self._counts, self._steps = {}, 0
        return self._compare(self.shares)

    def _source(self, shard: str) -> str:
        if len(self._sources) >= SHARDS:
            self._sources.clear()
        source = _DIGITS.sub("#", shard)
        if source not in self._counts and len(self._counts) >= SOURCES:
            source = "others"
        self._sources[shard] = source
        return source

    def _compare(self, shares: Mapping[str, float]) -> Optional[float]:
        if len(self._blocks) < QUARTERS:
            self._blocks.append(dict(shares))
            return None
        usual = {s: [b.get(s, 0.0) for b in self._blocks] for b in self._blocks for s in b}
        if sum(min(parts) >= LEAST_SHARE for parts in usual.values()) < 2:
            return None  # they come one behind the other, or there is one
        shift = 0.0
        for source in {**usual, **shares}:
            parts = usual.get(source, [0.0])
            mean = min(max(sum(parts) / len(parts), RARE), 1.0 - RARE)
            chance = (1.0 + 1.0 / QUARTERS) * mean * (1.0 - mean) / STEPS
            apart = abs(shares.get(source, 0.0) - mean)
            if apart > SURE * max(chance**0.5, max(parts) - min(parts)):
                shift = max(shift, 100.0 * apart / max(mean, LEAST_SHARE))
        self._moved = self._moved + 1 if shift else 0
        if self._moved >= USUAL:
            self._blocks, self._moved = [dict(shares)], 0
        return shift
