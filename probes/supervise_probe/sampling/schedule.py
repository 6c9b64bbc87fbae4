"""Which sampled sets are due in the step under way, and what they may cost.

A set is due when the step number is a multiple of its interval, so that all ranks sample the same
steps; never in the first two steps, which compile and allocate. The supervisor may ask for denser
samples for a while, by a word in the segment that expires by itself, or for much denser ones, for
a number of steps, by the verb `raise_sampling`. A set whose samples cost more than its share of the
time between two of them is taken half as often; one whose single sample is far too dear is switched
off. The guard cannot judge that: what happens in one step of fifty is never in a median.
"""

from __future__ import annotations

from time import thread_time_ns
from typing import TYPE_CHECKING, Any, Callable, Dict, FrozenSet, Iterator, Optional

from ..errors import Refused

if TYPE_CHECKING:
    from ..probe import Probe
    from ..runtime.guard import Part

# Steps between two samples where nobody says otherwise: the cost of one is then below SHARE.
DEFAULTS = {"attention": 50, "activations": 50, "routing": 10, "weights": 500, "gradients": 50}
IN_FORWARD = frozenset(("attention", "activations", "routing"))
FIRST_STEP = 2
DENSER = 2  # times, while the supervisor asks for it; at 5 the example paid 3 % of a step
SHARE = 0.003  # of the time between two samples, for each set
FLOOR_NS = 20_000  # per step, in any case: a toy's step is hardly longer
LONGEST_NS = 1_000_000_000  # one sample
LONGEST_STEPS = 20  # one sample, in steps, but for SHORT_NS
SHORT_NS = 50_000_000
LOOK_NS = 250_000_000  # between two looks at the supervisor's wish
NONE: FrozenSet[str] = frozenset()


class Interval:
    """One set.

    Attributes:
        asked: steps between two samples as configured; 0 is never. every: as stretched.
        raised: steps between two while a command asks for more samples; 0: none does.
        cost_ns: of the newest sample, thread CPU time. spent_ns: of the one under way.
        samples: taken so far. off: why it is switched off, "" while it is on.
    """

    __slots__ = ("asked", "cost_ns", "every", "off", "raised", "samples", "spent_ns")

    def __init__(self, asked: int) -> None:
        self.asked = self.every = asked
        self.cost_ns = self.spent_ns = self.samples = self.raised = 0
        self.off = ""


