"""Status of a run as plain data: its state, its progress, what can be done, and the verdict.

Remedies that are available in this job, and for the others the reason and the change needed.

Console, `supervise status` and its JSON take it from here, so that they say the same.

Summary of a run in one line: matters that need a person come first.

`supervise status`, `watch` and their JSON take it from here, so that they agree.

Progress of the training: loss, speed, planned length, and a curve of the whole run.

Plain data for `state.json`. A frame costs a microsecond here, and the curve has a fixed size.

The current status of a run as plain data, for `state.json`.

The supervisor never reads it back: the journal is authoritative.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any

from ..core import checkpoint_choice, rule_scope
from ..core.incident import Incident
from ..core.model import state_machine
from ..core.model.checkpoint_registry import WEIGHTS_ONLY
from ..core.model.decisions import ACTING_MODES, Decision
from ..core.model.events import Frame
from ..core.model.policy import Policy
from ..core.run_state import ApprovalRequest, State
from .segment_reader import ProbeStatus, RankView

# How the probe's status begins where no rollback is possible, and where a safeguard cannot act.
REFUSED, CANNOT = "unavailable: ", "cannot act: "
INIT = "supervise init -- COMMAND"  # writes a policy with it


def capabilities(
    policy: Policy, state: State, probe: ProbeStatus, channels: Sequence[str]
) -> dict[str, str]:
    """Return what can be done -> how, or why not.

    Args:
        probe: the status of the leading rank's probe, empty where it has none.
        channels: names of the channels that people are told on.
    """
    availability = {}
    if policy.mode not in ACTING_MODES:
        availability["actions"] = f"none in mode {policy.mode} (--mode enforce)"
    else:
        availability["rollback"] = _rollback(policy, state, probe)
        availability["relaunch"] = _relaunch(policy, state, probe)
        for name, safeguard in probe.safeguards.items():
            if safeguard.startswith(CANNOT):
                availability[name] = f"no ({safeguard.removeprefix(CANNOT)})"
        if policy.job.preempt is not None:
            availability["preempt"] = _preempt(state, probe)
    availability["ranks"] = str(state.job.world_size)
    availability["messages"] = ", ".join(channels) if channels[1:] else "console only"
    return availability


def line(availability: Mapping[str, str]) -> str:
    """Return them as one line."""
    return " · ".join(f"{remedy}: {state}" for remedy, state in availability.items())


def is_known(policy: Policy, state: State, probe: ProbeStatus) -> bool:
    """Return whether the job has shown what a rollback can do in it."""
    if policy.mode not in ACTING_MODES:
        return True
    refused = probe.rollback.startswith(REFUSED)
    # Three show how far apart they are.
    enough = 3 if policy.savepoints is None else min(3, policy.savepoints.keep)
    is_decided = "rollback" in state.job.unavailable or refused
    return is_decided or len(probe.savepoints) >= enough


def _rollback(policy: Policy, state: State, probe: ProbeStatus) -> str:
    missing, status = state.job.unavailable, probe.rollback
    if not _has(policy, "rollback"):
        return f"no (policy {policy.name} never runs it)"
    if "fence" in missing:
        return f"no ({missing['fence']})"
    if "rollback" in missing:
        return f"no ({_reason(missing['rollback'])})"
    if status.startswith(REFUSED):
        return f"no ({status.removeprefix(REFUSED)})"
    if not probe.savepoints:
        every = "?" if policy.savepoints is None else policy.savepoints.every
        return f"not yet (savepoints are taken every {every} steps at most)"
    return "yes" + _lateness(policy, state, probe.savepoints)


def _lateness(policy: Policy, state: State, steps: Sequence[int]) -> str:
    """Say how far savepoints are apart where that is more than the policy wants, else ""."""
    every = 1 if policy.savepoints is None else policy.savepoints.every
    ends = [*steps[-2:], state.step]
    apart = max(b - a for a, b in itertools.pairwise(ends))
    # Twice: a pause, or a step that was not finite, makes one late, too.
    return f", savepoints {apart} steps apart for their cost" if apart > 2 * every else ""


def _relaunch(policy: Policy, state: State, probe: ProbeStatus) -> str:
    reason = state.job.unavailable.get("relaunch")
    if policy.job.relaunch is None:
        library = probe.trained_by
        return f"not configured ({f'{library} recognised: ' if library else ''}{INIT})"
    if reason:
        return f"no ({reason})"
    if not _has(policy, "relaunch"):
        return f"only by command (policy {policy.name} never runs it)"
    good = state.checkpoints.good()
    if not good:
        patterns = ", ".join(policy.job.checkpoints.glob)
        named = f", job.checkpoints.glob is {patterns}" if patterns else ""
        return f"not yet (no checkpoint is verified{named})"
    resumable = [checkpoint for checkpoint in good if checkpoint.resumable != WEIGHTS_ONLY]
    if not resumable:
        return f"weights only, from {good[-1].id} (no checkpoint holds an optimizer)"
    return f"yes, from {resumable[-1].id}"


def _preempt(state: State, probe: ProbeStatus) -> str:
    if state.job.world_size > 1:
        return f"no ({state.job.world_size} ranks would have to save at the same step)"
    status = probe.checkpoint
    if status.startswith(REFUSED):
        return f"not yet ({status.removeprefix(REFUSED)})"
    return "yes, a checkpoint before the end"


def _has(policy: Policy, verb: str) -> bool:
    """Return whether any rule, or a crash, can lead to this action."""
    names = [rule.runbook for rule in policy.rules]
    names += [policy.job.on_crash, *policy.ladder.levels]
    visited: set[str] = set()
    while names:
        book = policy.runbooks.get(names.pop() or "")
        if book is None or book.name in visited:
            continue
        if verb in book.verbs:
            return True
        visited.add(book.name)
        names += (book.if_it_fails, book.if_refused)
    return False


def _reason(message: str) -> str:
    """Return the reason in a notice of the probe, between what it means and what else there is."""
    return (message.partition(": ")[2] or message).partition("; ")[0]


STALE_S = 15.0  # without a new status, written once a second; project default
SLOW_S, SLOW_STEPS = 30.0, 8  # without a step: as `heartbeat_missing`
_PHASES = {
    state_machine.LAUNCHING: "starting: no step yet",
    state_machine.WARMING: "warming up: the baselines are not complete yet",
    state_machine.HALTED: "ended",
}


def verdict(state: Mapping[str, Any], age_s: float | None = None) -> str:
    """Return `healthy`, or what is wrong or under way, the gravest first.

    Args:
        state: what `supervise status --json` prints.
        age_s: of the status itself, None where it is unknown.
    """
    return next(_reasons(state, age_s))


def _reasons(state: Mapping[str, Any], age_s: float | None) -> Iterator[str]:
    yield from _job(state)
    if "state" not in state:
        yield "unknown: no status was written yet"
        return
    if age_s is not None and age_s > STALE_S:
        yield f"unknown: the supervisor has written no status for {_time(age_s)}"
    if trouble := state.get("trouble"):
        yield f"no action is possible: {trouble}"
    elif space := state.get("space"):
        remaining, needed = (
            f"{space[key] / 1e6:.1f} MB" for key in ("reserve_bytes", "need_bytes")
        )
        yield f"the disk is full: free {needed} on {space['mount']}; {remaining} in reserve"
    incident = (state.get("incidents") or {}).get("open") or {}
    about = f"{incident.get('id')} {incident.get('severity')}" if incident else "no incident"
    for request in state.get("approvals") or ():
        command = f"supervise approve RUN {request['id']}"
        yield f"waits for a person: {command} ({request['runbook']}, {about})"
    machine = state["state"]
    if machine == state_machine.HOLDING:
        yield f"automatic actions are off, a person is needed: supervise release RUN ({about})"
    if awaited := state.get("waits_for"):
        yield f"a relaunch waits for {awaited}"
    if machine == state_machine.ACTING:
        yield f"acting: {incident.get('runbook') or 'a runbook'} runs ({about})"
    if any(rank.get("paused") for rank in (state.get("ranks") or {}).values()):
        yield f"paused: supervise resume RUN ({about})"
    if incident and machine == state_machine.PROBATION:
        yield f"recovered so far, on probation ({about})"
    if incident:
        yield f"incident open: {about}: {incident.get('headline')}"
    yield from _watching(state)
    yield _PHASES.get(machine, "healthy")


def _job(state: Mapping[str, Any]) -> Iterator[str]:
    if state.get("supervisor") == "running":
        return
    job, over, code = state.get("job"), state.get("over"), state.get("exit_code")
    if job == "running":
        yield "not supervised: its supervisor died; supervise adopt RUN"
    elif over and code == 0:
        yield "finished"
    elif over:
        cause = state.get("ended_by") or {}
        yield f"ended with exit code {code}{': ' + cause['text'] if cause else ''}"
    elif job is not None:
        yield "its supervisor died, and the job has ended; supervise adopt RUN"


def _watching(state: Mapping[str, Any]) -> Iterator[str]:
    """What is not an incident, and keeps a run from being known to be healthy."""
    training = state.get("training") or {}
    last_s, speed = training.get("last_step_s"), training.get("steps_per_s")
    if last_s is not None and speed and last_s > max(SLOW_S, SLOW_STEPS / speed):
        yield f"no step for {_time(last_s)}"
    blind = [
        rule for rule, rule_state in (state.get("rules") or {}).items() if rule_state == "blind"
    ]
    if blind:
        yield f"partly blind: {', '.join(blind[:3])}"
    if state.get("tier") == "T0":
        yield "no probe: only exit and signals are watched"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"


# The first that has a value counts: of all ranks together, else of one (design/rulings.md, Values).
LOSSES = ("job_loss", "train_loss", "train_loss_raw")
JOB_TOKENS, RANK_TOKENS = "job_tokens", "tokens_per_update"
SPEED_FRAMES = 64  # that the speed is the mean of; project default
PAUSE_STEPS = 20  # times the median step: longer than a checkpoint mostly is; project default
POINTS = 128  # of the curve at most; half as many after it was thinned
# Options of training scripts that give the optimizer steps of the whole run: Trainer, Lightning,
# nanoGPT, Megatron-LM, torchtitan, diffusers, and this project's example.
PLANNED = (
    *("max_steps", "max_iters", "steps", "num_steps", "total_steps", "train_iters", "max_step"),
    *("num_iterations", "max_train_steps", "training_steps", "training.steps"),
)


class Curve:
    """The loss over the whole run in at most POINTS points.

    A point is the highest loss of `stride` frames, so that no spike is lost; NaN counts as highest.
    When all points are used up, two become one.
    """

    def __init__(self) -> None:
        self.stride = 1
        self.steps: list[int] = []
        self.losses: list[float] = []
        self._left = 0  # frames that the newest point still takes

    def add(self, step: int, loss: float) -> None:
        """Take the loss of one frame."""
        if self._left:
            self.losses[-1] = _higher(self.losses[-1], loss)
            self._left -= 1
            return
        if len(self.steps) == POINTS:
            pairs = zip(self.losses[::2], self.losses[1::2], strict=True)
            self.losses = [_higher(a, b) for a, b in pairs]
            self.steps = self.steps[::2]
            self.stride *= 2
        self.steps.append(step)
        self.losses.append(loss)
        self._left = self.stride - 1


class TrainingProgress:
    """What the frames of a run show of its progress.

    Args:
        argv: the job's command, where the planned length may be.
    """

    def __init__(self, argv: Sequence[str] = ()) -> None:
        self._given = planned_in(argv)
        self._columns: dict[int, tuple[Sequence[str], tuple[int, int], list[int]]] = {}
        self._steps: dict[int, int] = {}  # rank -> newest step
        self._attempt = -1
        self._recent: deque[tuple[int, int]] = deque(maxlen=SPEED_FRAMES)  # of the leader: ns, step
        self._loss: tuple[int, str, float] | None = None  # rank, metric, value
        self._tokens: tuple[float, str] | None = None  # of an update, and of what
        self._curve = Curve()

    def take(self, names: Sequence[str], frame: Frame) -> None:
        """Take a frame and the names of its values."""
        if frame.attempt < self._attempt:
            return
        if frame.attempt > self._attempt:
            self._attempt = frame.attempt
            self._steps.clear()
            self._recent.clear()
        rank, values = frame.rank, frame.values
        self._steps[rank] = frame.step
        columns = self._columns.get(rank)
        if columns is None or columns[0] is not names:
            columns = self._columns[rank] = _columns(names)
        if rank == min(self._steps):
            if self._recent and frame.step <= self._recent[-1][1]:
                self._recent.clear()
            self._recent.append((frame.at_ns, frame.step))
            self._tokens = _tokens(values, columns[1])
        if self._loss is None or rank <= self._loss[0]:
            self._take_loss(names, frame, columns[2])

    def _take_loss(self, names: Sequence[str], frame: Frame, columns: Sequence[int]) -> None:
        for column in columns:
            loss = _value(frame.values, column)
            if loss is not None:
                self._loss = frame.rank, names[column], loss
                self._curve.add(frame.step, loss)
                return
            if self._loss is not None and self._loss[1] == names[column]:
                return  # absent in this step: another metric would bend the curve

    def facts(
        self, planned: int | None, now_ns: int, probe: ProbeStatus | None = None
    ) -> dict[str, Any]:
        """Return loss, speed, time left, the curve, and how far each rank lags.

        What is not known is None: `steps_per_s` before two steps, `tokens_per_s` of a job without
        tokens, `eta_s` without a planned length. `tokens_of` is `job`, or `rank` for the leader's.

        Args:
            planned: optimizer steps of a whole run, from the policy (`job.steps`).
            probe: the status of a rank, in which a library may say the same; before the command.
        """
        total, origin = (planned, "job.steps") if planned else self._given
        reported = None if probe is None else probe.planned_steps
        if not planned and probe is not None and reported is not None and reported > 0:
            total, origin = reported, probe.trained_by
        speed = self._speed()
        step = max(self._steps.values(), default=-1)
        remaining = None if total is None else max(0, total - 1 - step)
        rank, metric, loss = self._loss or (None, None, None)
        tokens, of_what = self._tokens or (None, None)
        return {
            "loss": loss,
            "loss_metric": metric,
            "loss_rank": rank,
            "steps_per_s": speed,
            "tokens_per_s": speed * tokens if speed and tokens else None,
            "tokens_of": of_what,
            "last_step_s": round((now_ns - self._recent[-1][0]) / 1e9, 1) if self._recent else None,
            "planned_steps": total,
            "planned_by": origin if total is not None else None,
            "eta_s": round(remaining / speed) if remaining is not None and speed else None,
            "lag": {str(r): step - rank_step for r, rank_step in sorted(self._steps.items())},
            "curve": {"steps": self._curve.steps, "loss": self._curve.losses},
        }

    def _speed(self) -> float | None:
        """Return the steps per second; what took as long as many steps was a pause."""
        spans = [(b - a, to - since) for (a, since), (b, to) in pairwise(self._recent)]
        typical = median(ns / steps for ns, steps in spans) if spans else 0.0
        regular = [(ns, steps) for ns, steps in spans if ns / steps <= PAUSE_STEPS * typical]
        took_ns = sum(ns for ns, _ in regular)
        return sum(steps for _, steps in regular) / (took_ns / 1e9) if took_ns > 0 else None


def planned_in(argv: Sequence[str]) -> tuple[int | None, str]:
    """Return the planned steps in a job's command, and the option that says so.

    Two options that disagree are none.
    """
    planned: dict[str, int] = {}
    for this, following in zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, value = this.partition("=")
        text = value if equals else following
        option = name.lstrip("-").replace("-", "_").lower()
        if option in PLANNED and (equals or name.startswith("--")) and text.isdecimal():
            planned[f"{name}={text}" if equals else f"{name} {text}"] = int(text)
    if len(set(planned.values())) != 1:
        return None, ""
    origin, total = next(iter(planned.items()))
    return (total, origin) if total > 0 else (None, "")


def _columns(names: Sequence[str]) -> tuple[Sequence[str], tuple[int, int], list[int]]:
    places = {name: i for i, name in enumerate(names)}
    tokens = places.get(JOB_TOKENS, -1), places.get(RANK_TOKENS, -1)
    return names, tokens, [places[name] for name in LOSSES if name in places]


def _tokens(values: Sequence[float | None], columns: tuple[int, int]) -> tuple[float, str] | None:
    for column, of_what in zip(columns, ("job", "rank"), strict=True):
        tokens = _value(values, column)
        if tokens is not None:
            return tokens, of_what
    return None


def _value(values: Sequence[float | None], column: int) -> float | None:
    return values[column] if 0 <= column < len(values) else None


def _higher(a: float, b: float) -> float:
    return a if math.isnan(a) or a > b else b


def read_curve(training: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Return steps and losses of the curve in a status; non-finite ones are text there."""
    curve = training.get("curve") or {}
    return list(curve.get("steps") or ()), [float(x) for x in curve.get("loss") or ()]


