"""Scenarios: series of metrics, injected faults, and the expected decisions.

`lab` runs them. Positions count frames from 0 and never go back; until the first rollback
or jump they are the job's steps.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..core.model.decisions import SEVERITIES
from ..core.model.policy import StateName
from ..core.model.state_machine import STATES
from ..core.model.values import Count, Seconds, Section, Steps, describe_key, pattern_mark
from .diagnostics import Problems, did_you_mean
from .yaml_document import ListNode, MapNode, Node, first_text

NUMBER = r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
# value, what each step adds (+ or -) or multiplies by (*), for how many steps
PIECE = re.compile(
    rf"(?:(_|nan|[+-]?inf)|({NUMBER})(?:([+*-])((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?))?)"
    r"(?:x([0-9]{1,6}))?"
)
_PLAIN_PIECE = PIECE.pattern.replace("(?:", "(").replace("(", "(?:")  # nothing captured
_SERIES = rf"\s*{_PLAIN_PIECE}(?:\s+{_PLAIN_PIECE})*\s*"


Series = Annotated[
    str, pattern_mark(_SERIES, "a series such as '2.4x300 5.0-0.1x20'", token=_PLAIN_PIECE)
]


def count_samples(text: str) -> int:
    """Return how many samples a series holds."""
    return sum(int(piece[5] or 1) for piece in PIECE.finditer(text))


MAX_SAMPLES = 200_000  # of one series

Position = Steps
Some = Count
Identifier = Annotated[str, pattern_mark("[A-Za-z_][A-Za-z0-9_.-]{0,127}", "a name")]
DECIDED = Literal[
    "rule",
    "incident",
    "state",
    "suppressed",
    "near_miss",
    "intent",
    "commit",
    "abort",
    "in_doubt",
    "verify",
    "notify_intent",
    "rebaseline",
    "gap",
    "blind",
    "note",
]
COMMANDS = Literal["release", "pause", "resume", "savepoint", "skip", "lr", "rollback", "stop"]
WINDOWS = ("at", "by", "between", "end")
SUBJECTS = ("rule", "state", "actions", "severity", "budget", "message", "suppressed", "never")


class Expectation(Section, frozen=True, kw_only=True):
    """A decision that a scenario must, or must never, lead to."""

    at: Annotated[Position | None, describe_key("at this frame")] = None
    by: Annotated[Position | None, describe_key("at this frame or before it")] = None
    between: Annotated[
        tuple[Position, Position] | None, describe_key("from one frame to another")
    ] = None
    end: Annotated[bool | None, describe_key("true: after the last frame")] = None
    rule: Annotated[
        Identifier | None, describe_key("a rule; inside its pack by its short name")
    ] = None
    is_: Annotated[
        Literal["firing", "cleared", "on", "quiet", "muted"] | None,
        describe_key(
            "firing: begins to; cleared; on, quiet: all along; muted: inhibited, off in a "
            "phase, or of data that came back"
        ),
    ] = msgspec.field(name="is", default=None)
    state: Annotated[StateName | None, describe_key("state of the run")] = None
    actions: Annotated[
        tuple[Identifier, ...] | None,
        describe_key("verbs that start, in this order; [] is none at all"),
    ] = None
    severity: Annotated[
        Literal["SEV0", "SEV1", "SEV2"] | None,
        describe_key("an incident is opened with it or raised to it"),
    ] = None
    budget: Annotated[
        Mapping[str, Annotated[int, Meta(ge=0)]] | None,
        describe_key("class: actions that were counted"),
    ] = None
    message: Annotated[str | None, describe_key("text in a message to people")] = None
    suppressed: Annotated[
        str | None,
        describe_key("what suppressed an action: budget:NAME, inhibit:RULE, phase:NAME, cooldown"),
    ] = None
    never: Annotated[
        tuple[Identifier, ...] | None,
        describe_key("rules, verbs, severities or states that must not occur"),
    ] = None
    count: Annotated[Annotated[int, Meta(ge=0)] | None, describe_key("exactly this many times")] = (
        None
    )

    def subject(self) -> str:
        """Return the key of what is expected."""
        return next((name for name in SUBJECTS if getattr(self, name) is not None), "")

    def window(self, last_frame: int) -> tuple[int, int]:
        """Return the first and the last frame of it."""
        if self.at is not None:
            return self.at, self.at
        if self.between is not None:
            return self.between
        return (
            (last_frame, last_frame)
            if self.end
            else (0, last_frame if self.by is None else self.by)
        )

    def find_errors(self) -> list[tuple[str, str]]:
        options = [name for name in SUBJECTS if getattr(self, name) is not None]
        times = [name for name in WINDOWS if getattr(self, name) is not None]
        if self.end is False:
            return [("end", "is true or left out")]
        if len(options) != 1:
            return [
                (options[1] if options else "rule", f"give exactly one of {', '.join(SUBJECTS)}")
            ]
        if len(times) > 1 or (not times and self.never is None and self.count is None):
            return [
                (times[1] if times else options[0], f"needs a time: one of {', '.join(WINDOWS)}")
            ]
        wrong = []
        if self.between is not None and self.between[0] > self.between[1]:
            wrong.append(("between", "ends before it begins"))
        if self.is_ is not None and self.rule is None:
            wrong.append(("is_", "belongs to a rule"))
        if self.budget is not None and not (self.end or self.at is not None):
            wrong.append(("budget", "needs a time: at or end"))
        if self.count is not None and options[0] in ("state", "budget", "never"):
            wrong.append(("count", f"means nothing with {options[0]}"))
        if self.count is not None and self.is_ in ("on", "quiet"):
            wrong.append(("count", f"means nothing with is: {self.is_}"))
        return wrong


INJECTIONS = (
    "gap",
    "nan",
    "clock_jump",
    "phase",
    "fail_action",
    "lose_action",
    "crash_after",
    "probe_restart",
    "silent_rank",
    "command",
    "notice",
    "step",
    "checkpoint",
    "exit",
)


class Injection(Section, frozen=True, kw_only=True):
    """A fault of the run or of its supervisor, or a command, before a frame."""

    at: Annotated[Position, describe_key("before this frame")]
    gap: Annotated[Some | None, describe_key("this many frames are lost")] = None
    nan: Annotated[tuple[Identifier, ...] | None, describe_key("these metrics are NaN")] = None
    clock_jump: Annotated[
        Seconds | None, describe_key("the machine was suspended for this time")
    ] = None
    phase: Annotated[Identifier | None, describe_key("the job enters this phase")] = None
    fail_action: Annotated[
        Identifier | None, describe_key("the next action with this verb fails")
    ] = None
    lose_action: Annotated[
        Identifier | None,
        describe_key("the outcome of the next action with this verb never arrives"),
    ] = None
    crash_after: Annotated[
        DECIDED | None,
        describe_key("the supervisor dies after the next such decision and starts again"),
    ] = None
    probe_restart: Annotated[bool | None, describe_key("true: the job's process is replaced")] = (
        None
    )
    silent_rank: Annotated[int | None, describe_key("this rank sends nothing")] = None
    command: Annotated[COMMANDS | None, describe_key("a command of an operator")] = None
    args: Annotated[
        Mapping[str, Any] | None, describe_key("arguments of the command: {value: 0.5}")
    ] = None
    notice: Annotated[Identifier | None, describe_key("a notice of this kind")] = None
    step: Annotated[Steps | None, describe_key("the job's step number jumps to this")] = None
    checkpoint: Annotated[Steps | None, describe_key("a good checkpoint of this step is found")] = (
        None
    )
    exit: Annotated[int | None, describe_key("the job ends with this code")] = None
    for_: Annotated[
        Some | None,
        describe_key("frames that it lasts; default: 1, and for a rank or a phase the rest"),
    ] = msgspec.field(name="for", default=None)
    count: Annotated[Some, describe_key("how many actions fail")] = 1

    def find_errors(self) -> list[tuple[str, str]]:
        options = [name for name in INJECTIONS if getattr(self, name) is not None]
        if self.probe_restart is False:
            return [("probe_restart", "is true or left out")]
        if len(options) != 1:
            return [
                (options[1] if options else "at", f"give exactly one of {', '.join(INJECTIONS)}")
            ]
        if self.for_ is not None and options[0] not in ("nan", "phase", "silent_rank"):
            return [("for_", f"means nothing with {options[0]}")]
        if self.args is not None and self.command is None:
            return [("args", "belongs to a command")]
        if self.count != 1 and options[0] not in ("fail_action", "lose_action"):
            return [("count", f"means nothing with {options[0]}")]
        return []


class Scenario(Section, frozen=True):
    """A series and the expected decisions; run by `supervise policy test`."""

    name: Annotated[str, describe_key("what it shows")]
    series: Annotated[Mapping[str, Series], describe_key("metric: 'value+slope x count ...'")]
    expect: Annotated[
        tuple[Expectation, ...], describe_key("decisions that must, and must not, happen")
    ]
    seed: Annotated[int, describe_key("of the noise")] = 0
    noise: Annotated[Mapping[str, float], describe_key("standard deviation per metric")] = (
        msgspec.field(default_factory=dict)
    )
    sampled: Annotated[
        Mapping[str, Some],
        describe_key("metric: frames between two samples, as the probe takes them"),
    ] = msgspec.field(default_factory=dict)
    inject: Annotated[tuple[Injection, ...], describe_key("gaps, faults")] = ()
    after_rollback: Annotated[
        Mapping[str, Series] | tuple[Mapping[str, Series], ...],
        describe_key(
            "series from the first frame after a rollback; a list: after the first, the second"
        ),
    ] = ()
    ranks: Annotated[
        Some, describe_key("ranks of the job; all have the series, each with its own noise")
    ] = 1
    every: Annotated[Seconds, describe_key("time between two frames")] = 0.1
    delay: Annotated[Seconds, describe_key("time that an action takes")] = 0.0

    def find_errors(self) -> list[tuple[str, str]]:
        if not self.series:
            return [("series", "is empty")]
        if not 0.001 <= self.every <= 3600.0:
            return [("every", "must be between 1ms and 1h")]
        return []

    @property
    def sequels(self) -> tuple[Mapping[str, str], ...]:
        """The series after the first rollback, the second, ...; the last one is used again."""
        series = self.after_rollback
        return series if isinstance(series, tuple) else (series,)


@dataclass(frozen=True, slots=True)
class Names:
    """Names that a scenario may use."""

    rules: Collection[str]
    verbs: Collection[str]
    budgets: Collection[str]
    metrics: Collection[str] | None  # that some detector reads; None: not known
    clock: bool = False  # some detector counts frames, whatever they hold
    scope: str = ""  # the pack whose short names it uses

    def rule(self, name: str) -> str | None:
        """Return the full name of a rule, None when there is none."""
        return next((n for n in (f"{self.scope}.{name}", name) if n in self.rules), None)

    def short(self) -> list[str]:
        """Return the rules' names as the file may write them."""
        return [name.removeprefix(f"{self.scope}.") for name in self.rules]


