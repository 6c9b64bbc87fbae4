"""The detectors and rules of one rank: frames in, rules that fired or cleared out.

Inside, watches keep mutable private state (a frozen object per sample costs four times too much);
outside, the same frames give the same answers. Numbers are collected only when a rule changes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any

from .frames import (
    FORWARD,
    JOB,
    LOSS,
    SAMPLE_NS,
    STATISTICS,
    THROUGHPUT,
    BrokenForward,
    History,
    MeanValues,
    find_broken_forward,
)
from .model import formats
from .model.decisions import BREACH, CODE_NAMES, OK, UNKNOWN
from .model.events import Beat, Frame, LateFrame
from .model.interfaces import HAS_NOTE, Clockwork, Detector, Note, Reading, Watch
from .model.policy import Policy, Rule

Values = tuple[float | None, ...]
Sampler = Callable[[Values], Any]
Feed = Callable[[Any, int], int]

FEW = 32  # frames, when time has passed and few frames came: twice the probe's longest interval


@dataclass(slots=True)
class RuleWatch:
    """One rule on one rank: `code` now, `held` consecutive TRUE steps, `answered` by a runbook.

    `since` is the first step of what made it TRUE, -1 while it is not, or in an earlier attempt.
    """

    code: int = UNKNOWN
    held: int = 0
    keep_until: int = 0
    keep_ns: int = 0
    fired_ns: int = 0
    keep_step: int = -1
    since: int = -1
    firing: bool = False
    answered: bool = False
    unknown_since: tuple[int, int, int] | None = None  # frame count, time, and the step before
    blind: bool = False


@dataclass(slots=True)
class LateStream:
    """What was taken of one stream of late frames.

    Attributes:
        latest: newest value of each metric that it ever had. fed: detector -> its newest step.
        judged: rule -> the newest two steps at which a detector of it was fed.
    """

    latest: dict[str, float] = field(default_factory=dict)
    fed: dict[str, int] = field(default_factory=dict)
    judged: dict[str, tuple[int, int]] = field(default_factory=dict)

    def rewind(self, step: int) -> None:
        self.fed = {name: min(last, step) for name, last in self.fed.items()}
        self.judged = {rule: (min(a, step), min(b, step)) for rule, (a, b) in self.judged.items()}


class RankMonitor:
    """All watches of one rank, in the order of `detectors`.

    A detector whose metrics come late is fed at their steps, and a rule that reads only such ones
    counts those. A detector of metrics of several streams has no order of steps, and is not fed.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.detectors = tuple(policy.detectors.items())
        self.index = {name: i for i, (name, _) in enumerate(self.detectors)}
        self.watches = _start([detector for _, detector in self.detectors])
        self.codes = [UNKNOWN] * len(self.watches)
        self.rules = [RuleWatch() for _ in policy.rules]
        self.names: tuple[str, ...] = ()
        self.program: tuple[int, int] | None = None  # see Announced
        self.attempt = 0
        self.step = self.step_before = -1  # of the newest frame, and of the one before
        self.frames = 0
        self.weights_of = 0, -1  # attempt that goes on with the weights of an earlier step: which
        self.lost = 0  # frames that were overwritten since the newest one
        self.probe_off = False  # the probe of this rank is off or cannot be read
        self.exited = False  # the process of this rank has ended, and another one has not spoken
        self.elsewhere = frozenset[int]()  # rules that another rank judges, by the job's numbers
        self.latest: Values = ()
        self.dense: set[str] = set()  # metrics known to come with every frame
        self.history = History()
        self.means = MeanValues()
        self.late: dict[str, LateStream] = {}
        self.undone: list[tuple[int, int]] = []  # attempt that went back, the last step it left
        self._home = [""] * len(self.watches)  # stream of each detector, "" for the run's frames
        self.notes: list[tuple[str, Note]] = []
        self._plan()

    # ── which column feeds which watch ────────────────────────────────────────────────────────────

    def is_replaced_by(self, program: tuple[int, int] | None) -> bool:
        """Return whether that program takes the place of one that nobody knew to have ended."""
        return self.program not in (None, program) and not self.exited

    def announce(self, names: tuple[str, ...], program: tuple[int, int] | None) -> None:
        """Bind metric names to columns; another program of the same rank starts from nothing."""
        fresh, self.exited = self.program not in (None, program), False
        if fresh:
            for i, watch in enumerate(self.watches):
                if not self._home[i]:  # late frames are of weights, whoever trains them
                    watch.reset()
                    self.codes[i] = UNKNOWN
            self.probe_off, self.step, self.latest, self.dense = False, -1, (), set()
            self.means = MeanValues()
            for rule in self.rules:
                rule.keep_step = rule.since = -1  # its steps are other ones
        self.history.announce(names, fresh=fresh)
        self.program, self.names = program, names
        self._plan()

    def delegate_rules(self, elsewhere: frozenset[int]) -> None:
        """Leave these rules to the rank that has the job's numbers."""
        if elsewhere != self.elsewhere:
            for r in elsewhere ^ self.elsewhere:
                self.rules[r] = RuleWatch()
            self.elsewhere = elsewhere
            self._hot = list(range(len(self.policy.rules)))

    def reset_detectors(self, metrics: Sequence[object]) -> None:
        """These metrics are measured in another way from now on: what was learnt is of the old."""
        for i, (_, detector) in enumerate(self.detectors):
            if any(metric in metrics for metric in detector.metrics):
                self.watches[i].reset()
                self.codes[i] = UNKNOWN
        self._read = [self.codes[i] for i in self._order]
        self._hot = list(range(len(self.policy.rules)))

    def _plan(self) -> None:
        column = self._column = {name: i for i, name in enumerate(self.names)}
        self._clocks: list[tuple[int, Clockwork]] = []
        self._single: list[tuple[Feed, int]] = []  # with the column of its metric
        self._joint: list[tuple[Feed, Sampler]] = []  # read several inputs
        self._speed: list[tuple[Feed, int]] = []  # of means, with the column of their metric
        single, joint, speed = list[int](), list[int](), list[int]()
        homes = [self._find_home(detector) for _, detector in self.detectors]
        for i, stream in enumerate(self._home):
            if stream not in ("", homes[i]):  # another order of steps begins
                self.watches[i].reset()
                self.codes[i] = UNKNOWN
        self._home = homes
        for i, ((_, detector), watch) in enumerate(zip(self.detectors, self.watches, strict=True)):
            columns = [column.get(metric, -1) for metric in detector.metrics]
            has_column = max(columns, default=-1) >= 0
            if isinstance(watch, Clockwork):
                self._clocks.append((i, watch))
            elif self._home[i]:
                continue
            elif detector.reads == "metric":
                if has_column and _reads_speed(detector):
                    self._speed.append((watch.feed, columns[0]))
                    speed.append(i)
                elif has_column:
                    self._single.append((watch.feed, columns[0]))
                    single.append(i)
            elif has_column or detector.detectors:
                inputs = [self.watches[self.index[name]] for name in detector.detectors]
                sample = _sampler(detector.reads, columns, inputs)
                self._joint.append((watch.feed, sample))
                joint.append(i)
        self._order = single + speed + joint  # which detectors those are
        self.means.restart_columns(column for _, column in self._speed)
        self._read = [self.codes[i] for i in self._order]
        names = set(self.names).union(*(late.latest for late in self.late.values()))
        self._able = [can_fire(self.policy, r, names.__contains__) for r in self.policy.rules]
        self.of_job = frozenset(r for r in job_rule_indices(self.policy) if self._able[r])
        self._levels: list[tuple[Watch, frozenset[str]]] = []  # with the rules that read them
        for (name, _), watch in zip(self.detectors, self.watches, strict=True):
            if type(watch).hold_level is not Watch.hold_level:
                readers = (r.id for r in self.policy.rules if name in self.policy.detectors_of(r))
                self._levels.append((watch, frozenset(readers)))
        of_speed = {name for name, detector in self.detectors if _reads_speed(detector)}
        self._speed_rules = {  # whose `for` and `keep` are samples of means, too
            r
            for r, rule in enumerate(self.policy.rules)
            if rule.unit == "rows" and of_speed.issuperset(rule.uses)
        }
        # Rules that must be judged even when no code changed.
        self._hot = list(range(len(self.policy.rules)))
        self._readers: list[list[int]] = [[] for _ in self.detectors]  # rules, by detector
        self._late_rules: dict[int, str] = {}  # those that read one stream only
        for r, rule in enumerate(self.policy.rules):
            for name in rule.uses:
                self._readers[self.index[name]].append(r)
            streams = {self._home[self.index[name]] for name in rule.uses}
            if len(streams) == 1 and (stream := streams.pop()):
                self._late_rules[r] = stream

    def _find_home(self, detector: Detector) -> str:
        """Return the stream of a detector's metrics, "" for the run's own frames."""
        homes = {self._find_home(self.policy.detectors[name]) for name in detector.detectors}
        for metric in detector.metrics:
            if metric in self.names:
                homes.add("")
            else:
                homes |= {stream for stream, late in self.late.items() if metric in late.latest}
        return "+".join(sorted(homes)) if homes != {""} else ""

    def has_needed_metrics(self, rule: int) -> bool:
        """Return whether the job has the metrics without which the rule can never fire."""
        silent = self.probe_off or self.exited or rule in self.elsewhere
        return self._able[rule] and (not silent or rule in self._late_rules)

    def missing(self, rule: int) -> Sequence[str]:
        """Return the metrics behind a rule that were never announced."""
        return missing_metrics(self.policy, self.policy.rules[rule], set(self.names).__contains__)

    # ── feeding ───────────────────────────────────────────────────────────────────────────────────

    def feed(self, frame: Frame, frame_count: int) -> list[tuple[int, bool]]:
        """Take a frame; return `(rule index, fired)` for every rule that fired or cleared."""
        if frame.attempt != self.attempt:
            self._rewind(frame)
        step, values = frame.step, frame.values
        missing = len(self.names) - len(values)
        if missing > 0:
            values += (None,) * missing
        row = (*values, None)  # the last of them is what a metric without a column has
        read = [feed(row[column], step) for feed, column in self._single]
        if self._speed:
            means = self.means.add(frame.at_ns, step, row)
            if self.means.due:
                read += [feed(means[column], step) for feed, column in self._speed]
            else:
                read += self._read[len(read) : len(read) + len(self._speed)]
        read += [feed(sample(row), step) for feed, sample in self._joint]
        changed: list[int] = []
        if read != self._read:
            for place, (i, before) in enumerate(zip(self._order, self._read, strict=True)):
                if read[place] != before:
                    read[place] = self.codes[i] = self._take_note(i, read[place])
                    changed.append(i)
            self._read = read
        for _, clock in self._clocks:
            clock.beat(frame.at_ns, step)
        self.step_before = self.step if self.step >= 0 else step - 1
        self.step, self.latest, self.frames = step, values, self.frames + 1
        self.history.add(frame)
        if changed or self._hot:
            return self._judge(changed, frame_count, frame.at_ns)
        return []

    def feed_late(self, frame: LateFrame, frame_count: int) -> list[tuple[int, bool]]:
        """Take metrics of an earlier step; return rules that fired or cleared.

        What was measured of weights that were taken back since then says nothing any more.
        """
        if frame.stream != "build" and any(
            frame.attempt < attempt and frame.step > step for attempt, step in self.undone
        ):
            return []
        late = self.late.setdefault(frame.stream, LateStream())
        is_new = not frame.values.keys() <= late.latest.keys()
        late.latest |= frame.values
        if is_new:
            self._plan()
        fed = self._feed_stream(late, frame)
        moved: list[tuple[int, bool]] = []
        for r, rule in enumerate(self.policy.rules):
            if fed.isdisjoint(rule.uses):
                continue
            if r not in self._late_rules:  # its steps are those of the run
                self._hot = sorted({*self._hot, r})
                continue
            watch, (_, newest) = self.rules[r], late.judged.get(rule.id, (-1, -1))
            if is_next := frame.step > newest:
                late.judged[rule.id] = (newest if newest >= 0 else frame.step - 1, frame.step)
            watch.code = rule.when(self.codes)
            span = late.judged[rule.id]
            change = self._weigh(rule, watch, frame_count, frame.at_ns, is_next, span)
            if change is not None:
                moved.append((r, change))
        return moved

    def _feed_stream(self, late: LateStream, frame: LateFrame) -> set[str]:
        """Feed the detectors whose metrics a late frame has; return their names."""
        names, fed = [*late.latest], set[str]()
        row = (*map(frame.values.get, names), None)
        for i, (name, detector) in enumerate(self.detectors):
            is_read = not frame.values.keys().isdisjoint(detector.metrics)
            is_read = is_read or not fed.isdisjoint(detector.detectors)
            if not is_read or self._home[i] != frame.stream or frame.step <= late.fed.get(name, -1):
                continue
            late.fed[name] = frame.step
            fed.add(name)
            columns = [names.index(m) if m in late.latest else -1 for m in detector.metrics]
            inputs = [self.watches[self.index[other]] for other in detector.detectors]
            sample = row[columns[0]] if detector.reads == "metric" else None
            if sample is None:
                sample = _sampler(detector.reads, columns, inputs)(row)
            self.codes[i] = self._take_note(i, self.watches[i].feed(sample, frame.step))
        return fed

    def hold_levels(self, rules: Sequence[str]) -> None:
        """Hold the levels of the detectors of these rules, and of no others."""
        for watch, readers in self._levels:
            watch.hold_level(held=not readers.isdisjoint(rules))

    def late_stream_step(self, rule: Rule) -> int | None:
        """Return the step that was measured, of a rule that reads one late stream; else None."""
        for r, stream in self._late_rules.items():
            if self.policy.rules[r].id == rule.id and rule.id in self.late[stream].judged:
                return self.late[stream].judged[rule.id][1]
        return None

    def step_of(self, rule: Rule) -> int:
        """Return the step that a rule was judged at last."""
        late_step = self.late_stream_step(rule)
        return self.step if late_step is None else late_step

    def first_breach(self, rule: Rule) -> int:
        """Return the step at which what a rule tells of began, however long it took to fire."""
        forward = self.broken_forward(rule)
        if forward is not None and forward.step is not None:
            return forward.step
        return self._breach_known(rule)

    def broken_forward(self, rule: Rule) -> BrokenForward | None:
        """Return what broke running statistics, None for a rule that is not about them."""
        behind = [self.policy.detectors[name] for name in self.policy.detectors_of(rule)]
        if not any(STATISTICS in detector.subjects for detector in behind):
            return None
        return find_broken_forward(self.history.newest_rows(FORWARD), self._breach_known(rule))

    def _breach_known(self, rule: Rule) -> int:
        """Return the first step at which any detector behind a rule may have been in breach."""
        step = first_breach(self.numbers(rule), self.step_of(rule))
        watches = zip(self.policy.rules, self.rules, strict=True)
        watch = next(watch for other, watch in watches if other.id == rule.id)
        return min(step, watch.since) if watch.held and watch.since >= 0 else step

    def tick(self, at_ns: int, beat: Beat | None, frame_count: int) -> list[tuple[int, bool]]:
        """Let the clockworks see the time; return rules that fired or cleared.

        Silence means something only while the probe is known to be there: without a `beat`, or once
        it was switched off (`deaf`), nothing is known.
        """
        changed: list[int] = []
        if self.exited:  # its silence is known, and means nothing
            return []
        for i, clock in self._clocks:
            code = UNKNOWN
            if beat is not None and not self.probe_off:
                code = clock.tick(at_ns, beat.seen_ns, beat.phase)
            if code != self.codes[i]:
                self.codes[i] = self._take_note(i, code)
                changed.append(i)
        return self._judge(changed, frame_count, at_ns, new_step=False) if changed else []

    def mark_exited(self) -> None:
        """The process ended to be started again: what it said last is not so any more."""
        self.exited = True
        for watch in self.rules:
            watch.code, watch.unknown_since = UNKNOWN, None

    def reset_deadlines(self, at_ns: int) -> None:
        """The run was stopped from outside and goes on: deadlines begin anew."""
        for _, clock in self._clocks:
            clock.beat(at_ns, self.step)

    def _take_note(self, i: int, code: int) -> int:
        """Return the code without the note flag; keep the note."""
        if code & HAS_NOTE:
            self.notes.append((self.detectors[i][0], self.watches[i].note()))
        return code & 3

    def _rewind(self, frame: Frame) -> None:
        """A rollback went back to before `frame.step`: what was seen before it stays valid.

        Where the loop went on, what was seen of the weights that are gone is dropped all the same.
        """
        self.attempt = frame.attempt
        attempt, step = self.weights_of
        last_step = min(step, frame.step - 1) if attempt == frame.attempt else frame.step - 1
        for i, watch in enumerate(self.watches):
            if self._home[i] != "build":  # of the data: they are what they were
                watch.rewind(last_step)
        self.undone.append((frame.attempt, last_step))
        for stream, late in self.late.items():
            if stream != "build":
                late.rewind(last_step)
        for rule in self.rules:
            rule.since = -1
            rule.keep_step -= max(0, self.step + 1 - frame.step)
        self.step = min(self.step, frame.step - 1)
        self.means.rewind(last_step)
        self.history.rewind(last_step + 1)

    # ── rules ─────────────────────────────────────────────────────────────────────────────────────

    def _judge(
        self, changed: list[int], frame_count: int, at_ns: int, *, new_step: bool = True
    ) -> list[tuple[int, bool]]:
        """Judge the rules that read a detector whose code changed, and those that go on counting.

        The others come to what they came to before.
        """
        moved: list[tuple[int, bool]] = []
        rules = self.policy.rules
        hot: list[int] = []
        due = self._hot
        if changed:
            due = sorted({*due, *(r for i in changed for r in self._readers[i])})
        if self.elsewhere or self._late_rules:
            due = [r for r in due if r not in self.elsewhere and r not in self._late_rules]
        for r in due:
            rule, watch = rules[r], self.rules[r]
            watch.code = rule.when(self.codes)
            if watch.code == OK and not watch.firing:
                watch.held, watch.unknown_since, watch.blind = 0, None, False
                continue
            span = self.step_before, self.step
            is_sample = new_step and (self.means.due or r not in self._speed_rules)
            kept_until = watch.keep_until, watch.keep_step
            change = self._weigh(rule, watch, frame_count, at_ns, is_sample, span)
            if r in self._speed_rules and kept_until != (watch.keep_until, watch.keep_step):
                watch.keep_ns = at_ns + rule.keep_steps * SAMPLE_NS
            if watch.code != UNKNOWN or rule.unknown == "breach":
                hot.append(r)
            elif watch.firing and rule.unknown != "hold":
                hot.append(r)  # until it clears
            if change is not None:
                moved.append((r, change))
        self._hot = hot
        return moved

    def _weigh(
        self,
        rule: Rule,
        watch: RuleWatch,
        frame_count: int,
        at_ns: int,
        new_step: bool,
        span: tuple[int, int],
    ) -> bool | None:
        """Count a reading of a rule; return whether it fires or clears by it.

        span: the step before, and the one that was judged.
        """
        code, since, (step_before, step) = watch.code, watch.unknown_since, span
        if code == UNKNOWN:
            if since is None:
                watch.unknown_since = (frame_count, at_ns, step_before)
            if rule.unknown == "hold":
                return None
            code = BREACH if rule.unknown == "breach" else OK
        else:
            watch.unknown_since, watch.blind = None, False
        if code == BREACH:
            if watch.held == 0:
                watch.since = first_breach(self.numbers(rule), step)
            if new_step or watch.held == 0:
                known = step_before if since is None else since[2]  # the known frame before this
                stands_for = max(1, min(step - known, rule.for_steps))
                watch.held += 1 if rule.unit == "rows" else stands_for
            fires = not watch.firing and watch.held >= rule.for_steps
            sampled_again = watch.firing and since is not None and rule.unknown == "ignore"
            if fires or sampled_again:
                by_rows = rule.unit == "rows"
                watch.keep_until = frame_count + rule.keep_steps * by_rows
                watch.keep_step = -1 if by_rows else step + rule.keep_steps
            if fires:
                watch.firing, watch.answered, watch.fired_ns = True, False, at_ns
            return fires or None
        watch.held = 0
        is_kept = frame_count < watch.keep_until or step < watch.keep_step or at_ns < watch.keep_ns
        if watch.firing and not is_kept:
            watch.firing = False
            return False
        return None

    def newly_blind(self, frame_count: int, at_ns: int) -> list[int]:
        """Return rules that lack a metric which was there before, for too long, once each.

        A detector that is still warming up, or undecided on good values, is not blind.
        """
        blind_rules: list[int] = []
        for r, (rule, watch) in enumerate(zip(self.policy.rules, self.rules, strict=True)):
            if watch.unknown_since is None or watch.blind or rule.unknown in ("ok", "ignore"):
                continue
            since_frame, since_ns, _ = watch.unknown_since
            many = self.policy.blind_after_steps
            if frame_count - since_frame <= many:
                many = FEW if at_ns - since_ns > self.policy.blind_after_s * 1e9 else 0
            if (
                many
                and frame_count > since_frame
                and self.has_needed_metrics(r)
                and self._lacking(r, many)
            ):
                watch.blind = True
                blind_rules.append(r)
        return blind_rules

    def lacks_metrics(self, rule: int) -> bool:
        """Return whether a rule cannot be judged because the newest frames lack what it reads.

        One that still collects samples, as after a new start, or that is sampled, is not that.
        """
        return self.has_needed_metrics(rule) and self._lacking(rule, 1)

    def _lacking(self, rule: int, frames: int) -> bool:
        """Return whether the rule cannot fire by what is in the newest `frames`.

        Only what once came with every frame can go missing: the rest is sampled, or comes rarely.
        A costly metric may come less often: see `Policy.sparsest`.
        """

        def is_there(metric: str) -> bool:
            newest = max(frames, self.policy.sparsest.get(metric, 0))
            return not self._is_dense(metric) or self.history.has_recent_value(metric, newest)

        return not can_fire(self.policy, self.policy.rules[rule], is_there)

    def _is_dense(self, metric: str) -> bool:
        """Return whether a metric ever was finite in two frames running: then it comes in all."""
        if metric not in self.dense and self.history.has_consecutive_values(metric):
            self.dense.add(metric)
        return metric in self.dense

    def release(self) -> None:
        """Forget which rules fire, so that one that is still in breach fires, and acts, again."""
        for watch in self.rules:
            watch.firing, watch.held, watch.since = False, 0, -1
        self._hot = list(range(len(self.rules)))

    # ── what people and runbooks ask ──────────────────────────────────────────────────────────────

    def numbers(self, rule: Rule) -> dict[str, Reading]:
        """Return the numbers behind a rule, detector by detector, inputs of couplings included."""
        readings: dict[str, Reading] = {}
        for name in self.policy.detectors_of(rule):
            i, detector = self.index[name], self.policy.detectors[name]
            reading = {"code": CODE_NAMES[self.codes[i]], **self.watches[i].numbers()}
            if len(detector.metrics) == 1:
                reading["metric"] = detector.metrics[0]
                if _reads_speed(detector):
                    reading |= self._steps_of_breach(reading)
                rank_text = formats.rank_text(detector.metrics[0], self.value)
                if rank_text:
                    reading["where"] = rank_text
            readings[name] = reading
        return readings

    def _steps_of_breach(self, reading: Reading) -> Reading:
        """Return how many steps, not samples of means, ago the first of them breached."""
        window = formats.reading_integer(reading, "of", 1)
        samples, ends = formats.reading_integer(reading, "oldest", window), self.means.steps
        if not 0 < samples < len(ends) or reading["code"] != CODE_NAMES[BREACH]:
            return {}
        steps = self.step - ends[-samples - 1]
        return {} if steps == samples else {"oldest": steps}

    @property
    def is_objective(self) -> bool:
        """Whether the loss may be one that descends: not seen to be none, by any detector."""
        return not any(
            detector.measures_descent and LOSS in detector.metrics and code == OK
            for (_, detector), code in zip(self.detectors, self.codes, strict=True)
        )

    @property
    def has_descended(self) -> bool:
        """Whether the loss may have fallen in this run: not known never to have."""
        return not any(
            detector.measures_descent and detector.metrics == (LOSS,) and code == OK
            for (_, detector), code in zip(self.detectors, self.codes, strict=True)
        )

    @property
    def metric_behind_loss_growth(self) -> str:
        """The amount with which the loss has just grown, "" where it is none of a sum."""
        pairs = zip(self.detectors, self.codes, strict=True)
        amounts = (
            detector.metrics[1]
            for (_, detector), code in pairs
            if detector.measures_mean and detector.metrics[0] == LOSS and code == OK
        )
        return next(amounts, "")

    def members(self, family: str) -> dict[int, float]:
        """Return the newest value that each numbered member of a family of metrics ever had."""
        newest = {name: value for late in self.late.values() for name, value in late.latest.items()}
        names = [name for name in (*newest, *self.names) if name.startswith(f"{family}.")]
        for name in set(names).intersection(self.names):
            if series := self.history.series(name):
                newest[name] = series[-1][1]
        numbers = {name: name[len(family) + 1 :] for name in names if name in newest}
        return {int(text): newest[name] for name, text in numbers.items() if text.isdecimal()}

    def value(self, metric: str) -> float | None:
        """Return the newest value of a metric, None when absent."""
        if metric in self._column:
            column = self._column[metric]
            return self.latest[column] if column < len(self.latest) else None
        values = (late.latest.get(metric) for late in self.late.values())
        return next((value for value in values if value is not None), None)


