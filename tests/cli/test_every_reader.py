"""Runs of many kinds, each read by all commands that read a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from supervise.core.model import Announced, Event, Exited, Frame, Launched, Notice, Payload
from supervise.errors import StoreError
from supervise.runtime import RankView, build_status
from supervise.store import RunDir
from tests.fuzz.recorded import sample
from tests.golden.stories import HERE, STORIES, played
from tests.support.recorded_run import (
    BEGIN,
    SECOND,
    SMALL,
    WALL,
    Judge,
    make_frames,
    policy_of,
)
from tests.support.run_readers import read_everywhere

# With an incident, requests, orders, starts of the job, and a job that nobody saw end.
CHOSEN = (
    *("nan", "approved", "operator", "oom", "ended-unseen", "crash"),
    "a hang: the job starts again from a checkpoint",
    "a crash: the job starts again from a checkpoint and ends before its first step",
)
# What a supervisor itself writes, beside its start and end, in the form that its log has.
SENT = {"channel": "webhook", "ok": True, "keys": ["run:3"], "tries": 1}
REFUSED = {"channel": "slack", "ok": False, "keys": ["run:3"], "tries": 2}
TEXT = {"message": 3, "title": "The loss is high", "verdict": "", "why": "", "next": "", "card": []}
OWN_RECORDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("notify_result", "webhook: 200", SENT),
    ("notify_result", "slack: 500", REFUSED),
    ("notify_text", "The loss is high", TEXT),
    ("note", "a message waits", {"what": "late-message", "outcome": "sent", "severity": "SEV1"}),
    ("note", "SIGTERM came after the end of the job", {"what": "signal", "details": {}}),
    ("sampling", "attention every 640 steps", {}),
)


def keep(
    directory: Path,
    events: Iterable[Event],
    policy: Path | str,
    *,
    mode: str | None = None,
    code: int | None = 0,
    fails_at: int | None = None,
    max_bytes: float | None = None,
    **options: Any,
) -> Path:
    """Record a run with the documents of a supervisor; one without a code was killed.

    From event number `fails_at` on the journal cannot be written; `max_bytes` is its limit.
    """
    chosen = policy_of(policy, mode)
    run = RunDir.create(directory, argv=["python", "train.py"], policy=chosen, wall=WALL)
    judge = Judge(run, policy, mode=mode, **options)
    started = {"policy": chosen.name, "policy_digest": chosen.digest, "mode": chosen.mode}
    judge.recorder.note("run_start", -1, "the job was started", started | {"channels": ["console"]})
    for count, event in enumerate(events):
        if count == fails_at:
            judge.recorder.record_failure(
                StoreError("cannot write the journal: No space left on device")
            )
        judge.judge(event)
        judge.recorder.limit_journal(max_bytes)
    for kind, reason, data in OWN_RECORDS:
        judge.recorder.note(kind, judge.state.step, reason, data)
    ranks = {0: RankView(7, "step", 5, Payload({"collectors": {"loss": "on"}}))}
    about: dict[str, Any] = {"wall": WALL, "now_ns": 9, "tier": "T1", "last": None}
    status = build_status(chosen, judge.state, ranks, **about, trouble=None)
    run.write_json("state.json", status.document())
    if code is not None:
        data = {"exit_code": code, "journal": judge.recorder.journal}
        judge.recorder.note("run_end", judge.state.step, f"exit code {code}", data)
    judge.recorder.close()
    return run.path


@pytest.mark.parametrize("name", CHOSEN)
def test_a_run_with_a_story_can_be_read(name, tmp_path):
    """Its evidence is of a fake job, so that it has no files."""
    story = STORIES[name]
    policy = HERE / f"{story['policy']}.yaml"
    policy = policy if policy.exists() else story["policy"]
    run = keep(
        tmp_path / "runs" / "run",
        played(name).events,
        policy,
        mode=story.get("mode"),
        answer=lambda action: None,
    )
    read_everywhere(run, tmp_path, audit_verify=1, record_verify=1)


def frames_of_two(steps: int) -> list[Event]:
    """Return what two ranks send."""
    begin = (Launched(1, 2**22 + 7, 0), *(Announced(2, r, 2, 7, BEGIN[1].names) for r in (0, 1)))
    frames = [
        Frame((10 + step) * SECOND + rank, rank, 0, step, (2.0, 1.0))
        for step in range(steps)
        for rank in (0, 1)
    ]
    return [*begin, *frames]


SPIKE = [*BEGIN, *make_frames(0, *[2.0] * 40, 8.0, 7.0, *[2.0] * 60)]
KINDS: dict[str, tuple[list[Event], dict[str, Any]]] = {
    "an incident": (SPIKE, {}),
    "a killed supervisor": (SPIKE, {"code": None}),
    "two ranks": (frames_of_two(30), {}),
    "no step": ([*BEGIN, Exited(9 * SECOND, 3)], {"code": 3}),
    "no probe": ([Launched(1, 2**22 + 7, 0), Notice(9, "no-probe", "none"), Exited(10, 0)], {}),
    "no event": ([], {"code": 70}),
    "a full disk": (SPIKE, {"fails_at": 60}),
    "a journal of which only the end is left": (SPIKE, {"max_bytes": 1000}),
}
LACKING = {
    "a full disk": {"replay": 2},
    "a journal of which only the end is left": {"replay": 2, "why-not": 64},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_any_kind_can_be_read(kind, tmp_path):
    (policy := tmp_path / "small.yaml").write_text(SMALL)
    events, options = KINDS[kind]
    run = keep(tmp_path / "runs" / "run", events, policy, **options)
    read_everywhere(run, tmp_path, **LACKING.get(kind, {}))


def test_a_run_with_every_document_can_be_read(tmp_path_factory, tmp_path):
    run = shutil.copytree(sample(tmp_path_factory.mktemp("sample")).path, tmp_path / "runs" / "run")
    read_everywhere(run, tmp_path, audit_verify=1, record_verify=1)
