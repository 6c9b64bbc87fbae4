"""A small policy by hand and a way to run a story through the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from supervise import actions
from supervise.actions import Snapshot
from supervise.catalog import action_classes, yaml_name_of
from supervise.core import fold_events, initial_state
from supervise.core import step as step_engine
from supervise.core.model import (
    Action,
    Announced,
    Beat,
    Budget,
    Decision,
    Detector,
    Event,
    Exited,
    Finished,
    Frame,
    Inhibit,
    JobSettings,
    Ladder,
    Launched,
    Notice,
    OperatorCommand,
    Payload,
    Policy,
    Refused,
    Rule,
    Runbook,
    Tick,
    decision_record,
)
from supervise.detectors import Threshold

SECOND = 1_000_000_000
NAMES = ("train_loss_raw", "grad_global_norm")
NAN = float("nan")
AMPLE = {name: Budget(9) for name in ("all", "touch", "restart", "rollback", "lr_scale")}


def above(metric: str, gt: float) -> Threshold:
    return Threshold(metric, gt=gt)


@dataclass(frozen=True)
class Touch(Action):
    """An action that changes the job; the test answers for it."""

    changes_training = True
    budget = "touch"
    destructive = True


@dataclass(frozen=True)
class Untouch(Action):
    """Takes a Reach back."""


@dataclass(frozen=True)
class Reach(Action):
    """An action that can be taken back."""

    def undo(self) -> Action | None:
        return Untouch()


@dataclass(frozen=True)
class Verify(actions.Verify):
    """The real one for short stories."""

    within: int = 30
    clear_for: int = 5


def index_of(name: str, names: Iterable[str]) -> Callable[[Any], int]:
    position = list(names).index(name)
    return lambda codes: codes[position]


def rule_on(
    detectors: Iterable[str],
    name: str,
    severity: str,
    runbook: str | None = None,
    *,
    rule_id: str = "",
    **more: Any,
) -> Rule:
    """Return a rule that fires when the detector `name` does, called like it by default."""
    when = index_of(name, detectors)
    return Rule(rule_id or name, when, name, (name,), severity, runbook, **more)


def rules_of(
    detectors: Mapping[str, Detector], *rules: tuple[Any, ...], **more: Any
) -> dict[str, Any]:
    """Return what makes a policy of rules `(detector, severity, runbook)`, none of them muted."""
    made = tuple(rule_on(detectors, *rule, **more) for rule in rules)
    return {"detectors": detectors, "rules": made, "inhibit": ()}


def runbook_of(name: str, *steps: Action, **more: Any) -> Runbook:
    """Return a runbook of these steps."""
    verbs = tuple(yaml_name_of(step) for step in steps)
    return Runbook(name, steps, verbs, **more)


def one_rule(
    detector: Detector, severity: str, runbook: str | None = None, **more: Any
) -> dict[str, Any]:
    """Return what makes a policy of one rule, `only`, that fires when the detector does."""
    return rules_of({"only": detector}, ("only", severity, runbook), **more)


def replay_decisions(
    policy: Policy, events: Iterable[tuple[int, Event]], state: Any = None, policies: Any = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield `(event number, decision record)` for every decision that the events lead to."""
    for number, _, _, _, decisions_made in fold_events(policy, events, state, policies):
        yield from ((number, decision_record(decision)) for decision in decisions_made)


@dataclass
class Story:
    """Feeds events, remembers decisions, and answers actions at once unless told otherwise.

    `answer` returns the result of an action, with an error where it failed, None for no outcome.
    """

    policy: Policy
    names: tuple[str, ...] = NAMES
    answer: Callable[[str], Any] | None = None
    at_ns: int = 0
    step: int = -1
    attempt: int = 0
    log: list[Decision] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = initial_state(self.policy)
        self.launch(1, 0)
        self.announce(0, 1, 1)

    def send(self, event: Event) -> list[Decision]:
        self.events.append(event)
        self.state, made = step_engine(self.policy, self.state, event)
        self.log += made
        for decision in made:
            if decision.kind == "intent":
                self._perform(decision.data["action"])
        return made

    def _perform(self, action: dict[str, Any]) -> None:
        done = {"ack_step": self.step}
        outcome = self.answer(action["id"]) if self.answer is not None else done
        if outcome is not None:
            self.finish(action["id"], *(outcome if isinstance(outcome, tuple) else (outcome,)))

    def finish(
        self, action: str, result: Mapping[str, Any] | None = None, error: str | None = None
    ) -> list[Decision]:
        return self.send(Finished(self.at_ns, action, error is None, result or {}, error))

    def notice(self, kind: str, message: str, *more: Any, **others: Any) -> list[Decision]:
        return self.send(Notice(self.at_ns, kind, message, *more, **others))

    def launch(self, pid: int, attempt: int) -> None:
        self.send(Launched(self.at_ns, pid, attempt))

    def announce(
        self, rank: int, ranks: int, pid: int, names: Sequence[str] = (), *more: int, **others: Any
    ) -> list[Decision]:
        names = tuple(names) or self.names
        return self.send(Announced(self.at_ns, rank, ranks, pid, names, *more, **others))

    def exit(self, code: int) -> None:
        self.send(Exited(self.at_ns, code))

    def frames(self, *losses: float | None, times: int = 1, grad: float | None = 1.0) -> None:
        for _ in range(times):
            for loss in losses:
                self.step += 1
                self.at_ns += SECOND
                self.send(Frame(self.at_ns, 0, self.attempt, self.step, (loss, grad)))

    def rows(self, *rows: dict[str, float]) -> None:
        """Send frames with the metrics named; those of `names` that a row lacks are absent."""
        for row in rows:
            self.step += 1
            self.at_ns += SECOND
            values = tuple(row.get(name) for name in self.names)
            self.send(Frame(self.at_ns, 0, self.attempt, self.step, values))

    def rank(self, rank: int, *losses: float | None) -> None:
        for offset, loss in enumerate(losses):
            step = self.step - len(losses) + 1 + offset
            self.send(Frame(self.at_ns, rank, self.attempt, step, (loss, 1.0)))

    def tick(self, seconds: float = 1.0) -> None:
        self.at_ns += int(seconds * SECOND)
        self.send(Tick(self.at_ns))

    def say(self, word: str, by: str = "anna", **args: Any) -> Decision:
        made = self.send(OperatorCommand(self.at_ns, by, word, {"key": "k1", **args}))
        return next(d for d in made if d.data.get("what") == "operator")

    def beat(self, seconds: int = 1, phase: str = "step", every: int = 1) -> None:
        """The probe is heard as often, and no step comes."""
        for _ in range(seconds):
            self.at_ns += every * SECOND
            self.send(Tick(self.at_ns, (Beat(0, self.at_ns, phase),)))

    def recorded(self) -> list[dict[str, Any]]:
        return [decision_record(decision) for decision in self.log]

    def replayed(self) -> list[dict[str, Any]]:
        return [made for _, made in replay_decisions(self.policy, enumerate(self.events))]

    def kinds(self, kind: str, what: str | None = None) -> list[Decision]:
        return [
            d for d in self.log if d.kind == kind and (what is None or d.data.get("what") == what)
        ]

    def actions(self) -> list[str]:
        return [d.data["action"]["id"] for d in self.kinds("intent")]