FAILURES = 8  # shown of them


def snapshot(
    policy: Policy,
    state: State,
    ranks: Mapping[int, RankView],
    *,
    wall: str,
    now_ns: int,
    tier: str,
    last: Decision | None,
    trouble: str | None,
) -> dict[str, Any]:
    """Return the content of `supervise status`.

    Args:
        ranks: per rank `pid`, `phase`, `seen_ns` and the probe's `status`.
        trouble: why decisions cannot be recorded, None if they can.
    """
    pending = state.approvals.pending
    document: dict[str, Any] = {
        "state": state.machine,
        "mode": policy.mode,
        "policy": policy.name,
        "tier": tier,
        "step": state.step,
        "attempt": state.attempt,
        "world_size": state.job.world_size,
        "incidents": {"opened": state.history.opened, "open": _open(state.incident)},
        "approvals": [] if pending is None else [_request(pending, now_ns)],
        "silenced": {rule: text for rule in state.rules.silenced if (text := state.silence(rule))},
        "checkpoints_good": [checkpoint.id for checkpoint in state.checkpoints.good()][-3:],
        "budgets": state.ledger.usage(policy.budgets, state.frame_count, state.at_ns),
        "rules": rule_scope.rule_states(policy, state),
        "ranks": {
            str(rank): {
                "pid": view.pid,
                "phase": view.phase,
                "silent_s": round((now_ns - view.seen_ns) / 1e9, 1),
                "overhead": overhead(state, rank),
                **view.document,
            }
            for rank, view in sorted(ranks.items())
        },
        "last_decision": None if last is None else {"kind": last.kind, "reason": last.reason},
        "cpu_wait": cpu_wait(state),
        "updated_wall": wall,
    }
    if state.job.failures:
        document["failures"] = [failure.text for failure in state.job.failures_by_cause[:FAILURES]]
    if cause := state.job.cause:
        document["ended_by"] = {"text": cause.text, "class": cause.cls, "means": cause.title}
    if awaited := _awaited(policy, state):
        document["waits_for"] = awaited
    if trouble is not None:
        document["trouble"] = trouble
    return document


