"""Token statistics of a batch: they show random, repeated and corrupt data in its own step.

Looks at the whole numbers that go into the outermost module, the same tensor that the fingerprint
is of; at the first 16384 of each micro-batch. Ids that a table of a million counts can hold are
counted, others are sorted, as are all on an accelerator, where the length of a table of counts
would have to be waited for.

Each step where that costs less than SHARE of it, else every 2nd, 4th ... 16th.
"""

from __future__ import annotations

from collections import Counter
from math import log
from time import thread_time_ns
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Tuple

from ..sampling.sample_sets import SPARSEST, Pace
from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..sampling.sample_sets import SampleSets
    from ..torch_state.records import Step

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
)

LONGEST = 16384  # values of one micro-batch
MICRO_BATCHES = 16  # of a step that are looked at
FEW = 1024  # values that Python counts faster than torch, from cold caches
LARGEST = 1 << 20  # ids above are sorted
SHARE = 0.0004  # of a step, for a look divided by the steps between two
FLOOR_NS = 5_000  # a step, in any case
BUCKETS, LOOKS = 1024, 32  # of the running mean; its looks
UNSEEN = 0.01  # of the mass is spread over all buckets
FIRST = 4  # steps between two looks, until their cost is known


class BatchSanityCollector(Collector):
    """Token statistics of a batch: they show random, repeated and corrupt data in its own step.

    Keeps a copy of the values until the step is over, and counts them then.

    Attributes:
        pace: how often.
    """

    METRICS = BATCH_SANITY_METRICS

    def __init__(self, context: ProbeContext, sets: SampleSets) -> None:
        super().__init__(context)
        self.pace = Pace(context.reporter, FIRST, SHARE, FLOOR_NS, least=2)
        sets.paces["batch_sanity"] = self.pace
        self._kept: List[Any] = []
        self._usual: Any = None  # shares of the buckets
        self._looks = 0

    def saw(self, tensor: Any) -> None:
        """These whole numbers went into the model."""
        batches = self._kept
        if len(batches) >= MICRO_BATCHES or tensor.is_meta:
            return
        if not batches or batches[0].device == tensor.device:
            is_complete = tensor.numel() <= LONGEST
            batches.append(tensor.clone() if is_complete else tensor.reshape(-1)[:LONGEST].clone())

    def forget(self) -> None:
        self._kept = []

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        batches, self._kept = self._kept, []
        if batches:
            began = thread_time_ns()
            self._count(batches, values)
            if step.elapsed_ns is not None:
                self.pace.weigh(thread_time_ns() - began, step.elapsed_ns)

    def rewind(self, state: Mapping[str, float]) -> None:
        self._kept = []

    def _count(self, batches: List[Any], values: Dict[str, Number]) -> None:
        flat = [ids.reshape(-1) for ids in batches]
        ids = flat[0] if len(flat) == 1 else self.torch.cat(flat)
        size = ids.numel()
        mean, kinds, top = self._shares(ids, size)
        # A value that is there c times adds its log c c times: sum c log c, without a table.
        values["batch_token_entropy"] = log(size) - mean
        values["batch_unique_ratio"] = kinds / size
        values["batch_top1_share"] = top / size
        drift = self._drift(ids, size)
        if self._looks > FIRST:
            values["batch_token_drift"] = self.scalars.value(drift)

    def _drift(self, ids: Any, size: int) -> Any:
        """Return how far these tokens are from the usual ones, which follow them."""
        torch = self.torch
        table = torch.zeros(BUCKETS, device=ids.device)
        places = ids.remainder(BUCKETS).long()
        shares = table.scatter_add_(0, places, torch.ones_like(places, dtype=table.dtype)) / size
        usual = self._usual
        if usual is None or usual.device != shares.device:
            usual, self._looks = shares, 0
        self._looks += 1
        self._usual = usual + (shares - usual) / min(self._looks, LOOKS)
        expected = (1.0 - UNSEEN) * usual + UNSEEN / BUCKETS
        return torch.special.xlogy(shares, shares / expected).sum()

    def _shares(self, ids: Any, size: int) -> Tuple[Number, Number, Number]:
        """Return the mean log of each value's count, how many differ, and the largest count."""
        if size <= FEW and self.scalars.reads(ids):
            counts = Counter(ids.tolist()).values()
            return sum(n * log(n) for n in counts) / size, len(counts), max(counts)
        wide = self.torch.float32 if ids.device.type == "mps" else self.torch.float64
        if self.scalars.reads(ids):
            least, highest = self.torch.aminmax(ids)
            if least >= 0 and highest < LARGEST:
                table = self.torch.bincount(ids)
                rows = table.index_select(0, ids).to(wide)
                return self._summed(rows)
        ids = ids.sort()[0]
        search = self.torch.searchsorted
        return self._summed((search(ids, ids, right=True) - search(ids, ids)).to(wide))

    def _summed(self, rows: Any) -> Tuple[Number, Number, Number]:
        value = self.scalars.value
        return value(rows.log().mean()), value(rows.reciprocal().sum()), value(rows.max())
