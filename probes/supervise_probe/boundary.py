"""The step: which optimizer calls belong together, when they are over, and what happens then.

One training step is one or more optimizers stepped with no backward in between. The round closes
after the optimizer that closed it the last time; if that one does not come, at the next backward,
or when an optimizer comes a second time. Only a round that closes on time is a boundary: there the
job stands right behind its optimizer step, and commands may touch it. A late one just publishes.

Knows no metric: it calls the collectors.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from .handmade import Handmade
from .step import Known, Step, Update, is_phantom

if TYPE_CHECKING:
    from .probe import Probe
    from .scalars import Number

REPLACEABLE = "tokens_per_update"  # the one metric that a job may know better than the probe
PATIENCE = 8  # rounds without the last optimizer before the order is learned anew


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
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self.handmade = Handmade(probe)
        self.number = probe.config.first_step
        self.attempt = probe.config.attempt
        self.spent_ns: Optional[int] = None
        self.on_time = False
        self.entries = 0
        self.reported: Dict[str, Number] = {}
        self.current: Optional[Update] = None
        self._members: List[int] = []  # ids of the optimizers of the round
        self._last_round: List[int] = []
        self._last_of_round = 0  # id of the optimizer that ends a round; 0: not known yet
        self._misses = 0
        self._backward = False  # since the last boundary
        self._skip = ""  # the whole round is skipped
        self._known: Dict[int, Known] = {}  # by id of the optimizer, in order of first step
        self._ended_ns = 0
        self._mark_ns = 0
        self._held_ns = 0

    # ── before and after one optimizer ────────────────────────────────────────────────────────

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
        known.refresh(optimizer)
        update = Update(optimizer, closure, known)
        if not known.real or is_phantom(probe.torch, update, self._backward):
            return None
        if (probe.writer is None or not probe.on) and not probe.open():
            return None
        probe.training_thread()
        key = id(optimizer)
        if key in self._members:
            self.close(on_time=False)
        if not self._members:
            if self._last_round and not self._backward and key not in self._last_round:
                self._joins_late(key)
                self._scale_rate(optimizer)
                return None
            self._skip = probe.tools.skip.take() if probe.tools.acting else ""
        self._members.append(key)
        self.on_time = False
        self.current = update
        if self._known.get(key) is not known:
            self._appeared(key, known, optimizer)
        update.skip = "overflow" if overflow else self._skip
        update.scaler = probe.scaling.scaler
        if update.scaler is not None:
            update.scale = probe.scaling.scale()
        update.scheduled = optimizer.param_groups[0].get("lr")
        if type(update.scheduled) is not float and isinstance(update.scheduled, probe.torch.Tensor):
            update.scheduled = update.scheduled.clone()
        if not closure:
            self.measure(update)
        self._scale_rate(optimizer)
        if probe.tools.acting:
            probe.tools.before_update(update)
        probe.guard.run_all(probe.calls["before_update"], update)
        return update

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
        probe.batches.look()
        if probe.sampler.kept is not None:
            probe.sampler.side_pass()
        if probe.drills.active:
            probe.drills.before_update(update.params)
        found_inf = getattr(update.optimizer, "found_inf", None)
        if found_inf is not None:
            update.found_inf = probe.scalars.value(found_inf)
        probe.guard.run_all(probe.calls["measure"], update)
        skips = probe.rollbacks.skips
        if skips.ranges and not update.skip and len(self._members) == 1 and skips.due():
            update.skip = self._skip = "command"
        if not update.skip:
            probe.tools.gradients(update)
            self._skip = update.skip

    def after_step(self, update: Update) -> None:
        """The optimizer is done; the round may be over."""
        probe = self._probe
        self._ended_ns = monotonic_ns()
        self.current = None
        if probe.tools.acting:
            probe.tools.after_update(update)
        probe.guard.run_all(probe.calls["after_update"], update)
        ends = bool(self._members) and self._members[-1] == self._last_of_round
        if ends or probe.rollbacks.handover.ends(self._members):
            self._last_of_round = self._members[-1]
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
        return bool(self._members) and self.current is None

    @property
    def accumulates(self) -> bool:
        """Whether a backward has run since the last step."""
        return self._backward

    @property
    def round(self) -> int:
        """How many optimizers made the last step."""
        return len(self._last_round)

    def abandon(self, update: Update) -> None:
        """The optimizer's step raised: the job may catch that and try again."""
        self.current = None
        if self._members and self._members[-1] == id(update.optimizer):
            self._members.pop()

    def saw_backward(self, loss: Optional[Number]) -> None:
        """A backward of `loss` is about to run (None: of something that is no scalar)."""
        probe = self._probe
        if self.current is None and self._members:
            self.close(on_time=False)
        if self.repeats:
            return
        if self._backward and not self._mark_ns and not probe.registry.holds_gradients():
            probe.guard.run_all(probe.calls["forget"])
        self._backward = True
        if loss is not None:
            probe.guard.run_all(probe.calls["after_backward"], loss)

    # ── the end of a step ─────────────────────────────────────────────────────────────────────

    def close(self, on_time: bool) -> None:
        """Make the round a step: collect, publish, count."""
        if not self._members:
            return
        probe = self._probe
        self._learn(on_time)
        elapsed = self._ended_ns - self._mark_ns - self._held_ns if self._mark_ns else None
        self._mark_ns, self._held_ns = self._ended_ns, 0
        step = Step(self.number, self.attempt, self._ended_ns, elapsed)
        values: Dict[str, Number] = {}
        probe.guard.run_all(probe.calls["collect"], step, values)
        if self.reported:
            reported, self.reported = self.reported, {}
            values.update(
                {k: v for k, v in reported.items() if k not in values or k == REPLACEABLE}
            )
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

    def _learn(self, on_time: bool) -> None:
        members, self._members = self._members, []
        self._last_round = members
        self._backward = False
        if on_time:
            self._misses = 0
            return
        self._misses += 1
        if not self._last_of_round or self._misses >= PATIENCE:
            self._last_of_round = members[-1]
            self._misses = 0

    def _joins_late(self, key: int) -> None:
        """This optimizer belongs to the round that has just closed: wait for it the next time."""
        self._last_round.append(key)
        self._last_of_round = key
        self._misses = 0

    # ── for the commands ──────────────────────────────────────────────────────────────────────

    def _appeared(self, key: int, known: Known, optimizer: Any) -> None:
        """An optimizer steps for the first time: the groups of all are counted anew."""
        self._known = {k: old for k, old in self._known.items() if old.reference() is not None}
        self._known.pop(key, None)
        self._known[key] = known
        groups = 0
        for each in self._known.values():
            each.first_group = groups
            groups += len(getattr(each.reference(), "param_groups", ()))
        if self.handmade.on:
            self.handmade.optimizer_steps()
        self._probe.optimizer_appeared(optimizer)

    def infer(self, key: int, number: Optional[int] = None) -> None:
        """Steps end under this key from now on (0: as optimizers do), at `number` if given."""
        self._last_of_round, self._last_round = key, []
        if number is not None:
            self.number, self._mark_ns = number, monotonic_ns()

    def inferred(self, update: Update) -> None:
        """An update without an optimizer is over, and its step with it."""
        self._members = [self._last_of_round]
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
