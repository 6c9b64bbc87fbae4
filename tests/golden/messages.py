"""The messages that people receive, produced by the engine and rendered by the notifiers.

Each story plays a scenario and prints, in order, what the operator sends, the answer, why an action
was suppressed or failed, and every message as the console prints it. Review the wording here.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from supervise.catalog import Injection, Scenario, load_policy
from supervise.core.model import Decision, Message, Policy
from supervise.lab import run_scenario
from supervise.notifiers import (
    Trouble,
    failed_message,
    message_of,
    recovered_message,
    render_console,
    slack_body,
)

RUN, HEAD = "20260105-101112-7f3a9c", "42 9c1b"
RECORDED = ("suppressed", "abort", "in_doubt")  # kinds whose reason `supervise why` shows

# What no shipped policy sets: a relaunch after a crash and after a hang, and a pause.
RESTARTING = """\
version: supervise/v1
policy: restarting
mode: enforce
use: [hang]
override: {hang.stuck: {run: restart}}
runbooks:
  restart:
    meaning: The job ended, or makes no progress; it starts again from its newest good checkpoint.
    impact: The steps since the checkpoint are lost.
    steps: [snapshot, relaunch: {start: 0.1, rewarm: 5, at_least: 0}]
    verify: {within: 50, clear_for: 3}
budgets: {all: {max: 9, per: 1000}, restart: {max: 1, per: 1000}}
escalate: {ladder: [restart, hold], reset_after: 500}
job:
  on_crash: restart
  relaunch: {args: ["--resume", "{checkpoint}"]}
savepoints: {every: 25, keep: 4}
warmup: 20
probation: 20
"""


@dataclass(frozen=True, eq=False)
class Story:
    """One run: what it shows, its policy and mode, the metrics, and what is done to it."""

    title: str
    policy: str
    series: dict[str, str]
    inject: tuple[Injection, ...] = ()
    mode: str | None = None
    after_rollback: Any = ()
    ranks: int = 1
    every: float = 0.1


def command(at: int, word: str, **args: Any) -> Injection:
    """Return what an operator sends before frame `at`."""
    return Injection(at=at, command=word, args=args)  # type: ignore[arg-type]


NAN = {"train_loss_raw": "2.4x200 nanx10", "update_norm": "0.1x210"}
LOSSES_AGAIN = {"train_loss_raw": "2.4x400", "update_norm": "0.1x400"}
SPIKE = {
    "train_loss_raw": "2.4x200 9x40 2.4x200",
    "grad_global_norm": "1x200 60x40 1x200",
}
STORIES = (
    Story("a drill: NaN losses, rolled back, recovered", "nano", NAN, after_rollback=LOSSES_AGAIN),
    Story("a loss spike that does not recover", "nano", SPIKE),
    Story(
        "NaN losses come back: a hold, and its release",
        "nano",
        NAN,
        (command(600, "release"),),
        after_rollback={"train_loss_raw": "2.4x60 nanx200 2.4x200", "update_norm": "0.1x460"},
    ),
    Story(
        "approval: a request is approved",
        "nano",
        NAN,
        (
            command(202, "approve", id="ask-7"),
            command(203, "approve", id="ask-1"),
            command(206, "approve", id="ask-1"),
        ),
        mode="approve",
        after_rollback=LOSSES_AGAIN,
    ),
    Story(
        "approval: a request is denied",
        "nano",
        NAN,
        (command(203, "deny", id="ask-1"), command(205, "approve", id="ask-1")),
        mode="approve",
    ),
    Story(
        "approval: nobody answers",
        "nano",
        {"train_loss_raw": "2.4x200 nanx920", "update_norm": "0.1x1120"},
        mode="approve",
        every=1.0,
    ),
    Story(
        "an incident is acknowledged, its rule is silenced, SEV0 is not",
        "nano",
        SPIKE,
        (
            command(150, "ack"),
            command(150, "silence", rule="no.such"),
            command(150, "silence", rule="nonfinite.lasting"),
            command(150, "silence", **{"rule": "loss_spike.coupled", "for": 9}),
            command(151, "silence", **{"rule": "loss_spike.coupled", "for": 0}),
            command(230, "ack", incident="inc-9"),
            command(230, "ack"),
        ),
        mode="observe",
    ),
    Story("mode shadow: what would have been done", "nano", NAN, mode="shadow"),
    Story(
        "actions that an operator orders, and those that are refused",
        "nano",
        {"train_loss_raw": "2.4x400", "learning_rate": "0.001x400"},
        (
            command(1, "rollback"),
            command(1, "resume"),
            command(1, "release"),
            command(1, "quarantine", shards=["data/7.tar"]),
            command(1, "lr", value=7.0),
            command(1, "lr", value="fast"),
            command(100, "lr", value=0.5, rewarm=10),
            command(150, "pause"),
            command(151, "resume"),
            command(160, "savepoint"),
            command(170, "skip", steps=2),
            command(250, "rollback", before=240),
            command(390, "stop", requeue=True),
        ),
    ),
    Story(
        "a rollback that fails",
        "nano",
        {"train_loss_raw": "2.4x200 nanx100", "update_norm": "0.1x300"},
        (Injection(at=0, fail_action="rollback"),),
    ),
    Story(
        "an action whose outcome is lost",
        "nano",
        {"train_loss_raw": "2.4x200 nanx900", "update_norm": "0.1x1100"},
        (Injection(at=0, lose_action="rollback"),),
    ),
    Story(
        "several ranks: a rollback is refused",
        "nano",
        {"train_loss_raw": "2.4x200 nanx20"},
        ranks=2,
    ),
    Story(
        "a crash: the job ends with code 1",
        "nano",
        {"train_loss_raw": "2.4x100"},
        (Injection(at=50, exit=1),),
    ),
    Story(
        "a crash during an incident: the job ends with signal 9",
        "nano",
        {"train_loss_raw": "2.4x200 nanx50"},
        (Injection(at=0, fail_action="rollback"), Injection(at=220, exit=-9)),
    ),
    Story(
        "a crash: the job starts again from a checkpoint and ends before its first step",
        "restarting",
        {"train_loss_raw": "2.4x100"},
        (Injection(at=40, checkpoint=30), Injection(at=50, exit=1)),
    ),
    Story(
        "a crash without a good checkpoint",
        "restarting",
        {"train_loss_raw": "2.4x100"},
        (Injection(at=50, exit=1),),
    ),
    Story("a hang under nano", "nano", {"step_time": "0.1x200 _x2600"}),
    Story(
        "a hang: the job starts again from a checkpoint",
        "restarting",
        {"step_time": "0.1x200 _x1500"},
        (Injection(at=100, checkpoint=90),),
    ),
    Story(
        "what the probe and the supervisor report",
        "nano",
        {"train_loss_raw": "2.4x100"},
        (
            Injection(at=20, gap=5),
            Injection(at=30, probe_restart=True),
            *(
                Injection(at=40 + n, notice=kind)
                for n, kind in enumerate(
                    ("collector-off", "no-probe", "probe-off", "segment-fault", "drill", "orphans")
                )
            ),
        ),
    ),
)


@cache
def policy_of(name: str, mode: str | None) -> Policy:
    """Return the story's policy; `restarting` is the text above."""
    if name != "restarting":
        return load_policy(name, mode=mode)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "restarting.yaml"
        path.write_text(RESTARTING)
        return load_policy(path, mode=mode)


