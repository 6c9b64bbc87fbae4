"""Attention logits and entropy, in one step of many; see sampled/attention.py for how.

Values join the frame of the step that was sampled, and are absent in the others.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Dict, Set

from ..sampling.attention import HEAD, HEADS, NO_ENTROPY, PLACE, WIDE
from ..sampling.sample_sets import DEFAULTS
from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext

COST = "on a sampled step, 64 x T logits a head of 4 sequences, each layer"
EVERY = DEFAULTS["attention"]

ATTENTION_METRICS = (
    MetricSpec(
        "max_attn_logit",
        "1",
        "Largest attention logit after mask, over layers, heads and the rows looked at: a lower "
        "bound.",
        "q . k * scale after mask, Kimi K2 and Megatron-LM",
        COST,
        EVERY,
    ),
    MetricSpec(
        "max_attn_logit.<i>",
        "1",
        "The same of layer i, in order of calls; of 8 layers, evenly spread.",
        "q . k * scale after mask, Kimi K2 and Megatron-LM",
        "",
        EVERY,
    ),
    MetricSpec(
        "max_attn_logit_head",
        "1",
        "The same of one head, of the 3 that have most in this sample; append layer and head: "
        "`.2.5`. The first 6 that ever come.",
        "q . k * scale after mask, Kimi K2 and Megatron-LM",
        "",
        EVERY,
    ),
    MetricSpec(
        "attn_logit_absmean",
        "1",
        "Mean absolute attention logit of what is not masked, over layers.",
        "this project",
        "",
        EVERY,
    ),
    MetricSpec(
        "attn_logit_heads_over_100",
        "heads",
        "Heads of all layers whose largest logit is over 100: a lower bound.",
        "Kimi K2",
        "",
        EVERY,
    ),
    MetricSpec(
        "attn_entropy",
        "1",
        "Mean over layers and heads of the entropy over the log of how many keys a query sees, of "
        "queries that see 9 or more; absent where none does.",
        "-sum(p ln p) / ln n",
        "",
        EVERY,
    ),
    MetricSpec(
        "attn_entropy_min",
        "1",
        "The same of the head that has least.",
        "-sum(p ln p) / ln n",
        "",
        EVERY,
    ),
)


COLUMNS = 6  # of single heads


class AttentionCollector(Collector):
    """Attention logits and entropy, in one step of many; see sampled/attention.py for how.

    The work is done in the forward; here heads get their names, and what is none is dropped.
    """

    METRICS = ATTENTION_METRICS

    SAMPLED = "attention"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._heads: Set[str] = set()

    def finish(self, values: Dict[str, float]) -> None:
        for rank in range(HEADS) if f"{HEAD}0" in values else ():
            logit, position = values.pop(f"{HEAD}{rank}", None), values.pop(f"{PLACE}{rank}", None)
            if logit is None or position is None or logit == -inf:
                continue
            layer, head = divmod(int(position), WIDE)
            name = f"max_attn_logit_head.{layer}.{head}"
            if name in self._heads or len(self._heads) < COLUMNS:
                self._heads.add(name)
                values[name] = logit
        if values.get("attn_entropy") == NO_ENTROPY:
            values.pop("attn_entropy", None)
            values.pop("attn_entropy_min", None)
