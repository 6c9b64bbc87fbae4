"""The step: when the optimizer calls that belong together are over, and what happens then.

One training step is a round of optimizers, see `torch_state/optimizer_rounds.py`. Only a round that
closes on time is a boundary: there the job stands right behind its optimizer step, and commands may
touch it. A late one just publishes.

Knows no metric: it calls the collectors.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from ..torch_state.optimizer_rounds import Round
from ..torch_state.records import Known, Step, Update, in_order, is_phantom, rate_of
from . import training_session
from .discarded_gradients import Discards
from .inferred_steps import Handmade

if TYPE_CHECKING:
    from ..probe import Probe
    from ..runtime.scalars import Number

REPLACEABLE = "tokens_per_update"  # the one metric that a job may know better than the probe


class Boundary:
    """Counts steps, and tells collectors and the publisher about them.

    Attributes:
        number: of the step under way. attempt: counts launches and rollbacks of the run.
        spent_ns: what the probe cost in the last step, where that was weighed, else None.
        reported: values that the job reported for its next frame.
        on_time: whether the last step just closed behind its last optimizer.
        entries: how often `before_step` was called.
        current: the update under way.
        handmade: finds the steps of a job that has no optimizer.
        discards: tells which backwards were in vain.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self.handmade = Handmade(probe)
        self.discards = Discards(probe)
        self.number = self._began = probe.config.first_step
        self.attempt = probe.config.attempt
        self.spent_ns: Optional[int] = None
        self.on_time = False
        self.entries = 0
        self.reported: Dict[str, Number] = {}
        self.current: Optional[Update] = None
        self._round = Round()
        self._backward = False  # since the last boundary
        self._skip = ""  # the whole round is skipped
        self._undecided = False  # a backward in the closure of `current` begins a step of its own
        self._known: Dict[int, Known] = {}  # by id of the optimizer, in order of first step
        self._ended_ns = self._mark_ns = self._held_ns = 0

    def before_step(
        self, optimizer: Any, closure: bool, overflow: bool = False
    ) -> Optional[Update]:
        """An optimizer is about to step, or its GradScaler keeps it from it (`overflow`).

        Returns None when this is no training step, or none that can be measured.
        """
        probe = self._probe
        self.entries += 1
        known = self._known.get(id(optimizer))
        if known is None or known.reference() is not optimizer:
            known = Known(optimizer)
        elif known.refresh(optimizer):
            probe.registry.modules.changes += 1  # who remembers what they hold looks again
        update = Update(optimizer, closure, known)
        if not known.real or is_phantom(probe.torch, update, self._backward):
            return None
        if (probe.writer is None or not probe.on) and not probe.open():
            return None
        key = id(optimizer)
        if key in self._round.members:
            self.close(on_time=False)
        begun, before = self._round.members, self._round.before
        late = before and not begun and not self._backward and key not in before
        update.scheduled = rate_of(probe.torch, optimizer)
        self._scale_rate(optimizer)
        if late and not closure:
            self._round.joins_late(key)
            return None
        self.current = update
        if self._known.get(key) is not known:
            self._appeared(key, known, optimizer)
        if closure and (late or self._round.members):
            self._undecided = True
        else:
            self._begin(update, overflow)
        return update

    def _begin(self, update: Update, overflow: bool = False) -> None:
        """The optimizer belongs to the round, or is the first of a new one."""
        probe = self._probe
        self._undecided = False
        members = self._round.members
        if not members and not self._skip and probe.tools.acting:
            self._skip = probe.tools.skip.take()
        members.append(id(update.optimizer))
        self.on_time = False
        update.skip = "overflow" if overflow else self._skip
        update.scaler = probe.scaling.scaler
        if update.scaler is not None:
            update.scale = probe.scaling.scale()
        if not update.closure:
            self.measure(update)
        if probe.tools.acting:
            probe.tools.before_update(update)
        probe.guard.run_all(probe.calls["before_update"], update)

    def _follows(self, update: Update) -> bool:
        """No backward ran inside the closure; whether its optimizer is part of the round."""
        if self._round.members:
            self._begin(update)
            return True
        self._undecided = False
        self._round.joins_late(id(update.optimizer))
        return False

    def _scale_rate(self, optimizer: Any) -> None:
        probe = self._probe
        factor = probe.rate.factor()
        if probe.drills.active:
            factor *= probe.drills.lr_factor()
        if factor != 1.0:
            probe.rate.apply(optimizer, factor)

    def measure(self, update: Update) -> None:
        """The gradients of `update` are final: look at them, and decide whether to go on."""
        probe = self._probe
        update.measured = True
        if self._undecided and not self._follows(update):
            return
        probe.batches.before_update(self._backward)
        if probe.sampler.kept is not None:
            probe.sampler.side_pass()
        if probe.drills.active:
            probe.drills.before_update(update.params)
        found_inf = getattr(update.optimizer, "found_inf", None)
        if found_inf is not None:
            update.found_inf = probe.scalars.value(found_inf)
        probe.guard.run_all(probe.calls["measure"], update)
        skips = probe.rollbacks.skips
        if skips.ranges and not update.skip and len(self._round.members) == 1 and skips.due():
            update.skip = self._skip = "command"
        if not update.skip:
            probe.tools.gradients(update)
            self._skip = update.skip

    def after_step(self, update: Update) -> None:
        """The optimizer is done; the round may be over."""
        probe = self._probe
        if self._undecided:  # its closure was never called
            self._follows(update)
        self.current = None
        if not self._round.members:
            return
        self._ended_ns = monotonic_ns()
        if probe.tools.acting:
            probe.tools.after_update(update)
        probe.guard.run_all(probe.calls["after_update"], update)
        if self._round.ends() or probe.rollbacks.handover.ends(self._round.members):
            self.close(on_time=True)

    def overflowed(self, optimizer: Any) -> None:
        """The GradScaler found no finite gradients and never called `optimizer.step`."""
        try:
            update = self.before_step(optimizer, closure=False, overflow=True)
        finally:
            self._probe.rate.restore()
        if update is not None:
            self.after_step(update)

    @property
    def repeats(self) -> bool:
        """Whether a closure is being evaluated once more in the same step."""
        return self.current is not None and self.current.measured

    @property
    def open(self) -> bool:
        """Whether a round was stepped that is not over yet: a forward now is the next step's."""
        return bool(self._round.members) and (self.current is None or self._undecided)

    @property
    def accumulates(self) -> bool:
        """Whether a backward has run since the last step."""
        return self._backward

    @property
    def round(self) -> int:
        """How many optimizers made the last step."""
        return len(self._round.before)

    def abandon(self, update: Update) -> None:
        """The optimizer's step raised: the job may catch that and try again."""
        self.current, self._undecided = None, False
        if self._round.members[-1:] == [id(update.optimizer)]:
            self._round.members.pop()

    def saw_backward(self, loss: Optional[Number], retains: bool) -> None:
        """A backward of `loss` is about to run (None: of something that is no scalar)."""
        probe = self._probe
        if self.open:
            self.close(on_time=False)
        if self.current is not None and self._undecided:
            probe.without_grad(self._begin, self.current)
        if self.repeats:
            return
        again = self._backward and len(self._round.members) < 2
        self.discards.before_backward(again, not self._mark_ns, retains)
        self._backward = True
        if loss is not None:
            probe.guard.run_all(probe.calls["after_backward"], loss)

    def close(self, on_time: bool) -> None:
        """Make the round a step: collect, publish, count."""
        if not self._round.members:
            return
        probe = self._probe
        self._round.close(on_time)
        self._backward, self._skip = False, ""
        elapsed = self._ended_ns - self._mark_ns - self._held_ns if self._mark_ns else None
        self._mark_ns, self._held_ns = self._ended_ns, 0
        step = Step(self.number, self.attempt, self._ended_ns, elapsed)
        values: Dict[str, Number] = {}
        probe.guard.run_all(probe.calls["collect"], step, values)
        if self.reported:
            reported, self.reported = self.reported, {}
            measured = values.keys() - {REPLACEABLE}
            values.update({k: v for k, v in reported.items() if k not in measured})
        probe.publisher.submit(step.number, step.attempt, step.at_ns, values)
        probe.beat("step")
        probe.scaling.step_ended()
        probe.rate.advance()
        if probe.tools.acting:
            probe.tools.step_ended()
        if elapsed is not None:
            probe.guard.judge(elapsed)
        self.number += 1
        self.on_time = on_time
        probe.drills.begin(self.number)
        probe.sampling.begin(self.number, self._ended_ns)
        if on_time:
            probe.commands.fetch()

    def end(self) -> None:
        """The process ends: what was begun is over."""
        self.handmade.end()
        self.close(on_time=False)

    def pass_on(self, optimizer: Any) -> None:
        """Another thread trains from now on, and has just stepped this: what was begun is over."""
        self.close(on_time=False)
        self._round.expect(id(optimizer), [id(optimizer)])
        self._backward, self._mark_ns = False, 0  # what lies between has no time

    def _appeared(self, key: int, known: Known, optimizer: Any) -> None:
        """An optimizer steps for the first time: the groups of all are counted anew."""
        if training_session.another(self._known.values(), known, self.number - self._began):
            self.close(on_time=False)
            self._round, self._began, self._mark_ns = Round(), self.number, 0
            training_session.begin(self._probe)
        self._known = in_order(self._known, key, known, self._round.members)
        if self.handmade.on:
            self.handmade.optimizer_steps()
        self._probe.optimizer_appeared(optimizer)

    def infer(self, key: int, number: Optional[int] = None) -> None:
        """Steps end under this key from now on (0: as optimizers do), at `number` if given."""
        self._round.expect(key)
        if number is not None:
            self.number, self._mark_ns = number, monotonic_ns()

    def inferred(self, update: Update) -> None:
        """An update without an optimizer is over, and its step with it."""
        self._round.members = [id(update.optimizer)]
        self.after_step(update)

    def optimizers(self) -> List[Any]:
        """Return the living optimizers, in order of first step."""
        return [o for known in self._known.values() if (o := known.reference()) is not None]

    def hold(self, elapsed_ns: int) -> None:
        """The job was held for `elapsed_ns` at this boundary; that is no step time."""
        self._held_ns += elapsed_ns

    def rewind(self, step: int, attempt: int) -> None:
        """The run stands again right behind `step`, in a new attempt."""
        self.number, self.attempt = step + 1, attempt
        self._backward = False