def first_breach(numbers: Mapping[str, Reading], step: int) -> int:
    """Return the earliest step at which any detector behind a rule may have been in breach.

    A coupling tells the first step of its match; one that needs m of n samples in breach how many
    samples ago it met the first of them.
    """
    steps = [step]
    for reading in numbers.values():
        if reading.get("code") != "BREACH":
            continue
        window = formats.reading_integer(reading, "of", 1)
        steps.append(step - max(0, formats.reading_integer(reading, "oldest", window) - 1))
        first_step = formats.reading_table(reading, "match").get("first_step", step)
        steps.append(first_step if isinstance(first_step, int) else step)
    return min(steps)


def _reads_speed(detector: Detector) -> bool:
    """Return whether a detector is of a speed alone, and so of means."""
    return detector.reads == "metric" and detector.metrics[0] in THROUGHPUT


def _start(detectors: Sequence[Detector]) -> list[Watch]:
    """Return fresh watches; those that learn the same of one metric learn it once."""
    watches, shared = [detector.start() for detector in detectors], dict[object, Any]()
    for detector, watch in zip(detectors, watches, strict=True):
        if watch.series is not None:
            key = detector.metrics, watch.series.key
            watch.series = shared.setdefault(key, watch.series)
    return watches


def _sampler(reads: str, columns: Sequence[int], inputs: Sequence[Watch]) -> Sampler:
    """Return the function that takes a sample from the values of a frame, None behind them."""
    if reads == "metrics":
        if len(columns) > 1:
            return itemgetter(*columns)
        return itemgetter(slice(columns[0], columns[0] + 1 or None))  # a tuple of one
    if reads == "detectors":
        return partial(_raw_codes, inputs)
    return partial(_with_raw_code, columns[0], inputs[0])


