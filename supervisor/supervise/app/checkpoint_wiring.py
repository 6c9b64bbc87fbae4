"""The checkpoint guard of a run: what it is told of the run, and what it tells in return."""

from __future__ import annotations

from pathlib import Path

from ..checkpoints.service import CheckpointService
from ..checkpoints.tracker import RunPosition
from ..core.handlers.job_lifecycle import ASKED, MEANT
from ..core.model.decisions import ACTING_MODES
from ..core.model.events import Event, Notice
from ..core.model.policy import Policy
from ..core.runbooks import checkpoint_choice
from ..core.state.incident import HELD
from ..core.state.run_state import State
from ..store.run_directory import RUNS
from .event_processor import EventProcessor
from .run_recovery import RecoveredRun
from .settings import Settings


def guard(settings: Settings, desk: EventProcessor) -> CheckpointService:
    """Return the guard of the job's checkpoints, by the policy that the job was started with.

    Raises:
        StoreError: the register of this run cannot be read.
    """
    policy = settings.policy
    facts = {"argv": list(settings.argv), "policy": policy.name, "policy_digest": policy.digest}
    return CheckpointService(
        policy.job["checkpoints"],
        settings.run.path,
        Path.cwd(),
        lambda: moment(desk),
        facts=facts,
        data=policy.job["manifest"],
        runs=RUNS,
    )


def hear(guard: CheckpointService, event: Event, policy: Policy) -> None:
    """Let the guard hear what a probe said of a save.

    Where a relaunch begins with a savepoint, nothing else can be gone back to.
    """
    if not isinstance(event, Notice) or event.kind != "checkpoint-saved":
        return
    resume = (policy.job.get("relaunch") or {}).get("resume")
    if resume != "savepoint" or event.data.get("how") == "savepoint":
        guard.on_save(event)


def seek(guard: CheckpointService, policy: Policy, state: State) -> None:
    """Let the guard verify at once what a refused relaunch waits for, if one does."""
    before = checkpoint_choice.needed_before(policy, state)
    if before is not None:
        guard.verify_awaited(before)


def may_come_back(policy: Policy, state: State, returncode: int) -> bool:
    """Whether a job that ended with this code may be started again by the policy's `on_crash`.

    The engine decides that once it knows of the end; here it is only about being in time.
    """
    job = state.job
    able = policy.mode in ACTING_MODES and "relaunch" not in job.unavailable
    if not returncode or not policy.job.get("on_crash") or not able:
        return False
    meant = job.stopping or job.end_requested or returncode in (*ASKED, *MEANT)
    held = state.incident is not None and state.incident.phase == HELD
    return not (meant or held or state.step in job.restarts.crashes)


def take_up(guard: CheckpointService, past: RecoveredRun, policy: Policy) -> None:
    """Let the guard go on for one whose supervisor died."""
    guard.resume(past.checkpoints)
    for notice in past.saves.values():
        hear(guard, notice, policy)


def moment(desk: EventProcessor) -> RunPosition:
    """Return where the run is."""
    state = desk.state
    leader = state.leader()
    newest = next((row for row in reversed(desk.window) if row[1].rank == leader), None)
    values = {}
    if newest is not None:
        names, frame = newest
        pairs = zip(names, frame.values, strict=False)
        values = {name: value for name, value in pairs if value is not None}
    known = state.checkpoints
    return RunPosition(
        state.step, state.attempt, values, known.suspects(), state.job.world_size, known.on_trial()
    )