def lines_of(decision: Decision, frame: int) -> Iterator[str]:
    """Yield the lines that people read of one decision."""
    data = decision.data
    if decision.kind == "notify_intent":
        yield render_console(message_of(decision, RUN, HEAD), colour=False).rstrip("\n")
    elif decision.kind == "note" and data.get("what") == "operator":
        args = " ".join(f"{name}={value}" for name, value in data["args"].items())
        yield f"[frame {frame}] $ supervise {data['command']} {args}".rstrip()
        yield f"    {'ok' if data['ok'] else 'refused'}: {data['answer']}"
    elif decision.kind in RECORDED:
        yield f"[frame {frame}] {decision.kind}: {decision.reason}"


@cache
def played(story: Story) -> list[tuple[int, Decision]]:
    """Play a story and return its decisions with the frame of each."""
    form = Scenario(
        story.title,
        story.series,
        (),
        inject=story.inject,
        after_rollback=story.after_rollback,
        ranks=story.ranks,
        every=story.every,
    )
    return run_scenario(policy_of(story.policy, story.mode), form).log


def channels() -> Iterator[str]:
    """Yield what the other channels receive when one fails and when it recovers."""
    last = Message(RUN, None, "INFO", "", "", "", "", 120, HEAD)
    failing = Trouble("slack", 100.0, 3, 2, "HTTP 503")
    for message in (
        failed_message(failing, last, 130.0),
        failed_message(replace(failing, undelivered=1, lost=1), last, 101.0),
        recovered_message(failing, last),
        recovered_message(replace(failing, lost=0), last),
    ):
        yield render_console(message, colour=False).rstrip("\n")


def messages() -> str:
    """Return the whole file."""
    text: list[str] = []
    first: Message | None = None
    for story in STORIES:
        text += [
            "",
            f"== {story.title} ({story.policy}{', ' * bool(story.mode)}{story.mode or ''})",
        ]
        for frame, decision in played(story):
            text += lines_of(decision, frame)
            if first is None and decision.kind == "notify_intent":
                first = message_of(decision, RUN, HEAD)
    text += ["", "== a channel fails and recovers", *channels()]
    assert first is not None
    text += ["", "== the first message as Slack receives it"]
    text += json.dumps(json.loads(slack_body(first)), indent=2, ensure_ascii=False).splitlines()
    return "\n".join(text[1:]) + "\n"
