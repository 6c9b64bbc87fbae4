"""Connects the checkpoint service to the run: where the run is, what was saved, what is needed."""

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


def service(settings: Settings, processor: EventProcessor) -> CheckpointService:
    """Return the checkpoint service of the policy that the job was started with.

    Raises:
        StoreError: the register of this run cannot be read.
    """
    policy = settings.policy
    facts = {"argv": list(settings.argv), "policy": policy.name, "policy_digest": policy.digest}
    return CheckpointService(
        policy.job["checkpoints"],
        settings.run.path,
        Path.cwd(),
        lambda: position(processor),
        facts=facts,
        data=policy.job["manifest"],
        runs=RUNS,
    )


def forward_save(checkpoints: CheckpointService, event: Event, policy: Policy) -> None:
    """Pass a save that a probe reported to the checkpoint service.

    Where a relaunch begins with a savepoint, nothing else can be gone back to.
    """
    if not isinstance(event, Notice) or event.kind != "checkpoint-saved":
        return
    resume = (policy.job.get("relaunch") or {}).get("resume")
    if resume != "savepoint" or event.data.get("how") == "savepoint":
        checkpoints.on_save(event)


def verify_awaited(checkpoints: CheckpointService, policy: Policy, state: State) -> None:
    """Have the checkpoint verified now that a refused relaunch waits for, if one does."""
    before = checkpoint_choice.needed_before(policy, state)
    if before is not None:
        checkpoints.verify_awaited(before)


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


def resume(checkpoints: CheckpointService, past: RecoveredRun, policy: Policy) -> None:
    """Resume the checkpoint service of a supervisor that died."""
    checkpoints.resume(past.checkpoints)
    for notice in past.saves.values():
        forward_save(checkpoints, notice, policy)


def position(processor: EventProcessor) -> RunPosition:
    """Return where the run is."""
    state = processor.state
    leader = state.leader()
    newest = next((row for row in reversed(processor.window) if row[1].rank == leader), None)
    values = {}
    if newest is not None:
        names, frame = newest
        pairs = zip(names, frame.values, strict=False)
        values = {name: value for name, value in pairs if value is not None}
    known = state.checkpoints
    return RunPosition(
        state.step, state.attempt, values, known.suspects(), state.job.world_size, known.on_trial()
    )
