"""The safeguard `skip_outliers`: the update of a batch that is far out of its band is not made.

The decision is made in the process, right before the update, from a loss and a gradient norm that
the host has anyway. On an accelerator they are not there in time, and several ranks would have to
skip alike: then it does not act, and the status says so.

A loss out of its band cannot tell whether the batch is bad or the weights are. Two updates in a row
are skipped at once. Before a third, and then before every second one, the probe batch is asked:
where it has its loss of before, the batches are bad, and skipping goes on. Where it has not, or
nobody can say, the next updates are made as they come, until the loss is back in its band: to skip
with bad weights would keep them bad. So it is after `max` skips in `per` steps.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional

from .nonfinite import ARMED, RateLimit
from .outlier_rule import RISE, SPREADS, Limits, OutlierRule

if TYPE_CHECKING:
    from ..collectors.loss import Collector as LossCollector
    from ..context import ProbeContext
    from ..runtime.active_safeguards import InForce
    from ..torch_state.records import Update

    Doubt = Callable[[int, float], str]

NAME = "skip_outliers"
MOST, PER = 32, 2000  # skips, steps: a bad source may last; project defaults
UNASKED = 2  # skips in a row for which nobody is asked
WITHIN = 1.1  # times the loss of before: the weights are good. As the runbooks' `check_weights`
ON_DEVICE = "the loss lives on a device, and would have to be waited for"
NO_LOSS = "no loss of the job is seen"


class SkipOutliers:
    """The order `{"max": 32, "per": 2000, "spreads": 6, "rise": 0.15}`.

    Attributes:
        state: for the status: `armed`, why it has stopped, or why it cannot act; "" without an
            order.
    """

    def __init__(self, context: ProbeContext, in_force: InForce, loss: LossCollector) -> None:
        self._position, self._reporter = context.position, context.reporter
        self._in_force, self._loss = in_force, loss
        self._rule: Optional[OutlierRule] = None
        self.state = ""
        self._doubt: Doubt = lambda before_step, within: "there is no probe batch to ask"
        order: Optional[Mapping[str, Any]] = context.config.safeguards.get(NAME)
        if order is None:
            return
        limits = Limits(float(order.get("spreads", SPREADS)), float(order.get("rise", RISE)))
        self._rule = OutlierRule(limits)
        most, per = int(order.get("max", MOST)), int(order.get("per", PER))
        self._limit, self._spent = RateLimit(most, per), f"{most} of {per} updates were skipped"
        self._judged = -1  # the newest step: it is judged once, for all its optimizers
        self._began = 0  # the first step of the outliers under way
        self._unasked = 0  # of them, skipped since the probe batch was asked
        in_force.outlier = 0.0
        self._set_state(ARMED)

    def connect(self, doubt: Doubt) -> None:
        """Ask `doubt(before_step, within)` why the weights are not good, "" if they are."""
        self._doubt = doubt

    @property
    def busy(self) -> bool:
        """Whether the end of a step counts."""
        return self._rule is not None

    def judge(self, update: Update) -> None:
        """Skip the update whose gradients are final, if its batch is an outlier."""
        rule, step = self._rule, self._position.step
        if rule is None or step == self._judged:
            return
        self._judged = step
        loss: Any = self._loss.total
        norm: Any = update.gradient_norm
        why_not = self._why_not(loss)
        if why_not:
            self.cannot(why_not)
            return
        if not isfinite(loss):  # another safeguard's
            return
        known = norm if type(norm) is float and norm > 0.0 and isfinite(norm) else None
        why = rule.why_out(loss, known, follows=self._unasked > 0)
        if why and self._skips(step):
            update.skip = "outlier"
            self._in_force.outlier = 1.0
            numbers = {"loss": loss, "gradient_norm": known}
            self._notice(f"skipped the update of step {step}: {why}", **numbers)
            return
        rule.applied(step, loss, known, usual=not why)
        if not why:
            self._in_band()

    def _why_not(self, loss: Any) -> str:
        ranks = self._position.world_size
        if ranks > 1:
            return f"{ranks} ranks would have to skip the same steps"
        if loss is None:
            return NO_LOSS
        return "" if type(loss) is float else ON_DEVICE

    def _skips(self, step: int) -> bool:
        """Return whether the update of an outlier is skipped."""
        if self.state != ARMED:
            return False
        if not self._unasked:
            self._began = step
        if self._unasked >= UNASKED:
            doubt = self._doubt(self._began, WITHIN)
            if doubt:
                self._stop(f"no more update is skipped: {doubt}")
                return False
            self._unasked = 0
        if not self._limit.take():
            self._stop(self._spent)
            return False
        self._unasked += 1
        return True

    def _stop(self, why: str) -> None:
        self._set_state(f"stopped: {why}")
        self._notice(f"makes updates as they come: {why}", stopped=why)

    def _in_band(self) -> None:
        """A usual batch: whatever there was is over."""
        self._unasked = 0
        if self.state != ARMED and not self._limit.is_full:
            self._set_state(ARMED)

    def restored(self, step: int) -> None:
        """The weights are those behind `step` again."""
        if self._rule is not None:
            self._rule.back_to(step)
            self._judged, self._unasked = -1, 0

    def step_ended(self) -> None:
        """Count a step; a rollback does not reset the count."""
        if self._rule is not None:
            self._limit.step_ended()
            self._in_force.outlier = 0.0

    def cannot(self, why: str) -> None:
        """Nothing can be judged, for that reason; "": it can again."""
        if self._rule is not None:
            self._set_state(f"cannot act: {why}" if why else ARMED)

    def _set_state(self, state: str) -> None:
        if state == self.state:
            return
        self.state = state
        self._in_force.guards[NAME] = state == ARMED
        self._reporter.status_changed()

    def _notice(self, what: str, **data: Any) -> None:
        self._in_force.acting = True
        self._reporter.notice("safeguard", f"{NAME} {what}", {"order": NAME, **data})