def check_scenario(form: Scenario, node: Node, problems: Problems) -> None:
    """Note what is wrong with a scenario beyond its schema, whatever the policy."""
    assert isinstance(node, MapNode)
    for key, series_node, series in iterate_series(form, node):
        _lengths(series, series_node, f"{form.name!r}: {key}", problems)
    for key, names in (("noise", form.noise), ("sampled", form.sampled)):
        for name in names:
            if name not in form.series:
                series_node = key_of(node.locate(key), name)
                problems.add(
                    series_node,
                    f"{key} for {name!r}, which has no series",
                    did_you_mean(name, form.series),
                )
    for i, inject in enumerate(form.inject):
        series_node = _item(node, "inject", i)
        for name in inject.nan or ():
            if name not in form.series:
                hint = did_you_mean(name, form.series)
                problems.add(first_text(series_node, name), f"there is no series {name!r}", hint)
        if inject.silent_rank is not None and not 0 <= inject.silent_rank < form.ranks:
            problems.add(series_node, f"there is no rank {inject.silent_rank}; ranks: {form.ranks}")


def check_names(form: Scenario, node: Node, names: Names, problems: Problems) -> None:
    """Note names that the policy of a scenario does not have."""
    assert isinstance(node, MapNode)
    for i, expect in enumerate(form.expect):
        item = _item(node, "expect", i)
        for name, valid_names, kind in _unknown_names(expect, names):
            location = first_text(item, name)
            if location is item and isinstance(item, MapNode):  # it is a key
                location = key_of(item.locate("budget"), name)
            problems.add(location, f"no {kind} {name!r}", did_you_mean(name, valid_names))
    for i, inject in enumerate(form.inject):
        item = _item(node, "inject", i)
        verb = inject.fail_action or inject.lose_action
        if verb is not None and verb not in names.verbs:
            hint = did_you_mean(verb, names.verbs)
            problems.add(first_text(item, verb), f"there is no verb {verb!r}", hint)


