"""Outputs of blocks and of the model, in one step of many; `sampling.activations` takes them."""

from __future__ import annotations

from ..sampling.sample_sets import DEFAULTS
from ..spec import MetricSpec
from . import Collector

COST = "on a sampled step, one pass over 256 rows of each block's output"
EVERY = DEFAULTS["activations"]

ACTIVATIONS_METRICS = (
    MetricSpec(
        "residual_rms",
        "1",
        "Largest root mean square of a block's output, over up to 256 rows of each.",
        "sqrt(mean(h^2))",
        COST,
        EVERY,
    ),
    MetricSpec(
        "residual_rms.<i>",
        "1",
        "The same of block i; of 8 blocks, evenly spread.",
        "sqrt(mean(h^2))",
        "",
        EVERY,
    ),
    MetricSpec(
        "residual_rms_p50.<i>",
        "1",
        "Median over these rows of the root mean square of a row of block i; of 4 blocks.",
        "sqrt(mean(h^2)) of each token, nearest rank below",
        "",
        EVERY,
    ),
    MetricSpec(
        "residual_rms_p99.<i>",
        "1",
        "The same, 99th percentile.",
        "sqrt(mean(h^2)) of each token, nearest rank below",
        "",
        EVERY,
    ),
    MetricSpec(
        "activation_outlier_rate",
        "%",
        "Share of a block's outputs over 6 times their root mean square, in the worst block.",
        "|a| > 6 rms(a)",
        "",
        EVERY,
    ),
    MetricSpec(
        "logz_mean",
        "1",
        "Mean log-sum-exp of the logits that go into cross_entropy, else of an output as wide as "
        "an embedding, over up to 256 rows.",
        "PaLM, arXiv:2204.02311",
        "at most a million logits on a sampled step",
        EVERY,
    ),
)


class ActivationsCollector(Collector):
    """Outputs of blocks and of the model, in one step of many; `sampling.activations` takes them.

    Holds the guard's part; the work is done in the forward.
    """

    METRICS = ACTIVATIONS_METRICS
