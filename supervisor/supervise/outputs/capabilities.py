"""Remedies that are available in this job, and for the others the reason and the change needed.

Console, `supervise status` and its JSON take it from here, so that they say the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.model.checkpoint_registry import WEIGHTS_ONLY
from ..core.model.decisions import ACTING_MODES
from ..core.model.policy import Policy
from ..core.model.preemption import Terms
from ..core.state.run_state import State

# How the probe's status begins where no rollback is possible, and where a safeguard cannot act.
REFUSED, CANNOT = "unavailable: ", "cannot act: "
INIT = "supervise init -- COMMAND"  # writes a policy with it


def capabilities(
    policy: Policy, state: State, probe: Mapping[str, Any], channels: Sequence[str]
) -> dict[str, str]:
    """Return what can be done -> how, or why not.

    Args:
        probe: the status of the leading rank's probe, empty where it has none.
        channels: names of the channels that people are told on.
    """
    found = {}
    if policy.mode not in ACTING_MODES:
        found["actions"] = f"none in mode {policy.mode} (--mode enforce)"
    else:
        found["rollback"] = _rollback(policy, state, probe)
        found["relaunch"] = _relaunch(policy, state, probe)
        for name, how in (probe.get("safeguards") or {}).items():
            if how.startswith(CANNOT):
                found[name] = f"no ({how.removeprefix(CANNOT)})"
        if Terms.of(policy.job) is not None:
            found["preempt"] = _preempt(state, probe)
    found["ranks"] = str(state.job.world_size)
    found["messages"] = ", ".join(channels) if channels[1:] else "console only"
    return found


def line(found: Mapping[str, str]) -> str:
    """Return them as one line."""
    return " · ".join(f"{what}: {how}" for what, how in found.items())


def is_known(policy: Policy, state: State, probe: Mapping[str, Any]) -> bool:
    """Return whether the job has shown what a rollback can do in it."""
    if policy.mode not in ACTING_MODES:
        return True
    refused = str(probe.get("rollback", "")).startswith(REFUSED)
    # Three show how far apart they are.
    enough = min(3, int(policy.savepoints.get("keep", 3)))
    known = "rollback" in state.job.unavailable or refused
    return known or len(probe.get("savepoints") or ()) >= enough


def _rollback(policy: Policy, state: State, probe: Mapping[str, Any]) -> str:
    missing, status = state.job.unavailable, str(probe.get("rollback", ""))
    if not _has(policy, "rollback"):
        return f"no (policy {policy.name} never runs it)"
    if "fence" in missing:
        return f"no ({missing['fence']})"
    if "rollback" in missing:
        return f"no ({_reason(missing['rollback'])})"
    if status.startswith(REFUSED):
        return f"no ({status.removeprefix(REFUSED)})"
    if not probe.get("savepoints"):
        every = policy.savepoints.get("every", "?")
        return f"not yet (savepoints are taken every {every} steps at most)"
    return "yes" + _lateness(policy, state, probe["savepoints"])


def _lateness(policy: Policy, state: State, steps: Sequence[int]) -> str:
    """Say how far savepoints are apart where that is more than the policy wants, else ""."""
    every = int(policy.savepoints.get("every", 1))
    ends = [*steps[-2:], state.step]
    apart = max(b - a for a, b in itertools.pairwise(ends))
    # Twice: a pause, or a step that was not finite, makes one late, too.
    return f", savepoints {apart} steps apart for their cost" if apart > 2 * every else ""


def _relaunch(policy: Policy, state: State, probe: Mapping[str, Any]) -> str:
    settings, why = policy.job.get("relaunch"), state.job.unavailable.get("relaunch")
    if not settings:
        library = probe.get("library")
        return f"not configured ({f'{library} recognised: ' if library else ''}{INIT})"
    if why:
        return f"no ({why})"
    if not _has(policy, "relaunch"):
        return f"only by command (policy {policy.name} never runs it)"
    good = state.checkpoints.good()
    if not good:
        patterns = ", ".join(policy.job.get("checkpoints", {}).get("glob") or ())
        named = f", job.checkpoints.glob is {patterns}" if patterns else ""
        return f"not yet (no checkpoint is verified{named})"
    whole = [each for each in good if each.resumable != WEIGHTS_ONLY]
    if not whole:
        return f"weights only, from {good[-1].id} (no checkpoint holds an optimizer)"
    return f"yes, from {whole[-1].id}"


def _preempt(state: State, probe: Mapping[str, Any]) -> str:
    if state.job.world_size > 1:
        return f"no ({state.job.world_size} ranks would have to save at the same step)"
    status = str(probe.get("checkpoint", ""))
    if status.startswith(REFUSED):
        return f"not yet ({status.removeprefix(REFUSED)})"
    return "yes, a checkpoint before the end"


def _has(policy: Policy, verb: str) -> bool:
    """Return whether any rule, or a crash, can lead to this action."""
    names = [rule.runbook for rule in policy.rules]
    names += [policy.job.get("on_crash"), *policy.ladder.levels]
    seen: set[str] = set()
    while names:
        book = policy.runbooks.get(names.pop() or "")
        if book is None or book.name in seen:
            continue
        if verb in book.verbs:
            return True
        seen.add(book.name)
        names += (book.if_it_fails, book.if_refused)
    return False


def _reason(message: str) -> str:
    """Return the reason in a notice of the probe, between what it means and what else there is."""
    return (message.partition(": ")[2] or message).partition("; ")[0]
