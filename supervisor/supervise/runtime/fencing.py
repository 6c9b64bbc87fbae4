"""Commands to the ranks of a job, all of which act at one step, and the lease of a pause.

A command for several ranks is carried out by all of them at one step, or by none. The supervisor
picks a step S that no rank has passed, right behind where each says that it is, and asks every rank
for a promise not to pass it without a verdict. With the promises of all, and where they mean the
same step by its number, it decides "commit", else "abort"; `supervise_probe.ipc.fences` writes the
verdict. A rank that had passed S vetoes, and a later S is picked. A commit that not every rank
carried out is never repaired by a second command: the ranks differ, and the error says so
(`ActionError.inconsistent`).

The ranks compare their newest boundaries to know that they mean the same step. Every rank of the
default group takes part in each of its collectives, so a number of them that grows is a proof. A
number that stays the same proves nothing: the ranks of a pipeline send to each other, those of a
mesh have groups of their own, and processes that only share a launcher do neither. Then the times
count: ranks that wait for each other in each step are never a step apart.

A command on its way is shared between the performer's thread, which waits, and the main loop, which
sends it and files acks; both touch it under the condition of `controller`.

The probe continues a paused job when nobody has renewed its pause for `LEASE_S`. A thread of its
own renews it, since the main loop may wait for a disk; it reads no file and writes shared memory
only. It stops when the main loop has not run for `PATIENCE_S`, so a supervisor that hangs holds the
job for two minutes at most.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec import Struct

from supervise_probe.ipc import fences

from ..core.model.payload import Json, Outcome, Payload, RollbackArgs
from ..core.notices import JobStatus
from ..errors import ActionError, SuperviseError
from ..system import Thread
from .process_tree import EXITED
from .segment_reader import Ack, Segment

NONE = -1


class Wait(Struct, frozen=True):
    """The part of a result behind a fence that says how long the rank stood there."""

    wait_ms: float = 0.0


class Answer(Struct, frozen=True):
    """Answer of a rank that is asked to stand at a fence.

    Attributes:
        unfenceable: no command will fare better in this job.
        busy: with another fence. past: by how many steps the rank was past the step.
        step: at which it stands. boundaries: see `Boundary`. way: in which it would do it.
        steps: of its savepoints. undo: those before damaged moments with good weights.
    """

    unfenceable: bool | str = False
    busy: bool = False
    past: int | None = None
    step: int = -1
    boundaries: Sequence[tuple[int, int, int]] = ()
    way: str | None = None
    steps: Sequence[int] | None = None
    undo: Sequence[int] | None = None


class PendingCommand:
    """A command on its way: who was asked, who answered, who never will."""

    def __init__(self, verb: str, key: str, wakeup: threading.Condition) -> None:
        self.verb = verb
        self.key = key
        self.sent: dict[int, Segment] | None = None  # None until the main loop sent it
        self.answers: dict[int, Ack] = {}
        self.lost: dict[int, str] = {}  # rank -> why it will not answer
        self.refusal: str | None = None  # why it was not sent at all
        self.job_ended = False  # that is why
        self.withdrawn = False  # that is because the action is to ask nothing more of the job
        self.not_now = False  # that is because a rank is between its steps
        self.step = NONE  # at whose end all ranks do it; NONE: each when it can
        self._wakeup = wakeup

    def wait(self, timeout_s: float) -> dict[int, Ack]:
        """Wait until every rank answered or cannot; return the answers there are."""
        with self._wakeup:
            self._wakeup.wait_for(lambda: self.is_settled, timeout_s)
            return dict(self.answers)

    def refuse_after_end(self, returncode: int) -> None:
        """The job has ended: nobody will answer."""
        self.refusal, self.job_ended = f"{JobStatus.ENDED} ({describe_ending(returncode)})", True

    @property
    def is_settled(self) -> bool:
        """Whether every rank answered or cannot."""
        if self.refusal is not None:
            return True
        return self.sent is not None and self.sent.keys() <= self.answers.keys() | self.lost.keys()


def check_acknowledged(
    pending: PendingCommand, answers: Mapping[int, Ack], deadline_s: float
) -> None:
    """Raise `ActionError` unless every rank that was asked did it."""
    verb = pending.verb
    refused = [(rank, ack) for rank, ack in sorted(answers.items()) if not ack.ok]
    if refused:
        rank, refusal = refused[0]
        nowhere = len(refused) == len(pending.sent or {})
        refused_all = nowhere and all(ack.result.read(Outcome).refused for _, ack in refused)
        raise ActionError(f"rank {rank} refused {verb}: {refusal.error}", refused=refused_all)
    silent = sorted(set(pending.sent or {}) - set(answers))
    if pending.sent is None:
        reason, refused_all = pending.refusal or "the main loop is busy", pending.withdrawn
        failed = f"{verb} was not sent: {reason}"
        raise ActionError(failed, refused=refused_all, job_ended=pending.job_ended)
    if not silent:
        return
    reason = pending.refusal or "; ".join(
        pending.lost[rank] for rank in silent if rank in pending.lost
    )
    reason = reason or f"no answer within {deadline_s:g} s from rank {', '.join(map(str, silent))}"
    partly = f" after {len(answers)} of {len(pending.sent)} ranks did it: they may differ now"
    failed = f"{verb}: {reason}{partly if answers else ''}"
    raise ActionError(failed, job_ended=pending.job_ended)


def describe_ending(returncode: int) -> str:
    return f"exit code {returncode}" if returncode >= 0 else f"signal {-returncode}"


Boundary = Sequence[int]  # step, number of collectives by its end, CLOCK_MONOTONIC in ns


class Objection(NamedTuple):
    """Why a command is not carried out.

    Attributes:
        lasting: it is how this job is made, so no other command will fare better.
    """

    why: str
    lasting: bool = False


def find_step_mismatch(boundaries: Mapping[int, Sequence[Boundary]]) -> Objection | None:
    """Return which ranks do not mean the same step by its number, None where all do."""
    first, *others = sorted(boundaries)
    for rank in others:
        reason = _step_objection(first, boundaries[first], rank, boundaries[rank])
        if reason is not None:
            return reason
    return None


def _step_objection(
    first_rank: int, mine: Sequence[Boundary], rank: int, theirs: Sequence[Boundary]
) -> Objection | None:
    ours = {step: (number, time_ns) for step, number, time_ns in mine}
    their_steps = {step: (number, at_ns) for step, number, at_ns in theirs}
    common = sorted(ours.keys() & their_steps.keys())
    if not common:
        unknown = (
            f"nobody knows whether ranks {first_rank} and {rank} mean the same step by its number"
        )
        return Objection(unknown, lasting=not mine or not theirs)
    for step in common:
        if ours[step][0] != their_steps[step][0]:
            return Objection(
                f"by the end of step {step} rank {first_rank} had taken part in {ours[step][0]} "
                f"collectives of the job and rank {rank} in {their_steps[step][0]}: they do not "
                "mean the same step by its number",
                lasting=True,
            )
    if ours[common[0]][0] == ours[common[-1]][0]:
        return _compare_times(first_rank, ours, rank, their_steps, common)
    return None


def _compare_times(
    first_rank: int,
    ours: Mapping[int, tuple[int, int]],
    rank: int,
    their_steps: Mapping[int, tuple[int, int]],
    common: Sequence[int],
) -> Objection | None:
    """They share no collective: has each ended a step before the other ended the next one?"""
    steps = [step for step in common if step + 1 in common]
    apart = [
        step
        for step in steps
        if ours[step][1] > their_steps[step + 1][1] or their_steps[step][1] > ours[step + 1][1]
    ]
    if steps and not apart:
        return None
    fact = f"ranks {first_rank} and {rank} take part in no collective of the whole job"
    if not steps:
        return Objection(f"{fact}, and have made too few steps together to compare their times")
    return Objection(
        f"{fact}, and do not wait for each other: in {len(apart)} of {len(steps)} steps one was a "
        "whole step ahead",
        lasting=True,
    )


LEASE_S = 60.0
PATIENCE_S = 60.0  # a disk may freeze for half a minute, and the pause stays; project default
PER_LEASE = 3  # renewals: two may come late


class PauseLease:
    """Renews a pause. `beat` is for the main loop's thread, the others for any.

    Args:
        lease_s: how long the job stays held after a renewal.
        patience_s: how long the main loop may be away.
    """

    def __init__(self, lease_s: float = LEASE_S, patience_s: float = PATIENCE_S) -> None:
        self.lease_s = lease_s
        self._patience_ns = int(patience_s * 1e9)
        self._ranks: tuple[Segment, ...] = ()
        self._beat_ns = time.monotonic_ns()
        self._ended: threading.Event | None = None

    @property
    def is_held(self) -> bool:
        """Whether a pause is in force, as far as is known here."""
        return self._ended is not None

    def beat(self, now_ns: int, ranks: Iterable[Segment]) -> None:
        """The main loop comes round, and these are the job."""
        self._beat_ns, self._ranks = now_ns, tuple(ranks)

    def start_renewing(self, until_ns: int) -> None:
        """Renew from now on, up to `until_ns` (CLOCK_MONOTONIC) at most."""
        self.end()
        ended = self._ended = threading.Event()
        thread = Thread(target=self._renew, args=(until_ns, ended), name="lease", daemon=True)
        thread.start()

    def end(self) -> None:
        """Renew no longer; safe to repeat."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.set()

    def _renew(self, until_ns: int, ended: threading.Event) -> None:
        while not ended.is_set() and (now_ns := time.monotonic_ns()) < until_ns:
            if now_ns - self._beat_ns < self._patience_ns:
                for rank in self._ranks:
                    with suppress(SuperviseError, OSError):  # the poll tells of a broken segment
                        rank.lease(min(until_ns, now_ns + int(self.lease_s * 1e9)))
            ended.wait(self.lease_s / PER_LEASE)


