"""Schedule of the sampled sets, and their limit of cost.

A set is due when the step number is a multiple of its interval, so that all ranks sample the same
steps; never in the first two steps, which compile and allocate. At first samples are dense, so that
there is soon something to compare with. The supervisor may ask for denser samples for a while, by a
word in the segment that expires by itself, or for much denser ones, for a number of steps, by the
verb `raise_sampling`. A set whose samples cost more than its share of the time between two of them
is taken half as often; one whose single sample is far too dear is switched off. The guard cannot
judge that: what happens in one step of fifty is never in a median.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional, Sequence

from ..context import Refused
from .sample_sets import EARLY_STEPS, FLOOR_NS, IN_FORWARD, NONE, Interval

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.guard import Part
    from .sample_sets import SampleSets
    from .watch import Sampler, Snapshots
    from .weight_pairs import WeightPairs

FIRST_STEP = 2
DENSER = 2  # times, while the supervisor asks for it; at 5 the example paid 3 % of a step
EARLY = 0.9  # of the probe's share, for each set in the first steps, once in a process
LONGEST_NS = 1_000_000_000  # one sample
LONGEST_STEPS = 20  # one sample, in steps, but for SHORT_NS
SHORT_NS = 50_000_000
LOOK_NS = 250_000_000  # between two looks at the supervisor's wish


class SamplingSchedule:
    """The plan of one process.

    Attributes:
        tight: samples are denser for now.
    """

    def __init__(
        self,
        context: ProbeContext,
        sets: SampleSets,
        begin_calls: Callable[[frozenset[str]], None],
        of_set: Callable[[str], Sequence[str]],
        sampler: Sampler,
        snapshots: Snapshots,
        pairs: WeightPairs,
    ) -> None:
        """Begin.

        Args:
            begin_calls: called with the sets of the step that begins. of_set: returns the names of
                the collectors that are called when a set is sampled.
        """
        self._guard, self._reporter = context.guard, context.reporter
        self._sets, self._begin_calls, self._of_set = sets, begin_calls, of_set
        self._sampler, self._snapshots, self._pairs = sampler, snapshots, pairs
        self.tight = False
        self._step = self._next = 0
        self._started = 0, 0  # step and time
        self._now_ns = self._step_ns = 0
        self._early_until: Optional[int] = None  # a step
        self._look_ns = 0
        self._mark: Optional[tuple[int, int]] = None  # step and time of the newest sample
        self._raised_left = 0  # steps

    def plan_step(self, step: int, now_ns: int) -> None:
        """The step before `step` ended at `now_ns`: judge its samples, and plan."""
        sets = self._sets
        self._now_ns = now_ns
        if self._early_until is None:
            self._early_until = step + EARLY_STEPS
            self._started = step, now_ns
        if sets.due:
            self._judge(step, now_ns)
            sets.due, sets.waiting = NONE, sets.wanted
            self._begin_calls(NONE)
            self._sampler.wants_logits = False
        if self._raised_left:
            self._raised_left -= 1
            if not self._raised_left:
                self._lower()
        if now_ns >= self._look_ns:
            self._look(now_ns)
        if step >= self._pairs.next:
            self._pairs.measure_between_steps(step)
        if step >= self._next or step < self._step:
            self._plan(step)
        self._step = step
        dense = self.tight or self._raised_left > 0 or step < sets.dense_until
        for pace in sets.paces.values():
            pace.due = dense or step % pace.every == 0

    def describe(self) -> dict[str, Any]:
        """Return the intervals in steps, as they are now; or why there is none."""
        intervals: dict[str, Any] = {
            name: interval.off or self._every(interval) for name, interval in self._all()
        }
        intervals.update({name: pace.every for name, pace in self._sets.paces.items()})
        if self._pairs.is_on:
            intervals["spectra"] = self._pairs.describe()
        if self.tight:
            intervals["tight"] = True
        refused = self._sampler.refused
        if refused:
            intervals["side_path"] = f"unavailable: {refused}"
        return intervals

    def thinned(self) -> dict[str, int]:
        """Return what is measured less often than it should be for its cost, and how often."""
        return self._sets.thinned() | self._pairs.thinned()

    # ── the command ───────────────────────────────────────────────────────────────────────────

    def do_raise_sampling(self, args: dict[str, Any]) -> dict[str, Any]:
        """Sample `sets` (None: all) every `every` steps at least, for `steps`; or `lift` that.

        A set that was configured to be never sampled, or is switched off, stays so.
        """
        if args.get("lift"):
            self._lower()
            return {"sampling": self.describe()}
        every, steps = int(args["every"]), int(args["steps"])
        if every < 1 or steps < 1:
            raise Refused(f"samples every {every} steps for {steps} steps: both are 1 at least")
        by_name = self._sets.by_name
        names = [str(name) for name in args.get("sets") or by_name]
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise Refused(f"there is no set {unknown[0]!r}; there are {', '.join(by_name)}")
        on = [
            name
            for name in names
            if self._sets.by_name[name].every and not self._sets.by_name[name].off
        ]
        if not on:
            raise Refused("none of these sets is on")
        self._lower()
        for name in on:
            self._sets.by_name[name].raised = every
            for part in self._parts(name):
                part.excused = True
        self._raised_left, self._next = steps, 0
        return {"sampling": self.describe(), "raised": on, "steps": steps}

    def _lower(self) -> None:
        """Every set goes back to its own interval."""
        self._raised_left = self._next = 0
        for name, interval in self._all():
            if interval.raised:
                interval.raised = 0
                for part in self._parts(name):
                    part.excused = False
                    part.costs.clear()
        self._reporter.status_changed()

    def _parts(self, name: str) -> Iterator[Part]:
        """Yield the pieces that a sample of the set is made of."""
        for member in (name, *self._of_set(name)):
            yield self._guard.part(member)

    # ── the plan ──────────────────────────────────────────────────────────────────────────────

    def _all(self) -> Any:
        return self._sets.by_name.items()

    def _every(self, interval: Interval) -> int:
        every = interval.every
        if self.tight and every > interval.asked:
            every = self._sets.densest_interval(interval, self._step_ns)
        elif self.tight and every:
            every = max(1, every // DENSER)
        if interval.early and self._step + 1 < (self._early_until or 0):
            every = min(every, interval.early)
        return min(every, interval.raised) if interval.raised else every

    def _plan(self, step: int) -> None:
        parts = self._guard.parts
        due: set[str] = set()
        following = []
        for name, interval in self._all():
            every = self._every(interval)
            part = parts.get(name)
            if not every or interval.off or (part is not None and not part.on):
                continue
            if step >= FIRST_STEP and step % every == 0 and self._affords(interval, step, due):
                due.add(name)
            following.append(max(FIRST_STEP, (step // every + 1) * every))
        self._next = min(following, default=1 << 62)
        if due:
            sets = self._sets
            sets.due = frozenset(due)
            self._begin_calls(sets.due)
            sets.waiting = sets.wanted or bool(sets.due & IN_FORWARD)
            if "routers" in due:
                self._snapshots.copy_matrices()
        if self._snapshots.arriving:
            self._next = min(self._next, step + 1)
            self._snapshots.use_arrived_copies()

    def _affords(self, interval: Interval, step: int, due: set[str]) -> bool:
        """Return whether the share pays for this sample, too; only an incident asks for more."""
        if not self.tight or interval.raised:
            return True
        steps, elapsed_ns = step - self._started[0], self._now_ns - self._started[1]
        planned = interval.cost_ns + sum(self._sets.by_name[name].cost_ns for name in due)
        return self._sets.total_ns + planned <= self._sets.allowed_ns(steps, elapsed_ns)

    def _look(self, now_ns: int) -> None:
        self._look_ns = now_ns + LOOK_NS
        tight = self._reporter.writer.dense_sampling_until_ns() > now_ns
        if tight is not self.tight:
            self.tight = tight
            self._next = 0
            self._reporter.status_changed()

    # ── what it costs ─────────────────────────────────────────────────────────────────────────

    def _judge(self, step: int, now_ns: int) -> None:
        mark, self._mark = self._mark, (step, now_ns)
        if self._guard.blind:
            mark = None
        for name in self._sets.due:
            interval = self._sets.by_name[name]
            if not interval.spent_ns:
                continue
            interval.cost_ns, interval.spent_ns = interval.spent_ns, 0
            self._sets.total_ns += interval.cost_ns
            interval.samples += 1
            is_later = mark is not None and step > mark[0]
            step_ns = (now_ns - mark[1]) // (step - mark[0]) if is_later and mark else None
            self._weigh(name, interval, step_ns)

    def _weigh(self, name: str, interval: Interval, step_ns: Optional[int]) -> None:
        cost = interval.cost_ns
        ms = f"{cost / 1e6:.1f} ms"
        if cost > LONGEST_NS:
            self._switch_off(name, interval, f"one sample took {ms}")
            return
        if step_ns is None or interval.samples < 2:  # the first one loads code, and proves nothing
            return
        if cost > max(LONGEST_STEPS * step_ns, SHORT_NS):
            self._switch_off(name, interval, f"one sample took {ms}, {cost / step_ns:.0f} steps")
            return
        self._step_ns = step_ns
        early = EARLY * self._sets.budget.share * step_ns * interval.early
        early += 2 * FLOOR_NS * interval.every
        if interval.early and cost > early:
            interval.early *= 2
        every = self._sets.affordable_interval(interval, step_ns)
        if every != interval.every:
            interval.every = every
            self._reporter.status_changed()
            self._next = 0

    def _switch_off(self, name: str, interval: Interval, reason: str) -> None:
        interval.off = f"off: {reason}"
        self._guard.switch_off(self._guard.part(name), reason)