# Partial, as a copy of a closure would read the watches of the original.


def _raw_codes(inputs: Sequence[Watch], _values: Values) -> list[int]:
    return [watch.raw for watch in inputs]


def _with_raw_code(column: int, other_watch: Watch, values: Values) -> tuple[float | None, int]:
    return values[column], other_watch.raw


def job_rule_indices(policy: Policy) -> frozenset[int]:
    """Return the places of the rules that read what is one number for all ranks."""
    names = {
        name for name, detector in policy.detectors.items() if not JOB.isdisjoint(detector.metrics)
    }
    rules = enumerate(policy.rules)
    return frozenset(r for r, rule in rules if not names.isdisjoint(policy.detectors_of(rule)))


MOST = 8  # readable detectors of one rule whose combinations are tried


def can_fire(
    policy: Policy, rule: Rule, has: Callable[[str], bool], without: Container[str] = ()
) -> bool:
    """Return whether any readings of the detectors that have their metrics make the rule TRUE.

    without: detectors that are UNKNOWN all the same.

    A detector without its metrics is UNKNOWN for ever. `a or b` can do without one of the two,
    `a and b` cannot.
    """
    order = list(policy.detectors)
    readable = [name for name in rule.uses if is_readable(policy, name, has, without)]
    if len(readable) > MOST:
        return len(readable) == len(rule.uses)
    places = [order.index(name) for name in readable]
    codes = [UNKNOWN] * len(order)
    for answers in product((BREACH, OK), repeat=len(places)):
        for index, code in zip(places, answers, strict=True):
            codes[index] = code
        if rule.when(codes) == BREACH:
            return True
    return False


def is_readable(
    policy: Policy, name: str, has: Callable[[str], bool], without: Container[str] = ()
) -> bool:
    """Return whether a detector, and what it is coupled with, has the metrics it reads."""
    if name in without:
        return False
    detector = policy.detectors[name]
    inputs = [is_readable(policy, inner, has, without) for inner in detector.detectors]
    own_inputs = [has(metric) for metric in detector.metrics]
    enough = all if detector.needs_all else any
    return (not own_inputs or enough(own_inputs)) and (not inputs or enough(inputs))


def missing_metrics(policy: Policy, rule: Rule, has: Callable[[str], bool]) -> Sequence[str]:
    """Return the metrics behind a rule that are not there, in order, each once."""
    metrics = [m for name in policy.detectors_of(rule) for m in policy.detectors[name].metrics]
    return list(dict.fromkeys(metric for metric in metrics if not has(metric)))
