"""The detectors and rules of one rank: frames in, rules that fired or cleared out.

Inside, watches keep mutable private state (a frozen object per sample costs four times too much);
outside, the same frames give the same answers. Numbers are collected only when a rule changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from .rule import Policy, Rule
from .shapes import NOTE, Clockwork, Watch
from .values import BREACH, CODE_NAMES, OK, UNKNOWN, Beat, Frame

LOSS = "train_loss_raw"
HISTORY_STEPS = 256  # losses kept to say what "back in its band" means


class RuleWatch:
    """One rule on one rank: `code` now, `held` consecutive TRUE steps, `firing` since `since`."""

    __slots__ = ("blind", "code", "firing", "held", "keep_until", "unknown_since")

    def __init__(self) -> None:
        self.code = UNKNOWN
        self.held = 0
        self.firing = False
        self.keep_until = 0
        self.unknown_since: tuple[int, int] | None = None  # (pace, at_ns)
        self.blind = False

    def copy(self) -> RuleWatch:
        twin = RuleWatch()
        for name in RuleWatch.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin


class Bank:
    """All watches of one rank."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.detectors = tuple(policy.detectors.items())
        self.index = {name: i for i, (name, _) in enumerate(self.detectors)}
        self.watches: list[Watch] = [detector.start() for _, detector in self.detectors]
        self.codes = [UNKNOWN] * len(self.watches)
        self.rules = [RuleWatch() for _ in policy.rules]
        self.needs = [self._metrics_of(rule) for rule in policy.rules]
        self.names: tuple[str, ...] = ()
        self.pid = 0
        self.attempt = 0
        self.step = -1
        self.frames = 0
        self.deaf = False  # the probe of this rank is off or cannot be read
        self.latest: tuple[float | None, ...] = ()
        self.losses: deque[tuple[int, float]] = deque(maxlen=HISTORY_STEPS)
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self._plan()

    def copy(self) -> Bank:
        twin = Bank.__new__(Bank)
        twin.__dict__.update(self.__dict__)
        twin.watches = [watch.copy() for watch in self.watches]
        twin.codes = list(self.codes)
        twin.rules = [rule.copy() for rule in self.rules]
        twin.losses = deque(self.losses, maxlen=HISTORY_STEPS)
        twin.notes = list(self.notes)
        twin._plan()
        return twin

    # ── which column feeds which watch ────────────────────────────────────────────────────────────

    def announce(self, names: tuple[str, ...], pid: int) -> None:
        """Bind metric names to columns. Another process of the same rank starts from nothing."""
        if self.pid and pid != self.pid:
            for watch in self.watches:
                watch.reset()
            self.codes = [UNKNOWN] * len(self.watches)
            self.losses.clear()
            self.step = -1
        self.pid, self.names = pid, names
        self._plan()

    def _plan(self) -> None:
        column = {name: i for i, name in enumerate(self.names)}
        self._loss = column.get(LOSS, -1)
        self._singles: list[tuple[int, Callable[[Any, int], int], int]] = []
        self._others: list[tuple[int, Callable[[Any, int], int], tuple[int, ...], list[Watch]]] = []
        self._clocks: list[tuple[int, Clockwork]] = []
        for i, (_, detector) in enumerate(self.detectors):
            watch = self.watches[i]
            columns = tuple(column.get(m, -1) for m in detector.metrics)
            known = any(c >= 0 for c in columns)
            inputs = [self.watches[self.index[name]] for name in detector.detectors]
            if isinstance(watch, Clockwork):
                self._clocks.append((i, watch))
            elif detector.reads == "metric":
                if known:
                    self._singles.append((i, watch.feed, columns[0]))
            elif known or inputs:
                self._others.append((i, watch.feed, columns, inputs))
        # Rules that must be judged even when no code changed.
        self._hot = list(range(len(self.policy.rules)))

    def _metrics_of(self, rule: Rule) -> tuple[tuple[str, ...], ...]:
        """Return the metrics a rule cannot do without, one tuple of alternatives per detector."""
        found: list[tuple[str, ...]] = []
        for name in self.policy.behind(rule):
            detector = self.policy.detectors[name]
            if detector.reads == "metrics":
                found.append(detector.metrics)  # looks at whatever is present: any one will do
            else:
                found += [(metric,) for metric in detector.metrics]
        return tuple(found)

    def active(self, rule: int) -> bool:
        """Return whether every metric that the rule needs exists in this job."""
        return not self.deaf and all(
            any(m in self.names for m in options) for options in self.needs[rule]
        )

    # ── feeding ───────────────────────────────────────────────────────────────────────────────────

    def feed(self, frame: Frame, pace: int) -> list[tuple[int, bool]]:
        """Take a frame; return `(rule index, fired)` for every rule that fired or cleared."""
        if frame.attempt != self.attempt:
            self._rewind(frame)
        step, values = frame.step, frame.values
        missing = len(self.names) - len(values)
        if missing > 0:
            values += (None,) * missing
        codes, changed = self.codes, False
        for i, feed, column in self._singles:
            code = feed(values[column], step)
            if code != codes[i]:
                codes[i] = self._settle(i, code)
                changed = True
        for i, feed, columns, inputs in self._others:
            code = feed(self._sample(i, values, columns, inputs), step)
            if code != codes[i]:
                codes[i] = self._settle(i, code)
                changed = True
        for _, clock in self._clocks:
            clock.beat(frame.at_ns, step)
        self.step, self.latest, self.frames = step, values, self.frames + 1
        if self._loss >= 0:
            loss = values[self._loss]
            if loss is not None and loss - loss == 0.0:
                self.losses.append((step, loss))
        return self._judge(changed, pace, frame.at_ns)

    def tick(self, at_ns: int, beat: Beat | None, pace: int) -> list[tuple[int, bool]]:
        """Let the clockworks see the time; return rules that fired or cleared.

        Silence means something only while the probe is known to be there: without a `beat`, or once
        it was switched off (`deaf`), nothing is known.
        """
        changed = False
        for i, clock in self._clocks:
            code = UNKNOWN
            if beat is not None and not self.deaf:
                code = clock.tick(at_ns, beat.seen_ns, beat.phase)
                if beat.phase == "exiting":  # a job that ends makes no step, and that is all right
                    code = OK
            if code != self.codes[i]:
                self.codes[i] = self._settle(i, code)
                changed = True
        return self._judge(True, pace, at_ns, new_step=False) if changed else []

    def awake(self, at_ns: int) -> None:
        """The run was stopped from outside and goes on: deadlines begin anew."""
        for _, clock in self._clocks:
            clock.beat(at_ns, self.step)

    def _sample(
        self,
        i: int,
        values: tuple[float | None, ...],
        columns: tuple[int, ...],
        inputs: list[Watch],
    ) -> Any:
        reads = self.detectors[i][1].reads
        if reads == "metrics":
            return [values[c] if c >= 0 else None for c in columns]
        if reads == "detectors":
            return [watch.raw for watch in inputs]
        return (values[columns[0]] if columns[0] >= 0 else None, inputs[0].raw)

    def _settle(self, i: int, code: int) -> int:
        if code & NOTE:
            self.notes.append((self.detectors[i][0], self.watches[i].note()))
        return code & 3

    def _rewind(self, frame: Frame) -> None:
        """A rollback went back to before `frame.step`: what was seen before it stays valid."""
        self.attempt = frame.attempt
        for watch in self.watches:
            watch.rewind(frame.step - 1)
        while self.losses and self.losses[-1][0] >= frame.step:
            self.losses.pop()

    # ── rules ─────────────────────────────────────────────────────────────────────────────────────

    def _judge(
        self, changed: bool, pace: int, at_ns: int, *, new_step: bool = True
    ) -> list[tuple[int, bool]]:
        moved: list[tuple[int, bool]] = []
        rules = self.policy.rules
        hot: list[int] = []
        for r in range(len(rules)) if changed else self._hot:
            rule, watch = rules[r], self.rules[r]
            watch.code = rule.when(self.codes)
            if watch.code == OK and not watch.firing:
                watch.held, watch.unknown_since, watch.blind = 0, None, False
                continue
            hot.append(r)
            fired = self._weigh(rule, watch, pace, at_ns, new_step)
            if fired is not None:
                moved.append((r, fired))
        self._hot = hot
        return moved

    @staticmethod
    def _weigh(rule: Rule, watch: RuleWatch, pace: int, at_ns: int, new_step: bool) -> bool | None:
        code = watch.code
        if code == UNKNOWN:
            if watch.unknown_since is None:
                watch.unknown_since = (pace, at_ns)
            if rule.unknown == "hold":
                return None
            code = BREACH if rule.unknown == "breach" else OK
        else:
            watch.unknown_since, watch.blind = None, False
        if code == BREACH:
            watch.held += 1 if new_step or watch.held == 0 else 0
            if not watch.firing and watch.held >= rule.for_steps:
                watch.firing, watch.keep_until = True, pace + rule.keep_steps
                return True
            return None
        watch.held = 0
        if watch.firing and pace >= watch.keep_until:
            watch.firing = False
            return False
        return None

    def blind(self, pace: int, at_ns: int) -> list[int]:
        """Return rules that lack a metric which was there before, for too long, once each.

        A detector that is still warming up, or undecided on good values, is not blind.
        """
        found: list[int] = []
        for r, (rule, watch) in enumerate(zip(self.policy.rules, self.rules, strict=True)):
            if watch.unknown_since is None or watch.blind or rule.unknown in ("ok", "ignore"):
                continue
            since_pace, since_ns = watch.unknown_since
            long = (
                pace - since_pace > self.policy.blind_after_steps
                or at_ns - since_ns > self.policy.blind_after_s * 1e9
            )
            if long and pace > since_pace and self.active(r) and self._lacking(r):
                watch.blind = True
                found.append(r)
        return found

    def _lacking(self, rule: int) -> bool:
        """Return whether a metric that the rule needs has no finite value in the newest frame."""
        return any(
            all((value := self.value(m)) is None or value - value != 0.0 for m in options)
            for options in self.needs[rule]
        )

    def release(self) -> None:
        """Forget which rules fire, so that one that is still in breach fires, and acts, again."""
        for watch in self.rules:
            watch.firing, watch.held = False, 0
        self._hot = list(range(len(self.rules)))

    # ── what people and runbooks ask ──────────────────────────────────────────────────────────────

    def numbers(self, rule: Rule) -> dict[str, Any]:
        """Return the numbers behind a rule, detector by detector, inputs of couplings included."""
        found: dict[str, Any] = {}
        for name in self.policy.behind(rule):
            i, detector = self.index[name], self.policy.detectors[name]
            found[name] = {"code": CODE_NAMES[self.codes[i]], **self.watches[i].numbers()}
            if len(detector.metrics) == 1:
                found[name]["metric"] = detector.metrics[0]
        return found

    def value(self, metric: str) -> float | None:
        """Return the newest value of a metric, None when absent."""
        if metric not in self.names:
            return None
        column = self.names.index(metric)
        return self.latest[column] if column < len(self.latest) else None