def cpu_wait(state: State) -> float:
    """Return the percentage of the time that the job lately waited for CPUs that others had."""
    return max((m.value("host_cpu_wait") or 0.0 for m in state.monitors.values()), default=0.0)


def overhead(state: State, rank: int | None = None) -> float | None:
    """Return the share of a step that the probe of a rank, else the leading one, took lately."""
    leader = state.leader() if rank is None else rank
    monitor = None if leader is None else state.monitors.get(leader)
    return None if monitor is None else monitor.value("probe_overhead_frac")


def _open(incident: Incident | None) -> dict[str, Any] | None:
    """Return the summary of the open incident."""
    if incident is None:
        return None
    return {
        "id": incident.id,
        "severity": incident.severity,
        "phase": incident.phase,
        "rules": list(incident.rules),
        "headline": incident.headline,
        "runbook": incident.run.runbook.name if incident.run is not None else None,
        "acked": incident.acknowledged_by,
    }


def _awaited(policy: Policy, state: State) -> str:
    before_step = checkpoint_choice.needed_before(policy, state)
    awaited = checkpoint_choice.awaited(policy, state)
    if before_step is None or awaited is None:
        return ""
    for_s = (state.at_ns - awaited.since_ns) / 1e9
    remaining = "" if awaited.candidates is None else f", {awaited.candidates} to verify"
    return f"a verified checkpoint from before step {before_step} (for {for_s:.0f} s{remaining})"


def _request(pending: ApprovalRequest, now_ns: int) -> dict[str, Any]:
    """Return an approval request and its remaining time in seconds."""
    return {
        "id": pending.id,
        "incident": pending.incident,
        "runbook": pending.runbook,
        "steps": [{"verb": step.verb, "args": dict(step.args)} for step in pending.plan],
        "args_sha256": pending.sha,
        "left_s": round(max(0.0, (pending.deadline_ns - now_ns) / 1e9)),
        "on_timeout": pending.on_timeout,
    }


def no_probe(marks: Collection[str], reason: str | None) -> str | None:
    """Return why no step was seen, from the probe's marks; None: the probe has reported it.

    Args:
        marks: names of the probe's marks (`boot`, `armed`, `off`).
        reason: why no step was expected, None if one was.
    """
    if "off" in marks:
        return None
    if reason is not None:
        cause = reason
    elif "armed" in marks:
        cause = "the job imported torch, but made no optimizer step"
    elif "boot" in marks:
        cause = "the job runs Python, but has not imported torch"
    else:
        cause = "the probe was not loaded: no Python with our PYTHONPATH was started"
    return f"no step was seen: {cause}; only exit and signals are watched"
