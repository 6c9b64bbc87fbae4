"""Measurements of a forward in some steps: activations, attention, routing, the probe batch."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from ..sampling.activations import HEAD, HEADS, NO_ENTROPY, PLACE, WIDE
from ..sampling.sample_sets import DEFAULTS
from . import Collector, MetricSpec

if TYPE_CHECKING:
    from ..context import ProbeContext

ROUTING_COST = "on a sampled step, one pass over the routers' scores"
ROUTING_EVERY = DEFAULTS["routing"]

ROUTING_METRICS = (
    MetricSpec(
        "moe_util_entropy",
        "1",
        "Entropy of the experts' shares of assignments over log E, of the worst layer.",
        "-sum(f ln f) / ln E",
        ROUTING_COST,
        ROUTING_EVERY,
    ),
    MetricSpec(
        "moe_drop_rate",
        "%",
        "Assignments over the experts' capacity, of all; absent where no capacity can be seen.",
        "Switch, arXiv:2101.03961",
        "",
        ROUTING_EVERY,
    ),
    MetricSpec(
        "moe_load_balance_loss",
        "1",
        "E sum f P of the worst layer; 1 is balanced.",
        "Switch, arXiv:2101.03961, without its coefficient",
        "",
        ROUTING_EVERY,
    ),
    *(
        MetricSpec(
            f"router_token_entropy{suffix}", "1", text, "arXiv:2606.28116", "", ROUTING_EVERY
        )
        for suffix, text in (
            (
                "",
                "Mean over tokens and layers of the entropy of routers' full softmax over log E.",
            ),
            ("_min", "The same of the router that has least."),
            ("_max", "The same of the router that has most."),
            (".<i>", "The same of router i; of 8, evenly spread."),
        )
    ),
)


class RoutingCollector(Collector):
    """Loads of MoE experts, in one step of many; `sampling.routing` counts them.

    Holds the guard's part; the work is done in the forward.
    """

    METRICS = ROUTING_METRICS


ATTENTION_COST = "on a sampled step, 64 x T logits a head of 4 sequences, each layer"
ATTENTION_EVERY = DEFAULTS["attention"]

ATTENTION_METRICS = (
    MetricSpec(
        "max_attn_logit",
        "1",
        "Largest attention logit after mask, over layers, heads and the rows looked at: a lower "
        "bound.",
        "q . k * scale after mask, Kimi K2 and Megatron-LM",
        ATTENTION_COST,
        ATTENTION_EVERY,
    ),
    MetricSpec(
        "max_attn_logit.<i>",
        "1",
        "The same of layer i, in order of calls; of 8 layers, evenly spread.",
        "q . k * scale after mask, Kimi K2 and Megatron-LM",
        "",
        ATTENTION_EVERY,
    ),
    MetricSpec(
        "max_attn_logit_head",
        "1",
        "The same of one head, of the 3 that have most in this sample; append layer and head: "
        "`.2.5`. The first 6 that ever come.",
        "q . k * scale after mask, Kimi K2 and Megatron-LM",
        "",
        ATTENTION_EVERY,
    ),
    MetricSpec(
        "attn_logit_absmean",
        "1",
        "Mean absolute attention logit of what is not masked, over layers.",
        "this project",
        "",
        ATTENTION_EVERY,
    ),
    MetricSpec(
        "attn_logit_heads_over_100",
        "heads",
        "Heads of all layers whose largest logit is over 100: a lower bound.",
        "Kimi K2",
        "",
        ATTENTION_EVERY,
    ),
    MetricSpec(
        "attn_entropy",
        "1",
        "Mean over layers and heads of the entropy over the log of how many keys a query sees, of "
        "queries that see 9 or more; absent where none does.",
        "-sum(p ln p) / ln n",
        "",
        ATTENTION_EVERY,
    ),
    MetricSpec(
        "attn_entropy_min",
        "1",
        "The same of the head that has least.",
        "-sum(p ln p) / ln n",
        "",
        ATTENTION_EVERY,
    ),
    MetricSpec(
        "key_gradient_sum",
        "1",
        "Sum over the sequence of the gradients of attention's keys over the sum of their sizes, "
        "median over heads, in units of what rounding may leave: 1e-4 in float32 on the CPU, else "
        "1e-2. Zero in exact arithmetic; absent where nothing calls scaled_dot_product_attention "
        "with gradients, and under torch.compile. Unproven on accelerators.",
        "sum_j dK_j = sum_i q_i sum_j dS_ij = 0, arXiv:2510.04212",
        "a pass over the key gradients of 4 sequences, each layer",
        ATTENTION_EVERY,
    ),
)


COLUMNS = 6  # of single heads


class AttentionCollector(Collector):
    """Attention logits and entropy, in one step of many; see sampling/activations.py for how.

    The work is done in the forward; here heads get their names, and what is none is dropped.
    """

    METRICS = ATTENTION_METRICS

    SAMPLED = "attention"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._heads: set[str] = set()

    def add_derived_values(self, values: dict[str, float]) -> None:
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


ACTIVATIONS_COST = "on a sampled step, one pass over 256 rows of each block's output"
ACTIVATIONS_EVERY = DEFAULTS["activations"]

ACTIVATIONS_METRICS = (
    MetricSpec(
        "residual_rms",
        "1",
        "Largest root mean square of a block's output, over up to 256 rows of each.",
        "sqrt(mean(h^2))",
        ACTIVATIONS_COST,
        ACTIVATIONS_EVERY,
    ),
    MetricSpec(
        "residual_rms.<i>",
        "1",
        "The same of block i; of 8 blocks, evenly spread.",
        "sqrt(mean(h^2))",
        "",
        ACTIVATIONS_EVERY,
    ),
    MetricSpec(
        "residual_rms_p50.<i>",
        "1",
        "Median over these rows of the root mean square of a row of block i; of 4 blocks.",
        "sqrt(mean(h^2)) of each token, nearest rank below",
        "",
        ACTIVATIONS_EVERY,
    ),
    MetricSpec(
        "residual_rms_p99.<i>",
        "1",
        "The same, 99th percentile.",
        "sqrt(mean(h^2)) of each token, nearest rank below",
        "",
        ACTIVATIONS_EVERY,
    ),
    MetricSpec(
        "activation_outlier_rate",
        "%",
        "Share of a block's outputs over 6 times their root mean square, in the worst block.",
        "|a| > 6 rms(a)",
        "",
        ACTIVATIONS_EVERY,
    ),
    MetricSpec(
        "logz_mean",
        "1",
        "Mean log-sum-exp of the logits that go into cross_entropy, else of an output as wide as "
        "an embedding, over up to 256 rows.",
        "PaLM, arXiv:2204.02311",
        "at most a million logits on a sampled step",
        ACTIVATIONS_EVERY,
    ),
    MetricSpec(
        "token_entropy",
        "nat",
        "Mean entropy of the model's predictions, of a quarter of the same rows.",
        "-sum(p log p), p: softmax of the logits",
        "a softmax of at most a quarter of a million logits on a sampled step",
        ACTIVATIONS_EVERY,
    ),
)


class ActivationsCollector(Collector):
    """Outputs of blocks and of the model, in one step of many; `sampling.activations` takes them.

    Holds the guard's part; the work is done in the forward.
    """

    METRICS = ACTIVATIONS_METRICS


WHERE = "in the frame of the step behind a savepoint, where the policy has job.probe_batch"
COST = "a pass over the logits of 2 sequences, of a forward that the savepoint makes anyway"

PROBE_BATCH_METRICS = (
    MetricSpec(
        "fixed_probe_loss",
        "nat",
        f"Loss of the two rows of the probe batch, with the same random state each time; {WHERE}.",
        "the model's own, else cross_entropy of its logits",
        COST,
    ),
    MetricSpec(
        "logit_entropy_probe",
        "nat",
        f"Mean entropy of the outputs of the probe batch, over up to 256 of its tokens; {WHERE}.",
        "-sum(p log p)",
        COST,
    ),
    MetricSpec(
        "topk_mass_probe",
        "%",
        "Mean mass of the 10 likeliest tokens of these outputs; with fewer than 100 classes, of a "
        "tenth of them.",
        "sum of the largest p",
    ),
    MetricSpec(
        "output_kl_to_prev",
        "nat",
        "Mean KL of these outputs from those at the savepoint before; absent after a rollback.",
        "sum(p_before log(p_before / p))",
    ),
    MetricSpec(
        "lone_weight",
        "1",
        "Largest change of one weight since the savepoint before over the second largest of its "
        "tensor; absent where none is far from the others, on accelerators, with "
        "several ranks.",
        "max_i |w_i - w_i,before| / max(second largest, max |w| / 16)",
        "a pass over the trained weights and their copies",
    ),
    MetricSpec(
        "lone_weight_harm",
        "1",
        "Rise of the loss by that weight alone, against its old value, of up to 64 rows of the "
        "batch that the probe batch is of, or of it where these are more than 1 MB; absent "
        "where lone_weight is below 6.",
        "(loss - loss with the old value) / the larger of that and train_loss_raw",
        "two forwards of these rows",
    ),
    MetricSpec(
        "rerun_mismatch",
        "1",
        "Difference between two forwards of the probe batch with the same weights and random "
        "state, at one savepoint of 8; absent on accelerators, and where the first two pairs "
        "were not the same to the bit.",
        "|value - value again|",
        "a forward of two rows",
    ),
)


class ProbeBatchCollector(Collector):
    """Loss and outputs of the model on the probe batch, by `savepoints.weights_check`.

    Holds the guard's part; the work is done at the savepoint.
    """

    METRICS = PROBE_BATCH_METRICS
