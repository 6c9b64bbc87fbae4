"""Effect of `objective: none` on the rules: how high a loss is then is told, and no more.

In adversarial and reinforcement learning a healthy loss rises. That it is not finite, repeats
itself or passes a bound that somebody wrote down means the same as elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...core.model.interfaces import Detector
from ...core.model.policy import OFF, Rule, detectors_behind
from ..inventory import discover

LOSSES = frozenset(("train_loss_raw", "train_loss", "train_loss_ema", "train_ppl"))
NOT_OF_HEIGHT = ("nonfinite", "equal", "threshold")  # kinds


def without_descent(rule: Rule, detectors: Mapping[str, Detector]) -> Rule:
    """Return a notice in place of a rule that judges the height of a loss by its past."""
    kinds = tuple(discover.detectors()[kind] for kind in NOT_OF_HEIGHT)
    behind = (detectors[name] for name in detectors_behind(detectors, rule.uses))
    if not any(LOSSES.intersection(d.metrics) and not isinstance(d, kinds) for d in behind):
        return rule
    phases = {phase: given for phase, given in rule.phases.items() if given == OFF}
    return replace(rule, severity="SEV2", runbook=None, phases=phases)
