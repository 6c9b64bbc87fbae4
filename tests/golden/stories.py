"""Runs with an incident, from scripted metrics and events, as records and as documents.

The live engine judges what each scenario of `stories.yaml` plays against a fake job; its decisions
become records in the form of the audit log, without a disk.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from supervise.catalog import Injection, Scenario
from supervise.core.model import (
    Announced,
    Decision,
    Event,
    Frame,
    Notice,
    Payload,
    Policy,
    decision_record,
)
from supervise.lab import ScenarioRunner
from supervise.report import (
    IncidentReport,
    Record,
    RunOrigin,
    Tapes,
    build_incident_report,
    is_closing,
)
from tests.support.recorded_run import policy_of

HERE = Path(__file__).parent
RUN, WALL = "20260105-101112-7f3a9c", "2026-01-05T10:11:12.345Z"
STORIES: dict[str, dict[str, Any]] = {
    story.get("name", story.get("title")): story
    for story in yaml.safe_load((HERE / "stories.yaml").read_text())
}


class _Runner(ScenarioRunner):
    """Sends the notices of a story, and notes which event led to which decisions.

    `starts`: (decisions before it, its number, its time) of each event.
    """

    def __init__(self, policy: Policy, form: Scenario, story: dict[str, Any]) -> None:
        super().__init__(policy, form)
        self.notices = story.get("notices", {})
        self.starts: list[tuple[int, int, int]] = []
        take = self.job.snapshot
        still = {key: story[key] for key in ("standstill", "standstill_ranks") if key in story}
        self.job.snapshot = lambda *args, **options: take(*args, **options) | still  # type: ignore[method-assign]

    def step(self) -> None:
        if self.index in self.notices:
            kind, message, data = self.notices[self.index]
            at_ns, step = self.now_ns, self.job.next_step
            self.send(Notice(at_ns, kind, message, step=step, data=data))
        super().step()

    def send(self, event: Event) -> None:
        self.starts.append((len(self.result.log), len(self.events), event.at_ns))
        super().send(event)


@dataclass(frozen=True)
class Played:
    """A story after its run; `log`: each decision with its frame."""

    policy: Policy
    log: list[tuple[int, Decision]]
    records: list[Record]
    events: list[Event]


@cache
def played(name: str) -> Played:
    """Play a story by its name, or by its title if it has none."""
    story = STORIES[name]
    own = HERE / f"{story['policy']}.yaml"
    policy = policy_of(own if own.exists() else story["policy"], story.get("mode"))
    keys = ("series", "after_rollback", "ranks", "every", "delay")
    form = Scenario(
        name,
        expect=(),
        inject=tuple(Injection(**keys) for keys in story.get("inject", ())),
        **{key: story[key] for key in keys if key in story},
    )
    runner = _Runner(policy, form, story)
    runner.run()
    data = Payload({"policy_digest": policy.digest, "mode": policy.mode})
    records = [Record(0, "run_start", -1, 0, WALL, 0, -1, "", None, data)]
    firsts = [first for first, _, _ in runner.starts]
    for n, (_, decision) in enumerate(runner.result.log):
        _, number, at_ns = runner.starts[bisect_right(firsts, n) - 1]
        stored = {"seq": n + 1, "mono_ns": at_ns, "wall": WALL, "actor": "engine", "event": number}
        records.append(Record.decode(stored | decision_record(decision)))
    return Played(policy, runner.result.log, records, runner.events)


def report(name: str, incident: str = "inc-1", until: int | None = None) -> IncidentReport:
    """Return the report of an incident; `until`: as of that record."""
    story = played(name)
    policy, records = story.policy, story.records[:until]
    own = [r for r in records if r.incident == incident and r.kind == "incident"]
    closed = next((r.event for r in own if is_closing(r)), records[-1].event)
    names: dict[int, tuple[str, ...]] = {}
    tapes = Tapes()
    for number, event in enumerate(story.events[: closed + 1]):
        if isinstance(event, Announced):
            names[event.rank] = event.names
        elif isinstance(event, Frame):
            tapes.add(event, names[event.rank], opened=number > own[0].event)
    run = RunOrigin(
        id=RUN,
        directory="runs/demo",
        host="gpu-07",
        command=["python", "train.py"],
        policy=policy.name,
        policy_digest="",
        mode=policy.mode,
        phase="the run is in progress",
    )
    return build_incident_report(records, incident, run, {policy.digest: policy}, tapes)
