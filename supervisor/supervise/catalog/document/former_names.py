"""Names that policies had before: what is called otherwise now, and what is gone.

One table for two readers: the hint behind "no such name", and `supervise policy migrate`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Former:
    """What became of a name.

    Attributes:
        now: today's name, of a rule, detector, pack, metric or key; "" where there is none.
        why: what tells the same today, where there is no name for it.
        ran: the runbook that a rule ran by itself, "" for a rule that only told.
        part: `now` holds what it told and more, so that muting or removing that is another thing.
    """

    now: str = ""
    why: str = ""
    ran: str = ""
    part: bool = False

    @property
    def answer(self) -> str:
        """Return what became of it, in words."""
        if self.now:
            return f"it is {'part of ' * self.part}{self.now!r} now"
        return f"it is gone: {self.why}"


HARM = "the rule harm.established tells and acts on a loss that stays up"
ROLLBACK = "rollback-and-rewarm"
_ONE_RULE = {  # the same trouble, now told by one rule
    "amp.scale": "amp.skips",
    "attention.heads": "attention.logits",
    "data.unique": "data.batch",
    "data.top1": "data.batch",
    "evaluation.probe_output": "evaluation.fixed_probe",
    "evaluation.behaviour_jump": "evaluation.fixed_probe",
    "frozen.loss": "frozen.numbers",
    "frozen.grad": "frozen.numbers",
    "gradients.no_signal": "gradients.noise_scale",
    "hardware.ecc_errors": "hardware.device_errors",
    "hardware.xid_errors": "hardware.device_errors",
    "routing.balance_loss": "routing.imbalance",
    "schedule.phase": "schedule.restarted",
    "throughput.mfu": "throughput.tokens",
    "throughput.mfu_collapse": "throughput.collapse",
    "throughput.idle_device": "throughput.compute",
    "update_scale.no_update": "update_scale.small",
    "drift.activations": "activations.residual",
    "drift.rate": "update_scale.rate_jump",
    "drift.falling": "data.stuck",
}
_RENAMED = {
    "checkpoint.not_ok": "checkpoint.verification_failed",
    "evaluation.off_the_curve": "evaluation.above_reference",
    "evaluation.off_the_law": "evaluation.above_scaling_law",
    "loss_spike.begun": "loss_spike.startup_spike",
    "loss_spike.notice": "loss_spike.minor",
    "nonfinite.lasting": "nonfinite.sustained",
    "probe.restless": "probe.frequent_spikes",
    "ranks.one_apart": "ranks.outlier_rank",
    "routing.undecided": "routing.low_confidence",
    "routing.uneven_now": "routing.imbalance",
    "routing.winner_takes_all": "routing.dominant_expert",
    "update_scale.lr": "update_scale.rate_jump",
    "update_scale.still": "update_scale.small",
    "update_scale.torn": "update_scale.oversized_update",
    # Detectors.
    "loss_spike.loss_far": "loss_spike.loss_x_large",
    "loss_spike.loss_out": "loss_spike.loss_log_z",
    "loss_spike.loss_steep": "loss_spike.loss_log_z_short",
    "loss_spike.news": "loss_spike.exceeds_record",
    "loss_spike.pushed": "loss_spike.precursor",
    "loss_spike.signed": "loss_spike.recently_negative",
    "update_scale.caused": "update_scale.grad_caused",
    "update_scale.dying": "update_scale.update_z_low",
    "update_scale.frozen": "update_scale.update_zero",
    "update_scale.grad_far": "update_scale.grad_x",
    "update_scale.led": "update_scale.grad_first",
    "update_scale.loss_up": "update_scale.loss_z",
    "update_scale.news": "update_scale.exceeds_record",
    "update_scale.twice": "update_scale.update_x_twice",
    "update_scale.update_out": "update_scale.update_log_z",
    "drift.rms": "activations.rms_z",
    "drift.update": "update_scale.creeping",
    "drift.update_ramp": "update_scale.update_ramp",
    # Keys.
    "hold_max": "hold_reminder",
    "standing_orders": "safeguards",
}
_ACTED = {
    name: Former("harm.established", ran=ROLLBACK, part=True)
    for name in ("far", "extreme", "lasting", "sustained")
}
_REMOVED = {
    HARM: ("drift.loss", "drift.climbing", "drift.creeping", "optimizer_state.perplexity"),
    "activations.logits tells output logits that climb": ("drift.logz", "drift.logz_z"),
    "update_scale.lr_guard tells a rate that jumps": ("drift.lr_ramp",),
    "data.stuck tells a batch that comes again": ("drift.diving",),
    "gradients.large tells a gradient norm that jumps": (
        *("gradients.unusual", "gradients.surprised", "gradients.surprise_high"),
        *("gradients.norm_z", "gradients.surprise", "gradients.surprise_z"),
    ),
    "the loss, of which it was the exponent, is judged": ("optimizer_state.doubled",),
    "no fault was ever found by it": ("hardware.descriptors", "hardware.files"),
    "harm, update_scale, data and activations tell what it told": ("drift",),
    "nothing measures what it read": ("crash", "logs"),
}
FORMER: dict[str, Former] = {
    **{old: Former(now) for old, now in _RENAMED.items()},
    **{old: Former(now, part=True) for old, now in _ONE_RULE.items()},
    **{f"loss_spike.{name}": former for name, former in _ACTED.items()},
    **{old: Former(why=why) for why, names in _REMOVED.items() for old in names},
}
