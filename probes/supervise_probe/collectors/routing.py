"""Loads of MoE experts, in one step of many; `sampling.routing` counts them."""

from __future__ import annotations

from ..sampling.sample_sets import DEFAULTS
from ..spec import MetricSpec
from . import Collector

COST = "on a sampled step, one pass over the routers' scores"
EVERY = DEFAULTS["routing"]

ROUTING_METRICS = (
    MetricSpec(
        "moe_util_entropy",
        "1",
        "Entropy of the experts' shares of assignments over log E, of the worst layer.",
        "-sum(f ln f) / ln E",
        COST,
        EVERY,
    ),
    MetricSpec(
        "moe_drop_rate",
        "%",
        "Assignments over the experts' capacity, of all; absent where no capacity can be seen.",
        "Switch, arXiv:2101.03961",
        "",
        EVERY,
    ),
    MetricSpec(
        "moe_load_balance_loss",
        "1",
        "E sum f P of the worst layer; 1 is balanced.",
        "Switch, arXiv:2101.03961, without its coefficient",
        "",
        EVERY,
    ),
    MetricSpec(
        "router_token_entropy",
        "1",
        "Mean over tokens and layers of the entropy of the router's full softmax over log E.",
        "arXiv:2606.28116",
        "",
        EVERY,
    ),
)


class RoutingCollector(Collector):
    """Loads of MoE experts, in one step of many; `sampling.routing` counts them.

    Holds the guard's part; the work is done in the forward.
    """

    METRICS = ROUTING_METRICS