def messages(story: Story) -> list[dict[str, Any]]:
    return [d.data["message"] for d in story.kinds("notify_intent")]


def policy(mode: str = "enforce", **changes: Any) -> Policy:
    """Loss above 5 is SEV1 and runs `soften`; gradient above 9 is SEV2; loss above 50 is SEV0."""
    detectors = {
        "high": above("train_loss_raw", 5.0),
        "wild": above("grad_global_norm", 9.0),
        "huge": above("train_loss_raw", 50.0),
    }
    when = {name: index_of(name, detectors) for name in detectors}
    made: dict[str, Any] = {
        "name": "test",
        "digest": "sha256:0",
        "mode": mode,
        "detectors": detectors,
        "rules": (
            Rule("spike", when["high"], "high", ("high",), "SEV1", "soften", cooldown_steps=50),
            Rule("grad", when["wild"], "wild", ("wild",), "SEV2"),
            Rule("gone", when["huge"], "huge", ("huge",), "SEV0", "back"),
        ),
        "runbooks": {
            "soften": runbook_of("soften", Reach(), Verify()),
            "back": runbook_of("back", Touch(), Verify()),
        },
        "budgets": {"touch": Budget(2, per=1000), "all": Budget(5, per=1000)},
        "ladder": Ladder(("soften", "back", "hold"), reset_after_steps=500),
        "probation_steps": 20,
        "warmup_steps": 10,
        "inhibit": (Inhibit(mute=("spike",), by_rule="gone"),),
        "verbs": action_classes(),
    }
    return Policy(**(made | changes))


@pytest.fixture
def tell() -> Callable[..., Story]:
    """Start a story: `tell()`, `tell(mode="shadow")`, `tell(answer=...)`.

    It begins with `healthy` frames, and one with the loss `then`.
    """

    def begin(
        *,
        answer: Any = None,
        names: tuple[str, ...] = NAMES,
        healthy: int = 0,
        then: float | None = None,
        **changes: Any,
    ) -> Story:
        story = Story(policy(**changes), names, answer=answer)
        story.frames(2.0, times=healthy)
        if then is not None:
            story.frames(then)
        return story

    return begin


def save(
    story: Story, name: str, step: int, ok: bool = True, attempt: int | None = None, **more: Any
) -> None:
    attempt = story.attempt if attempt is None else attempt
    data = {"id": name, "step": step, "attempt": attempt, "path": f"/c/{name}", "ok": ok}
    data |= more
    story.notice("checkpoint", f"{name} was verified", data=data)


def good(story: Story) -> list[str]:
    return [found.id for found in story.state.checkpoints.good()]


@dataclass(frozen=True)
class Again(Action):
    """Starts the job again from a checkpoint."""

    destructive = True
    budget = "restart"

    def plan(self, context):
        if not context.good:
            raise Refused("no good checkpoint")
        return Payload({"checkpoint": context.good[-1].id, "attempt": context.attempt + 1})


AGAIN = Runbook("again", (Snapshot(), Again(), Verify()), ("snapshot", "relaunch", "verify"))


def crashing(tell, healthy=50, **changes):
    """A job of 50 steps with a checkpoint, that is started again when it crashes."""
    made = {
        "runbooks": {**tell().policy.runbooks, "again": AGAIN},
        "budgets": {"restart": Budget(2), "touch": Budget(2), "all": Budget(9)},
        "job": JobSettings(on_crash="again"),
        "answer": lambda key: None if "relaunch" in key else {},
    }
    story = tell(**(made | changes), healthy=healthy)
    if healthy:
        save(story, "ckpt-1", 40)
    return story


def taken_back(story, step):
    """The newest action takes the loop back to `step`, where another attempt begins."""
    story.attempt += 1
    story.finish(story.actions()[-1], {"step": step, "attempt": story.attempt})
    story.step = step


def relaunched(story, step, pid=2, ended=False):
    """The job is started again from `step`: its end, its start, its first words."""
    action = story.actions()[-1]
    story.attempt += 1
    if ended:
        story.exit(-2)
    story.launch(pid, story.attempt)
    story.finish(action, {"pid": pid, "attempt": story.attempt, "step": step})
    story.announce(0, 1, pid)
    story.step = step