def iterate_series(form: Scenario, node: MapNode) -> Iterator[tuple[str, Node, Mapping[str, str]]]:
    """Yield `(key, its node, series)` for the first series and for all that come later."""
    for key, several in (("series", (form.series,)), ("after_rollback", form.sequels)):
        section = node.locate(key)
        for i, series in enumerate(several):
            yield key, section.items[i] if isinstance(section, ListNode) else section, series


def _lengths(series: Mapping[str, str], node: Node, label: str, problems: Problems) -> None:
    lengths = {name: count_samples(text) for name, text in series.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        problems.add(node, f"{label} has series of different lengths: {listed}")
    if max(lengths.values(), default=0) > MAX_SAMPLES:
        problems.add(node, f"{label} is longer than {MAX_SAMPLES} steps")


def _unknown_names(form: Expectation, names: Names) -> Iterator[tuple[str, Collection[str], str]]:
    """Yield `(name, known names, what it should be)` for every unknown name."""
    if form.rule is not None and names.rule(form.rule) is None:
        yield form.rule, names.short(), "rule"
    for verb in form.actions or ():
        if verb not in names.verbs:
            yield verb, names.verbs, "verb"
    for name in form.budget or ():
        if name not in names.budgets:
            yield name, names.budgets, "budget"
    keywords = (*names.verbs, *SEVERITIES, *STATES)
    for name in form.never or ():
        if name not in keywords and names.rule(name) is None:
            yield name, [*names.short(), *keywords], "rule, verb, severity or state"


def _item(node: MapNode, key: str, i: int) -> Node:
    section = node.locate(key)
    return section.items[i] if isinstance(section, ListNode) else section


def key_of(node: Node, name: str) -> Node:
    """Return the node of a key, or the whole node where it has none."""
    return node.pairs[name][0] if isinstance(node, MapNode) and name in node.pairs else node