WAIT_S = 5.0  # a rank stands at its fence for this long at most
FIRST_STEPS = 3  # buffers, streams and graphs of a job are made in them
VETOES = 4  # of ranks that were past it: each time `TRIP_GROWTH` times as long is left
TRIP_GROWTH = 4
APART = 3  # steps behind the fence by which a rank must have answered
# From the look at where the ranks are until the letter is written, at the first try; project
# default. Where a rollback follows, the steps meanwhile are lost; too short a time only costs a
# veto, which holds nobody up.
TRIP_S = 0.002
UNLIKELY = 0.02  # part of a step in which nobody ends one before the letter is there
LOOK_S = 0.05
OVER_S = 0.2  # for the answers of the others, once a rank has decided; project default
EXITED_S = 1.0  # for the answers of the others, once a rank has exited; project default
HELD_S = (
    2.0  # in a collective all the while: who stands at the fence is waited for; project default
)
OUTCOME_S = 10.0  # to carry it out, whatever is left of the deadline


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank is.

    Attributes:
        step: at whose end it last looked for commands. phase: of its newest beat. step_s: median
            time of its steps, 0.0 before two were seen.
        waits: it is in a collective. halted: why its process cannot answer, "" where it can.
    """

    step: int
    phase: str
    step_s: float
    waits: bool = False
    halted: str = ""


class CommandChannel(Protocol):
    """What this needs of the controller."""

    def send_command(
        self, verb: str, args: Payload, *, key: str, partly: bool = False, trip_s: float = TRIP_S
    ) -> PendingCommand: ...
    def expect_answers(self, verb: str, key: str) -> PendingCommand: ...
    def stop_waiting(self, pending: PendingCommand) -> None: ...
    def standing(self) -> dict[int, Standing]: ...


def carry_out_at_one_step(
    job: CommandChannel, directory: Path, verb: str, args: Payload, *, key: str, deadline_s: float
) -> Payload:
    """Let every rank carry out `verb` at one step; return what rank 0 observed.

    Besides `ranks`, `ack_step`, and `wait_ms`, the longest that a rank stood at the fence.

    Raises:
        ActionError: with `refused`, no rank has done anything; with `inconsistent`, some have;
            with `unfenceable`, no command will fare better in this job.
    """
    until = time.monotonic() + deadline_s
    expected = job.expect_answers(verb, key)  # before anybody can answer
    fence = Fence(job, directory, verb, args, key, until, expected)
    try:
        step = fence.settle_step()
        left_s = max(OUTCOME_S, until - time.monotonic())
        return _outcome(job, expected, step, left_s)
    finally:
        for pending in (expected, *fence.orders):
            job.stop_waiting(pending)


class Fence:
    """One command on its way to a verdict.

    Args:
        directory: of the verdicts. until: CLOCK_MONOTONIC in seconds. expected: what comes of it.
    """

    def __init__(
        self,
        job: CommandChannel,
        directory: Path,
        verb: str,
        args: Payload,
        key: str,
        until: float,
        expected: PendingCommand,
    ) -> None:
        self._job, self._directory = job, directory
        self._verb, self._args, self._key, self._until = verb, args, key, until
        self._expected = expected
        self._name = hashlib.sha256(key.encode()).hexdigest()[:16]
        self._round = self._vetoes = 0
        self._held_s = math.inf  # since when ranks that stand there are waited for
        self._trip_s = TRIP_S
        self.orders: list[PendingCommand] = []  # for `stop_waiting`, once the outcome is there
        self._silent: set[int] = set()  # ranks past it that had not answered, at the newest look
        self._is_passed = False  # by a rank that did not hear of it in time

    def settle_step(self) -> int:
        """Return the step at which all ranks carry it out.

        Raises:
            ActionError: they do not.
        """
        while True:
            path = self._path()
            stands = self._read(path)
            if stands is None:
                stands = self._propose(path)
            elif stands.decision == fences.COMMIT:  # of a supervisor before us
                order = Payload({"key": self._key})
                self.orders.append(
                    self._job.send_command("outcome", order, key=f"{self._key}/outcome")
                )
            if stands is not None and stands.decision == fences.COMMIT:
                return stands.step
            self._round += 1

    def _propose(self, path: str) -> fences.Verdict | None:
        """Return the verdict; None where a rank had passed the step, and another is to be tried."""
        fields: dict[str, Json] = {
            "id": path.rpartition(fences.PREFIX)[2],
            "wait_s": WAIT_S,
            "key": self._key,
            "verb": self._verb,
            "args": dict(self._args),
            "until_ns": int(self._until * 1e9),
        }
        asked = self._ask(Payload(fields), path)
        if asked is None:
            return None
        pending, answers = asked
        step = pending.step
        objection = self._objection(pending, answers)
        promises = [ack.result.read(Answer) for ack in answers.values()]
        if objection is None:
            step = promises[0].step  # of a supervisor before us, maybe
            try:
                agreed = agree_on_step(self._verb, self._args, promises)
            except ActionError as error:
                objection = Objection(str(error))
                self._decide(path, fences.ABORT, objection.why, step)
            else:
                # Not who was there at first: ranks may have come or begun anew since.
                self._expected.sent, self._expected.lost = dict(pending.sent or {}), {}
                stands = self._decide(path, fences.COMMIT, "", step, agreed)
                if stands.decision == fences.COMMIT:
                    return stands
                objection = Objection(stands.why)
        else:
            self._decide(path, fences.ABORT, objection.why, step)
        document = self._read(path)  # the answer of who wrote it may be late, or the main loop
        is_past = document is not None and "past" in document.args
        is_past = is_past or any(promise.past is not None for promise in promises)
        if (is_past or self._is_passed) and self._vetoes < VETOES:
            self._vetoes += 1
            self._trip_s *= TRIP_GROWTH
            return None
        if any(promise.busy for promise in promises):
            time.sleep(LOOK_S)  # with a fence of a supervisor before us, which ends by itself
            if time.monotonic() < self._until:
                return None
        self._decide(path, fences.ABORT, objection.why, step)
        raise ActionError(
            f"{self._verb} is not carried out by any rank: {objection.why}",
            refused=True,
            unfenceable=objection.why if objection.lasting else "",
        )

    def _ask(self, order: Payload, path: str) -> tuple[PendingCommand, dict[int, Ack]] | None:
        """Return the order as it was sent, and the answers to it; None where ranks that were asked
        by a supervisor before us have ended this round.

        Raises:
            ActionError: ranks could not be asked, all the time.
        """
        while True:
            key = f"{self._key}/{self._round}"  # the next supervisor looks for its verdict
            pending = self._job.send_command("fence", order, key=key, trip_s=self._trip_s)
            try:
                answers = self._promises(pending, path)
            finally:
                self._job.stop_waiting(pending)
            if not pending.not_now:
                return pending, answers
            if time.monotonic() >= self._until:
                raise ActionError(f"{self._verb} was not sent: {pending.refusal}", refused=True)
            time.sleep(LOOK_S)
            if self._read(path) is not None:
                return None

    def _promises(self, pending: PendingCommand, path: str) -> dict[int, Ack]:
        """Wait until every rank has answered, or the fence is over without some of them."""
        answers: dict[int, Ack] = {}
        over_s: float | None = None
        self._held_s, self._silent, self._is_passed = math.inf, set(), False
        while not pending.is_settled and time.monotonic() < self._until:
            answers = pending.wait(LOOK_S)
            if self._are_held(pending, answers) or self._find_passed(pending):
                break
            if over_s is None and self._read(path) is not None:
                over_s = time.monotonic() + OVER_S  # the others answer at their next step
            if over_s is not None and time.monotonic() > over_s:
                break
        return pending.wait(0.0) or answers

    def _are_held(self, pending: PendingCommand, answers: Mapping[int, Ack]) -> bool:
        """Return whether all that have not answered wait in a collective for those that stand at
        the fence: then the end of a step of these is not one of those."""
        silent = set(pending.sent or ()) - set(answers)
        if not silent or not answers or not all(ack.ok for ack in answers.values()):
            return False
        ranks = _look(self._job)
        stand = all(r in ranks and ranks[r].step >= _step(a) for r, a in answers.items())
        wait = all(r in ranks and ranks[r].waits and not ranks[r].halted for r in silent)
        if not stand or not wait:
            self._held_s = math.inf
            return False
        self._held_s = min(self._held_s, time.monotonic())
        return time.monotonic() - self._held_s > HELD_S

    def _find_passed(self, pending: PendingCommand) -> bool:
        """Return whether a rank has ended the step before it heard of the fence, twice in a row.

        In its next step it may wait for those that stand there: it cannot veto before they go on.
        """
        if pending.step == NONE or pending.is_settled:
            return False
        ranks = _look(self._job)
        silent = set(pending.sent or ()) - set(pending.wait(0.0))
        moving = {r for r in silent if r in ranks and ranks[r].phase != "paused"}
        before, self._silent = self._silent, {r for r in moving if ranks[r].step >= pending.step}
        self._is_passed = not before.isdisjoint(self._silent)
        return self._is_passed

    def _objection(self, pending: PendingCommand, answers: Mapping[int, Ack]) -> Objection | None:
        """Return why not all ranks have promised, None where all have and mean the same step."""
        if pending.sent is None:
            return Objection(pending.refusal or "the main loop is busy")
        refused = [(rank, ack) for rank, ack in answers.items() if not ack.ok]
        if refused:
            rank, ack = refused[0]
            lasting = ack.result.read(Answer).unfenceable is True
            return Objection(f"rank {rank}: {ack.error}", lasting)
        silent = sorted(set(pending.sent) - set(answers))
        if silent:
            missing = _absentees(silent, pending, _look(self._job), "promise")
            stands = self._read(self._path())
            if stands is not None:
                missing = f"{missing}, and {stands.why}"
            elif time.monotonic() - self._held_s > HELD_S:
                rank_list = ", ".join(map(str, sorted(answers)))
                return Objection(
                    f"rank {', '.join(map(str, silent))} waits in a collective for what rank "
                    f"{rank_list} does only behind the end of its step",
                    lasting=True,
                )
            return Objection(missing)
        if len({_step(ack) for ack in answers.values()}) > 1:
            return Objection("they have promised to wait at different steps")
        return find_step_mismatch(
            {r: ack.result.read(Answer).boundaries for r, ack in answers.items()}
        )

    def _path(self) -> str:
        return fences.verdict_path(str(self._directory), f"{self._name}-{self._round}")

    def _read(self, path: str) -> fences.Verdict | None:
        try:
            return fences.read_verdict(path)
        except (OSError, ValueError, KeyError) as error:
            raise ActionError(f"the verdict of a fence cannot be read: {error}") from error

    def _decide(
        self,
        path: str,
        decision: str,
        reason: str,
        step: int,
        args: Mapping[str, int] | None = None,
    ) -> fences.Verdict:
        try:
            return fences.decide_fence(path, decision, reason, step, dict(args or {}))
        except (OSError, ValueError, KeyError) as error:
            raise ActionError(f"nobody can decide on a fence: {error}", refused=True) from error


def _look(job: CommandChannel) -> dict[int, Standing]:
    """Return where ranks are; nothing while the main loop is busy, as with a slow disk."""
    try:
        return job.standing()
    except ActionError:
        return {}


def _step(promise: Ack) -> int:
    return promise.result.read(Answer).step


def agree_on_step(verb: str, args: Payload, promises: Sequence[Answer]) -> dict[str, int]:
    """Return `to_step`, where all ranks roll back to; nothing for another verb.

    Raises:
        ActionError: there is nothing that all can do.
    """
    ways = {promise.way for promise in promises if promise.way is not None}
    if len(ways) > 1:
        raise ActionError(f"they would do it in different ways: {', '.join(sorted(ways))}")
    if verb != "rollback":
        return {}
    common = set.intersection(*(set(promise.steps or ()) for promise in promises))
    undo = set.intersection(*(set(promise.undo or ()) for promise in promises))
    order = args.parse(RollbackArgs)
    before_step = order.before_step
    before_sign = max(order.sign or 0, before_step)
    older = [step for step in common if step < (before_sign if step in undo else before_step)]
    if not older:
        raise ActionError(f"there is no savepoint before step {before_step} that all ranks have")
    return {"to_step": max(older)}


def explain_unready(ranks: Mapping[int, Standing], world_size: int) -> str:
    """Return which rank cannot be fenced just now, and why; "" where all can."""
    if len(ranks) < world_size:
        return f"{world_size - len(ranks)} of {world_size} ranks have no probe attached"
    for rank, standing in sorted(ranks.items()):
        if _is_away(standing):
            return f"rank {rank} is in {standing.phase}"
        if standing.step < FIRST_STEPS or (not standing.step_s and standing.phase == "step"):
            return f"rank {rank} is in its first steps"
    if len({standing.phase for standing in ranks.values()}) > 1:
        paused = sorted(rank for rank, standing in ranks.items() if standing.phase == "paused")
        return f"only rank {', '.join(map(str, paused))} is paused"
    return ""


def common_step(ranks: Mapping[int, Standing], trip_s: float) -> int:
    """Return the step at whose end all ranks will have read a letter that is written now.

    In a pause it is the one at whose end they stand. NONE where the phases of ranks differ, one
    neither trains nor is paused, or the time of its steps is not known.

    Args:
        ranks: where they are at this moment: a rank reads the letter at the end of the step that
            it is in. trip_s: the letter is written within that time.
    """
    phases = {standing.phase for standing in ranks.values()}
    farthest = max((standing.step for standing in ranks.values()), default=NONE)
    fastest_s = min((standing.step_s for standing in ranks.values()), default=0.0)
    if phases == {"step"} and fastest_s > 0.0:
        return farthest + 1 + math.ceil(trip_s / fastest_s - UNLIKELY)
    return farthest if phases == {"paused"} else NONE


def _is_away(rank: Standing) -> bool:
    return rank.phase not in ("step", "paused")


def _absentees(
    silent: Sequence[int], pending: PendingCommand, ranks: Mapping[int, Standing], action: str
) -> str:
    """Return which ranks keep the silent ones from what they were to do.

    One that has answered and then died or stopped is waited for by those that have not.
    """
    lost_texts = list(pending.lost.values())
    lost_texts += [
        f"rank {rank} {ranks[rank].halted}"
        for rank in sorted(pending.sent or ())
        if rank not in pending.lost and rank in ranks and ranks[rank].halted
    ]
    if lost_texts:
        return "; ".join(lost_texts)
    away = [f"rank {r} is in {ranks[r].phase}" for r in silent if r in ranks and _is_away(ranks[r])]
    if away:
        return f"{'; '.join(away)} and did not {action}"
    busy = [rank for rank in silent if rank in ranks and not ranks[rank].waits]
    names = ", ".join(map(str, busy or silent))
    return f"rank {names} did not {action}"


def _outcome(job: CommandChannel, expected: PendingCommand, step: int, left_s: float) -> Payload:
    """Wait for what every rank did at the fence."""
    until = time.monotonic() + left_s
    behind: list[int] = []  # ranks that were past it at the look before: their answers are filed
    while not expected.is_settled and time.monotonic() < until:
        expected.wait(LOOK_S)
        ranks = _look(job)
        answers = expected.wait(0.0)
        if any(rank not in answers for rank in behind):
            break
        behind = [r for r, standing in ranks.items() if standing.step >= step + APART]
        if any(standing.halted == EXITED for standing in ranks.values()):  # the others wait for it
            until = min(until, time.monotonic() + EXITED_S)
    answers = expected.wait(0.0)
    try:
        check_acknowledged(expected, answers, left_s)
        for rank, ack in answers.items():
            if ack.step != step:
                raise ActionError(f"rank {rank} did it at step {ack.step}, not at {step}")
    except ActionError as error:
        if error.refused:
            raise
        reason = str(error)
        silent = sorted(set(expected.sent or {}) - set(answers))
        if silent:
            missing = _absentees(silent, expected, _look(job), "answer")
            reason = f"{expected.verb} was decided on, and {missing}"
        if not any(ack.ok for ack in answers.values()):
            raise ActionError(f"{reason}: no rank is known to have done it") from error
        reason = f"the ranks differ from step {step} on: {reason}"
        raise ActionError(reason, inconsistent=True) from error
    if not answers:
        raise ActionError(f"{expected.verb} was decided on, and no rank has a probe attached")
    longest = max(ack.result.read(Wait).wait_ms for ack in answers.values())
    result = answers[min(answers)].result
    return result.extended(ranks=len(answers), ack_step=step, wait_ms=longest)
