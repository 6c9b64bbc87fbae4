"""Loss and outputs of the model on the probe batch; `savepoints.reference_output` computes them."""

from __future__ import annotations

from . import Collector, MetricSpec

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
)


class ProbeBatchCollector(Collector):
    """Loss and outputs of the model on the probe batch; `savepoints.reference_output` computes
    them.

    Holds the guard's part; the work is done at the savepoint.
    """

    METRICS = PROBE_BATCH_METRICS