class Sampling:
    """The plan of one process.

    Attributes:
        sets: all intervals by name.
        waiting: a set is due that is looked at in the forward, and no forward came yet.
        wanted: the input of the next forward is wanted as the probe batch.
        tight: samples are denser for now.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        asked = probe.config.sampling
        self._share = float(asked.get("share", SHARE))
        self.sets = {name: Interval(int(asked.get(name, n))) for name, n in DEFAULTS.items()}
        self.waiting = self.wanted = self.tight = False
        self._due = NONE
        self._step = self._next = 0
        self._look_ns = 0
        self._mark: Optional[tuple[int, int]] = None  # step and time of the newest sample
        self._raised_left = 0  # steps

    def due(self, name: str) -> bool:
        """Whether the step under way is one in which `name` is sampled."""
        return name in self._due

    def begin(self, step: int, now_ns: int) -> None:
        """The step before `step` ended at `now_ns`: judge its samples, and plan."""
        if self._due:
            self._judge(step, now_ns)
            self._due, self.waiting = NONE, self.wanted
            self._probe.calls = self._probe.plan.of(NONE)
            self._probe.sampler.wants_logits = False
        if self._raised_left:
            self._raised_left -= 1
            if not self._raised_left:
                self._lower()
        if now_ns >= self._look_ns:
            self._look(now_ns)
        if step >= self._next or step < self._step:
            self._plan(step)
        self._step = step

    def run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)` for the set `name`; guarded, and its cost is the set's."""
        began = thread_time_ns()
        try:
            return self._probe.guard.run(self._probe.guard.part(name), function, *args)
        finally:
            self.sets[name].spent_ns += thread_time_ns() - began

    def want(self) -> None:
        """Have the input of the next forward looked at, whatever is due."""
        self.waiting = self.wanted = True

    def spent(self, name: str, cost_ns: int) -> None:
        """A sample of `name` cost that much thread CPU time somewhere else."""
        self.sets[name].spent_ns += cost_ns

    def describe(self) -> Dict[str, Any]:
        """Return the intervals in steps, as they are now; or why there is none."""
        found: Dict[str, Any] = {name: each.off or self._every(each) for name, each in self._all()}
        if self.tight:
            found["tight"] = True
        refused = self._probe.sampler.refused
        if refused:
            found["side_path"] = f"unavailable: {refused}"
        return found

    # ── the command ───────────────────────────────────────────────────────────────────────────

    def do_raise_sampling(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """Sample `sets` (None: all) every `every` steps at least, for `steps`; or `lift` that.

        A set that was configured to be never sampled, or is switched off, stays so.
        """
        if args.get("lift"):
            self._lower()
            return {"sampling": self.describe()}
        every, steps = int(args["every"]), int(args["steps"])
        if every < 1 or steps < 1:
            raise Refused(f"samples every {every} steps for {steps} steps: both are 1 at least")
        names = [str(name) for name in args.get("sets") or self.sets]
        unknown = [name for name in names if name not in self.sets]
        if unknown:
            raise Refused(f"there is no set {unknown[0]!r}; there are {', '.join(self.sets)}")
        on = [name for name in names if self.sets[name].every and not self.sets[name].off]
        if not on:
            raise Refused("none of these sets is on")
        self._lower()
        for name in on:
            self.sets[name].raised = every
            for part in self._parts(name):
                part.excused = True
        self._raised_left, self._next = steps, 0
        return {"sampling": self.describe(), "raised": on, "steps": steps}

    def _lower(self) -> None:
        """Every set goes back to its own interval."""
        self._raised_left = self._next = 0
        for name, each in self._all():
            if each.raised:
                each.raised = 0
                for part in self._parts(name):
                    part.excused = False
                    part.costs.clear()
        self._probe.status_changed()

    def _parts(self, name: str) -> Iterator[Part]:
        """Yield the pieces that a sample of the set is made of."""
        guard = self._probe.guard
        yield guard.part(name)
        for each, collector in self._probe.collectors.items():
            if name == collector.SAMPLED:
                yield guard.part(each)

    # ── the plan ──────────────────────────────────────────────────────────────────────────────

    def _all(self) -> Any:
        return self.sets.items()

    def _every(self, each: Interval) -> int:
        every = max(1, each.every // DENSER) if self.tight and each.every else each.every
        return min(every, each.raised) if each.raised else every

    def _plan(self, step: int) -> None:
        parts = self._probe.guard.parts
        due, following = set(), []
        for name, each in self._all():
            every = self._every(each)
            part = parts.get(name)
            if not every or each.off or (part is not None and not part.on):
                continue
            if step >= FIRST_STEP and step % every == 0:
                due.add(name)
            following.append(max(FIRST_STEP, (step // every + 1) * every))
        self._next = min(following, default=1 << 62)
        if due:
            self._due = frozenset(due)
            self._probe.calls = self._probe.plan.of(self._due)
            self.waiting = self.wanted or bool(self._due & IN_FORWARD)
            if "weights" in due:
                self._probe.snapshots.take(step)
        if self._probe.snapshots.arriving:
            self._next = min(self._next, step + 1)
            self._probe.snapshots.look()

    def _look(self, now_ns: int) -> None:
        self._look_ns = now_ns + LOOK_NS
        tight = self._probe.writer.tight_until_ns() > now_ns
        if tight is not self.tight:
            self.tight = tight
            self._next = 0
            self._probe.status_changed()

    # ── what it costs ─────────────────────────────────────────────────────────────────────────

    def _judge(self, step: int, now_ns: int) -> None:
        mark, self._mark = self._mark, (step, now_ns)
        if self._probe.guard.blind:
            mark = None
        for name in self._due:
            each = self.sets[name]
            if not each.spent_ns:
                continue
            each.cost_ns, each.spent_ns = each.spent_ns, 0
            each.samples += 1
            known = mark is not None and step > mark[0]
            step_ns = (now_ns - mark[1]) // (step - mark[0]) if known and mark else None
            self._weigh(name, each, step_ns)

    def _weigh(self, name: str, each: Interval, step_ns: Optional[int]) -> None:
        cost = each.cost_ns
        ms = f"{cost / 1e6:.1f} ms"
        if cost > LONGEST_NS:
            self._switch_off(name, each, f"one sample took {ms}")
            return
        if step_ns is None or each.samples < 2:  # the first one loads code, and proves nothing
            return
        if cost > max(LONGEST_STEPS * step_ns, SHORT_NS):
            self._switch_off(name, each, f"one sample took {ms}, {cost / step_ns:.0f} steps")
            return
        allowed = self._share * step_ns + FLOOR_NS
        if cost > allowed * each.every:
            each.every *= 2
            told = f"{name} is sampled every {each.every} steps: one sample costs {ms}"
            self._probe.notice("sampling", told, {"set": name, "every": each.every})
        elif each.every > each.asked and 4 * cost < allowed * each.every:
            each.every //= 2
            self._probe.status_changed()
        else:
            return
        self._next = 0

    def _switch_off(self, name: str, each: Interval, reason: str) -> None:
        each.off = f"off: {reason}"
        self._probe.guard.switch_off(self._probe.guard.part(name), reason)
