"""Actions on the processes of the job: pause it, let it go on, or end it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action, Job, PlanContext, describe_usage, is_busy
from ..core.model.payload import EndArgs, Json, Payload
from ..core.model.values import Seconds
from ..errors import ActionError


@dataclass(frozen=True)
class Resume(Action):
    """Let the job go on from the step boundary where `pause` holds it.

    A resume that fails is the worst outcome of a runbook, since a paused job that nobody resumes
    burns its machines. So it is never refused beforehand, for any number of ranks.

    Example:
        - resume

    Undo: none; a later trouble pauses again.
    Source: the lease of `pause` is its twin: whoever may hold a job must also let it go.
    """

    deadline_s: ClassVar[float] = 30.0  # a paused job polls its mailbox, so the answer is quick

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("resume", args, key=key, deadline_s=self.deadline_s)
        if answer.get("resumed") is not True:
            raise ActionError(f"the job did not go on: {answer}", retryable=True)
        return answer


@dataclass(frozen=True)
class Pause(Action):
    """Pause training at the next step boundary; it continues by itself when the lease ends.

    The supervisor renews the pause while it lives, for `lease` in all. Without a renewal the job
    goes on by itself after 60 s, so that a supervisor that died or hangs strands no job. A runbook
    that is before its `resume` then fails.
    Signals are not used: a stopped process would trip the time-outs of its collectives.

    Example:
        - pause: {lease: 900s}

    Undo: resume.
    Source: 15 minutes are enough for a person to answer a page, and short beside a run of days.
    """

    changes_training: ClassVar[bool] = True  # one rank alone would leave the others in a collective
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    lease: Seconds = 900.0

    def find_errors(self) -> list[tuple[str, str]]:
        if not 10.0 <= self.lease <= 86400.0:
            return [("lease", f"must be between 10s and 24h, not {self.lease:g}s")]
        return []

    def plan(self, context: PlanContext) -> Payload:
        return Payload({"lease_s": self.lease})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("pause", args, key=key, deadline_s=self.deadline_s)
        if not isinstance(answer.get("paused_step"), int):
            raise ActionError(f"the probe answered pause without the step it holds at: {answer}")
        return answer

    def undo(self) -> Action | None:
        return Resume()


REQUEUE, HUMAN = 75, 78  # sysexits EX_TEMPFAIL and EX_CONFIG: what a scheduler can branch on


@dataclass(frozen=True)
class Stop(Action):
    """End the job: interrupt at a step boundary, then TERM, then KILL over the whole process tree.

    The interrupt is what Ctrl-C does, so the job's own `except`, `finally` and exit hooks run.
    After `grace` without an end comes TERM to every process of the tree, after `term` more KILL.
    With `if_idle` it first watches the job for that long, and refuses when the job works: one that
    uploads its results makes no steps either, and must not be killed for it. Where it answers a
    standstill, the interrupt is left out (a job that comes to a step boundary does not stand
    still), and any new frame before the TERM withdraws it.
    The supervisor then exits 78 (a person is needed), or 75 with `requeue`, which tells a scheduler
    that running it again is safe.

    Example:
        - stop: {grace: 30s, term: 30s, requeue: false, if_idle: 10s}

    Undo: none. Starting again is for the scheduler or a person.
    Source: Kubernetes' terminationGracePeriodSeconds and Slurm's KillWait are both 30 s.
    """

    destructive: ClassVar[bool] = True
    ends_job: ClassVar[bool] = True
    budget: ClassVar[str | None] = None  # it can happen once; a spent budget must not forbid it
    deadline_s: ClassVar[float] = 960.0  # covers the largest times that `check` allows

    grace: Seconds = 30.0
    term: Seconds = 30.0
    requeue: bool = False
    if_idle: Seconds = 0.0  # 0: stop it in any case

    def find_errors(self) -> list[tuple[str, str]]:
        return [
            (name, f"must be between 0s and 300s, not {value:g}s")
            for name in ("grace", "term", "if_idle")
            if not 0.0 <= (value := getattr(self, name)) <= 300.0
        ]

    def plan(self, context: PlanContext) -> Payload:
        times = {"grace_s": self.grace, "term_s": self.term}
        code = REQUEUE if self.requeue else HUMAN
        return Payload({**times, "exit_code": code, "if_idle_s": self.if_idle})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        order = args.parse(EndArgs)
        watched_s = order.if_idle_s
        if watched_s:
            work = job.work(watched_s)
            if is_busy(work, watched_s):
                works = describe_usage(work, watched_s)
                raise ActionError(f"the job makes no steps but works ({works}): not stopped")
        times = {"grace_s": order.grace_s, "term_s": order.term_s}
        answer = job.stop(**times, exit_code=order.exit_code)
        if answer.get("returncode") is None or answer.get("survivors"):
            raise ActionError(f"processes of the job are still alive after KILL: {answer}")
        return answer
