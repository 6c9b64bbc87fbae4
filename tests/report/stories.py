"""Incidents of many kinds, from scripted metrics and events, as records and as documents.

The live engine judges what a scenario plays against a fake job; its decisions become records in the
form of the audit log, without a disk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from supervise.catalog import Injection, Scenario
from supervise.core.model import Announced, Event, Frame, Notice, Payload, Policy, decision_record
from supervise.lab import ScenarioRunner
from supervise.report import (
    IncidentReport,
    Record,
    RunOrigin,
    Tapes,
    build_incident_report,
    is_closing,
)
from tests.golden.messages import LOSSES_AGAIN, NAN, RUN, SPIKE, command, policy_of

WALL = "2026-01-05T10:11:12.345Z"


@dataclass(frozen=True)
class Story:
    """One run with an incident; `notices`: frame before which the job says something -> that."""

    policy: str
    series: dict[str, str]
    inject: tuple[Injection, ...] = ()
    mode: str | None = None
    after_rollback: Any = ()
    ranks: int = 1
    every: float = 0.1
    delay: float = 0.0
    notices: Mapping[int, tuple[str, str, dict[str, Any]]] = field(default_factory=dict)
    standstill: str = ""


DRILL = (
    "drill",
    "drill lr_spike begins at step 150 (factor=30)",
    {"fault": "lr_spike", "params": {"factor": 30}, "steps": 20},
)
ERROR = {
    "type": "OutOfMemoryError",
    "message": "CUDA out of memory. Tried to allocate 2.00 GiB",
    "file": "train.py",
    "line": 41,
    "function": "step",
    "rank": 3,
    "world_size": 4,
    "cls": "cuda-oom",
    "title": "a GPU ran out of memory",
    "then": "use a smaller batch or sequence, or activation checkpointing, then start it again",
    "relaunch": "once",
    "leading": True,
    "traceback": 'Traceback (most recent call last):\n  File "train.py", line 41, in step\n',
}
RATE = {
    "learning_rate": "0.001x150 0.03x20 0.001x60",
    "update_norm": "0.1x150 2.8x20 0.1x60",
    "grad_global_norm": "1x151 6.9x19 1x60",
    "train_loss_raw": "2.3x151 3.4 4.8 5.6x17 2.3x60",
}
SKIP = "skip_nonfinite skipped the update: loss or gradient norm is not finite"
SKIPPED = ("safeguard", SKIP, {"order": "skip_nonfinite"})
CALM = {
    "learning_rate": "0.001x400",
    "update_norm": "0.1x400",
    "grad_global_norm": "1x400",
    "train_loss_raw": "2.3x400",
}
STORIES = {
    "spike": Story("nano", SPIKE, after_rollback=CALM),
    "rate": Story("nano", RATE, after_rollback=CALM, notices={150: DRILL}),
    "nan": Story("nano", NAN, after_rollback=LOSSES_AGAIN),
    "skipped": Story(
        "nano",
        {
            "train_loss_raw": "2.4x100 nan 2.4x69 nan 2.4x60",
            "update_norm": "0.1x100 0 0.1x69 0 0.1x60",
            "update_skipped": "0x100 1 0x69 1 0x60",
            "skip_reason": "0x100 2 0x69 2 0x60",
            "tokens_per_update": "512x100 0 512x69 0 512x60",
        },
        (Injection(at=228, exit=0),),
        notices={100: SKIPPED, 170: SKIPPED},
    ),
    "held": Story(
        "nano",
        NAN,
        after_rollback={"train_loss_raw": "2.4x60 nanx200", "update_norm": "0.1x260"},
    ),
    "approval": Story("nano", NAN, mode="approve"),
    "approved": Story(
        "nano",
        NAN,
        (command(203, "approve", id="ask-1"),),
        mode="approve",
        after_rollback=LOSSES_AGAIN,
    ),
    "shadow": Story("nano", SPIKE, mode="shadow"),
    "hang": Story(
        "nano",
        {"step_time": "0.1x200 _x2600", "train_loss_raw": "2.4x200 _x2600"},
        ranks=4,
        standstill="rank 2 waits at data.py:88 in read, after step 199; ranks 0, 1, 3 wait in "
        "all_reduce (call 812)",
    ),
    "oom": Story(
        "restarting",
        {"train_loss_raw": "2.4x120"},
        (Injection(at=40, checkpoint=30), Injection(at=50, exit=1)),
        notices={50: ("failure", "OutOfMemoryError: CUDA out of memory", ERROR)},
    ),
    "crash": Story(
        "restarting",
        {"train_loss_raw": "2.4x100"},
        (Injection(at=50, exit=1),),
    ),
    "withdrawn": Story(
        "nano",
        {"step_time": "0.1x200 _x1230 0.1x300", "train_loss_raw": "2.4x200 _x1230 2.4x300"},
        delay=5.0,
    ),
    "loader": Story("nano", {"train_loss_raw": "2.4x400", "dataloader_stall_frac": "1x200 60x200"}),
    "memory": Story("large", {"train_loss_raw": "2.4x400", "host_mem_growth": "1e8x200 2e9x200"}),
    "ranks": Story(
        "large",
        {"train_loss_raw": "2.4x300", "param_digest_mismatch": "0x200 1x100"},
        ranks=2,
    ),
    "moments": Story("large", {"train_loss_raw": "2.4x300", "opt_state_finite": "1x200 0x100"}),
    "operator": Story(
        "nano", {"train_loss_raw": "2.4x300"}, (command(150, "lr", value=0.5, rewarm=10),)
    ),
}


class _Runner(ScenarioRunner):
    """Sends the notices of a story, and notes which event led to which decisions.

    `starts`: (decisions before it, its number, its time) of each event.
    """

    def __init__(self, policy: Policy, form: Scenario, story: Story) -> None:
        super().__init__(policy, form)
        self.story = story
        self.starts: list[tuple[int, int, int]] = []
        take = self.job.snapshot
        still = {"standstill": story.standstill} if story.standstill else {}
        self.job.snapshot = lambda *args, **options: take(*args, **options) | still  # type: ignore[method-assign]

    def step(self) -> None:
        if self.index in self.story.notices:
            kind, message, data = self.story.notices[self.index]
            at_ns, step = self.now_ns, self.job.next_step
            self.send(Notice(at_ns, kind, message, step=step, data=data))
        super().step()

    def send(self, event: Event) -> None:
        self.starts.append((len(self.result.log), len(self.events), event.at_ns))
        super().send(event)


@cache
def played(name: str) -> tuple[Policy, list[Record], list[Event]]:
    """Return the policy of a story, its records, and its events."""
    story = STORIES[name]
    policy = policy_of(story.policy, story.mode)
    form = Scenario(
        name,
        story.series,
        (),
        inject=story.inject,
        after_rollback=story.after_rollback,
        ranks=story.ranks,
        every=story.every,
        delay=story.delay,
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
    return policy, records, runner.events


def report(name: str, incident: str = "inc-1", until: int | None = None) -> IncidentReport:
    """Return the report of an incident; `until`: as of that record."""
    policy, records, events = played(name)
    records = records[:until]
    own = [r for r in records if r.incident == incident and r.kind == "incident"]
    closed = next((r.event for r in own if is_closing(r)), records[-1].event)
    names: dict[int, tuple[str, ...]] = {}
    tapes = Tapes()
    for number, event in enumerate(events[: closed + 1]):
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
