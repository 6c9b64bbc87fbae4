"""Faults of how a job is put together: what its weights cannot learn, whatever it is given.

A rule of the pack `wiring` opens no incident: there is nothing to go back to, no action mends it,
and it fires for as long as the job runs. People are told once per kind, with the names of tensors
that the probe sent beside the metric.
"""

from __future__ import annotations

from msgspec import structs

from . import notices, rule_scope
from .frames import LOSS
from .model.events import Notice
from .model.payload import WiringFacts
from .model.policy import Rule
from .rank_monitor import RankMonitor
from .run_state import MessageDraft, StepContext
from .trends import median

FEW = 16  # losses of which the newest are compared with the first; project default
CLIPPED, LOSS_SCALE, CLIP_RATE = "clip_ratio", "clip_loss_scale", "grad_clip_rate"
MOVED, RATE, ROUNDED = "update_to_weight", "learning_rate", "weights_rounded_away"
ROWS = "batchnorm_rows"
NO_GRADIENT, NO_OPTIMIZER = "tensors_without_gradient", "tensors_without_optimizer"
COUNTED = (NO_GRADIENT, NO_OPTIMIZER, "tensors_of_others", "modules_in_eval")
SUBJECTS = (*COUNTED, CLIPPED, MOVED, ROUNDED, ROWS)  # metrics, each of one kind of message


def on_wiring(ctx: StepContext, event: Notice) -> None:
    """Keep what the probe says beside a metric; the rule that reads it fires in a later frame."""
    facts = event.data.read(WiringFacts)
    ctx.state.rules.wiring[facts.metric] = facts


def report(ctx: StepContext, monitor: RankMonitor, rule: Rule) -> None:
    """Notify people of a rule that fires, unless they know it of another rank or rule."""
    metrics, reported = rule_scope.rule_metrics(ctx.policy, rule), ctx.state.rules.wiring_reported
    subject = next((metric for metric in SUBJECTS if metric in metrics), "")
    if not subject or subject in reported:
        return
    if subject == MOVED and ctx.state.incident is not None:
        return  # an update that an incident is about does not tell how the job is written
    reported.add(subject)
    facts = ctx.state.rules.wiring.get(subject, WiringFacts())
    common = notices.OfWiring(
        severity=rule.severity,
        rule=rule.id,
        expression=rule.text,
        names=facts.named,
        made=facts.made,
    )
    if subject in COUNTED:
        notice = _of_tensors(subject, facts, common)
    else:
        notice = _of_numbers(ctx, monitor, subject, common)
    ctx.messages.add(MessageDraft.of(notice), replace=False, subject=subject)


def _of_tensors(subject: str, facts: WiringFacts, common: notices.OfWiring) -> notices.OfWiring:
    """Return a message about tensors or layers that were counted."""
    fields = structs.asdict(common)
    if subject == "modules_in_eval":
        return notices.ModelInEval(**fields)
    if subject == NO_GRADIENT:
        if facts.count == facts.total:
            return notices.LossCutOff(**fields)
        return notices.WithoutGradient(**fields, count=facts.count, total=facts.total)
    if subject == NO_OPTIMIZER:
        return notices.WithoutOptimizer(**fields, count=facts.count)
    return notices.OptimizerOfOthers(**fields, count=facts.count)


def _of_numbers(
    ctx: StepContext, monitor: RankMonitor, subject: str, common: notices.OfWiring
) -> notices.OfWiring:
    """Return a message about numbers of the newest frames."""
    fields = structs.asdict(common)
    newest = [value for _, value in monitor.history.series(subject)][-FEW:]
    value = median(newest) if newest else 0.0
    if subject == ROUNDED:
        return notices.RoundedAway(**fields, share=value)
    if subject == ROWS:
        return notices.NormsAlone(**fields, rows=value)
    if subject == CLIPPED:
        scale = monitor.value(LOSS_SCALE) or 1.0
        clip = ctx.state.rules.wiring.get(LOSS_SCALE, WiringFacts())
        return notices.AlwaysClipped(
            **{**fields, "made": clip.made if scale > 1.0 else ""},
            share=monitor.value(CLIP_RATE) or 0.0,
            ratio=value,
            course=course(monitor),
            scale=f"{scale:g}" if scale > 1.0 else "",
            otherwise="" if scale > 1.0 else "raise its limit, or scale the loss down",
        )
    if value > 1.0:
        return notices.UpdatesTooLarge(**fields, ratio=value)
    return notices.WeightsStandStill(
        **fields, ratio=value, rate=monitor.value(RATE), course=course(monitor)
    )


def course(monitor: RankMonitor) -> str:
    """Return how the loss stands to its first values, "" where those are forgotten or it fell."""
    losses = monitor.history.series(LOSS)
    if len(losses) < 2 * FEW or losses[0][0] > FEW:
        return ""
    first, last = ([loss for _, loss in part] for part in (losses[:FEW], losses[-FEW:]))
    spread = max(first) - min(first)
    if abs(median(last) - median(first)) > spread:
        return ""
    return f"the loss has not moved from its start ({median(first):.3g}, now {median(last):.3g})"
