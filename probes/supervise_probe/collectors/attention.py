"""Attention logits and entropy, in one step of many; see sampled/attention.py for how.

Values join the frame of the step that was sampled, and are absent in the others.
"""

from __future__ import annotations

from typing import Dict

from ..sampling.attention import NO_ENTROPY
from ..sampling.sample_sets import DEFAULTS
from ..spec import MetricSpec
from . import Collector as Base

COST = "on a sampled step, 64 x T logits a head of 4 sequences, each layer"
EVERY = DEFAULTS["attention"]

METRICS = (
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


class Collector(Base):
    """The work is done in the forward; here entropies are dropped that are none."""

    SAMPLED = "attention"

    def finish(self, values: Dict[str, float]) -> None:
        if values.get("attn_entropy") == NO_ENTROPY:
            values.pop("attn_entropy", None)
            values.pop("attn_entropy_min", None)
