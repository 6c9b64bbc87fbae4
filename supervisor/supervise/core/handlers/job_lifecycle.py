"""The life of the job's processes: started, noticed, ended, started again, over.

A job that ends by itself may be started again by the runbook that `job.on_crash` names. The run is
over when the job has ended and nothing is under way that would start another one.
"""

from __future__ import annotations

from ..incidents import approvals, closing, opening, pausing, withdrawal
from ..model import escalation
from ..model.decisions import ACTING_MODES
from ..model.events import Exited, Launched, Notice
from ..model.policy import HOLD, Policy, Runbook
from ..model.redaction import Redactor
from ..runbooks import checkpoint_choice, effect_verification, runner
from ..state import rule_scope
from ..state.incident import ACTING, HELD, Incident
from ..state.job_life import CALLED_OFF, JobLife, Restarts
from ..state.run_state import State, StepContext
from ..state.runbook_execution import RunbookExecution

# Signals that people and schedulers send: INT, TERM, HUP, USR1, as subprocess and shells tell them.
ASKED = frozenset(code for n in (2, 15, 1, 10) for code in (-n, 128 + n))
INTERRUPTED = (-2, 130)
# 125 is "never again" of s6, 64 to 78 are what sysexits.h has for wrong usage, and 75 there asks a
# scheduler for another turn: a job that says one of these knows better than we do.
MEANT = frozenset((125, *range(64, 79)))
HANGS = 2  # starts because it stood still, without going beyond the farthest; project default
IDLE_S = 10.0  # as in the runbook stop-and-page: one that works is left to a person
CRASHES = 3  # without going beyond the farthest of them, and no more starts; project default


def launched(turn: StepContext, event: Launched) -> None:
    """Others run in the place of processes that ended: what is known of those counts no more."""
    state, job = turn.state, turn.state.job
    job.returncode, job.ended, job.stays = None, False, ""
    job.launched = event.attempt
    if state.incident is not None:
        state.incident.deferred.over = ""  # it was taken back from a training that had just begun
    state.checkpoints.launched(event.attempt)
    for bank in state.banks.values():
        bank.leave()
    for verb in ("rollback", "portable"):  # of the process that is gone
        job.unable.pop(verb, None)
    if event.attempt:
        turn.record(
            "note",
            f"the job was started again as attempt {event.attempt}",
            what="launched",
            pid=event.pid,
        )


def noticed(turn: StepContext, event: Notice) -> None:
    """Take what was noticed about the watching, or about the job's checkpoints."""
    state, job = turn.state, turn.state.job
    turn.record(
        "note",
        event.message,
        what=event.kind,
        rank=event.rank,
        at_step=event.step,
        details=dict(event.data),
    )
    if event.kind == "suspended":  # silence meanwhile means nothing
        for bank in state.banks.values():
            bank.awake(event.at_ns)
    if event.kind == "shard":
        state.context.blame.named(event.rank, event.data.get("shards"))
    if event.kind == "signal" and event.data.get("final"):
        job.called_off = True
        job.interrupted |= bool(event.data.get("typed"))
        job.unable["relaunch"] = CALLED_OFF
        if job.returncode is not None and _relaunching(state) is not None:
            _ended(turn)
    if event.kind == "checkpoint":
        opening.checkpoint(state, event.data)
        runner.start_waiting(turn)  # perhaps what lacked one
    if event.kind in ("continuity", "resume-refused"):
        effect_verification.heard(turn, event)
    if event.kind == pausing.ENDED:
        pausing.ended(turn, event)
    if event.kind == "checkpoint-choice":
        checkpoint_choice.again(turn)
    verb, _, how = event.kind.rpartition("-")
    if how == "unavailable":  # rollback, relaunch; portable: savepoints for another process
        job.unable[verb] = event.message
        resume = (turn.policy.job.get("relaunch") or {}).get("resume")
        if verb == "rollback" and resume == "savepoint":
            job.unable["portable"] = event.message
    if event.kind in ("probe-off", "segment-fault"):
        for rank, bank in state.banks.items():
            bank.deaf |= event.rank is None or event.rank == rank
    _tell_people(turn, event)


def _tell_people(turn: StepContext, event: Notice) -> None:
    """Say to people what they have to know of it."""
    state, job = turn.state, turn.state.job
    if event.kind == "stopped":
        turn.notify("SEV2", event.message, verdict="nothing is done about it")
    if event.kind == "slow-start":
        turn.notify(
            "SEV2",
            event.message,
            verdict="it is not stopped while it does",
            then="`supervise stop RUN` if it should have begun by now",
        )
    if event.kind in ("orphans", "orphans-left"):
        gone = event.kind == "orphans-left"
        if gone:  # a start would end them first
            job.unable["relaunch"] = event.message
        turn.notify(
            "SEV1" if gone else "SEV2",
            event.message,
            verdict=str(event.data.get("verdict", "")),
            then=f"to end them: {event.data.get('end', '')}",
        )
    if event.kind in ("no-probe", "probe-off", "segment-fault"):
        turn.notify("SEV2", event.message, verdict="this run is not watched, or only in part")
    # Each rank reports the same, so people are told by one.
    if event.kind == "report" and event.rank == min(state.banks, default=event.rank):
        turn.notify("SEV2", event.message, verdict="rules that read these are not judged")


def exited(turn: StepContext, event: Exited) -> None:
    """The job's processes are gone; what is under way comes to its end before that is answered."""
    state, incident = turn.state, turn.state.incident
    state.job.returncode = event.returncode
    if incident is not None:
        incident.recovery.standing.clear()  # it ended with the process
    if _relaunching(state) is not None and not (state.job.called_off or _started(state)):
        turn.record("note", f"the job {_how(state.job)}, to be started again", what="relaunching")
    else:
        _ended(turn)


def _relaunching(state: State) -> str | None:
    """Return the id of the relaunch that is under way."""
    run = state.run()
    return run.intent.waiting_for if run is not None and run.intent.verb == "relaunch" else None


def _started(state: State) -> bool:
    """Return whether what the relaunch under way starts runs already, or did."""
    run = state.run()
    return run is not None and run.intent.args.get("attempt") == state.job.launched


def failed_start(state: State) -> bool:
    """Return whether the newest start came to nothing: no step of it was seen, and it failed.

    An end that was asked for, by a signal too, is no failure.
    """
    job = state.job
    seen = any(bank.attempt >= job.launched for bank in state.banks.values())
    asked = job.stopping or job.called_off or job.returncode in ASKED
    return bool(job.launched and job.returncode) and not (seen or asked)


def _ended(turn: StepContext) -> None:
    """The job has ended, and what is under way does not start it again."""
    state, relaunch = turn.state, _relaunching(turn.state)
    if relaunch is not None and state.job.called_off:
        turn.record(
            "abort",
            f"{relaunch} failed: the end of the job was asked for meanwhile",
            action={"id": relaunch},
        )
    approvals.settle(turn, "withdrawn", f"the job {_how(state.job)}")
    state.job.ended = True


def _how(job: JobLife) -> str:
    code = job.returncode or 0
    return f"ended with signal {-code}" if code < 0 else f"ended with code {code}"


def _given(policy: Policy) -> str:
    """Return what the policy gives a job that is started again: an error in it ends the job."""
    told = policy.job.get("relaunch") or {}
    words = [str(word) for word in told.get("args") or ()]
    parts = [f"job.relaunch.args {' '.join(Redactor().command(words))}"] if words else []
    parts += [f"job.relaunch.env {', '.join(told['env'])}"] if told.get("env") else []
    resume = told.get("resume", "args")
    parts += [f"job.relaunch.resume {resume}"] if resume != "args" or not parts else []
    return ", ".join(parts)


def crashed(job: JobLife) -> bool:
    """Return whether the job ended by itself and not as it, or anybody, meant to."""
    code = job.returncode
    meant = job.stopping or job.called_off or code in ASKED or code in MEANT
    return bool(code) and not meant


def _awaited(job: JobLife, run: RunbookExecution, name: str) -> bool:
    """Return whether the outcome of an action comes first: only one is performed at a time.

    Args:
        name: the runbook that is to follow, "" for none.
    """
    if run.intent.waiting_for is None or job.stopping or job.called_off:
        return False
    return bool(name) or not job.ended or "relaunch" in run.runbook.verbs[run.index :]


def _answer(turn: StepContext, name: str, text: str) -> None:
    """Start the runbook for a crash, unless a person is needed or it would only crash again."""
    state, incident, policy = turn.state, turn.state.incident, turn.policy
    job, crashes = state.job, state.job.restarts.crashes
    farthest = Restarts.farthest(crashes, state.step)
    if policy.mode not in ACTING_MODES:
        turn.record(
            "suppressed",
            f"{policy.mode}: would have run {name}",
            runbook=name,
            suppressed_by=f"mode:{policy.mode}",
        )
    elif incident is not None and incident.phase == HELD:
        job.stays = f"{incident.id} was held"
    elif state.step in crashes:
        job.stays = f"it ended at step {state.step} before, and made no progress"
    elif len(crashes) >= CRASHES:
        job.stays = f"it ended {CRASHES} times, and never went beyond step {farthest}"
    else:
        crashes.append(state.step)
        if incident is None:
            bank = next(iter(state.banks.values()), None)
            incident = opening.open_incident(turn, bank, "SEV1", text, breach=state.step + 1)
            incident.recovery.crashed = incident.breach_step
        elif incident.severity == "SEV2" and not rule_scope.against_weights(policy, incident):
            opening.crash(turn, incident, text)
        _, rung = escalation.entry(policy.ladder, name, -1)
        runner.start(turn, incident, name, rung, text)


def given_up(turn: StepContext, incident: Incident, name: str) -> bool:
    """Give up a job that stands still, where runbook `name` would only start it once more in vain.

    Its evidence is taken, and it is ended if it does nothing; where a person must be asked for
    that, it is held. Hangs may pass by themselves, so one more start is tried than for a crash.
    """
    policy, step, hangs = turn.policy, turn.state.step, turn.state.job.restarts.hangs
    if name == HOLD or "relaunch" not in policy.runbooks[name].verbs:
        return False
    farthest = Restarts.farthest(hangs, step)
    if len(hangs) < HANGS:
        hangs.append(step)
        return False
    why = f"it was started again {HANGS} times, and stands still without going beyond step "
    why += f"{farthest}"
    verbs = ("snapshot", "stop")
    if not set(verbs) <= set(policy.verbs):
        closing.hold(turn, incident, why)
        return True
    steps = policy.verbs["snapshot"](), policy.verbs["stop"](if_idle=IDLE_S)
    book = Runbook("give-up", steps, verbs)
    if approvals.gate(policy, incident, book) is not None:
        closing.hold(turn, incident, why)
        return True
    incident.escalation.runs += 1
    incident.run = RunbookExecution(incident.escalation.runs, book, incident.severity)
    incident.phase = ACTING
    incident.run.terms.reason = withdrawal.reason(policy, turn.state, incident)
    incident.headline += f"; {why}"
    turn.move("run", f"given up: {why}")
    turn.notify(
        incident.severity,
        f"{incident.id}: given up",
        verdict=why,
        news=True,
        then="evidence is taken, and the job is ended if it does nothing",
    )
    runner.proceed(turn, incident)
    return True


def conclude(turn: StepContext) -> None:
    """The run is over when the job has ended and nobody is about to start another one."""
    state, incident, job = turn.state, turn.state.incident, turn.state.job
    name = str(turn.policy.job.get("on_crash") or "") if job.ended and crashed(job) else ""
    run = state.run()
    if job.over or (run is not None and _awaited(job, run, name)):
        return
    failed = failed_start(state)
    how, where = f"the job {_how(job)}", f" at step {state.step}"
    if failed:
        how, where = f"started again with {_given(turn.policy)}, {how} before its first step", ""
    if job.ended:
        job.ended, job.stays = False, ""
        if failed:
            turn.record("verify", how, what="failed")
        if incident is not None:
            incident.run = None  # nothing can be verified any more
        if name:
            _answer(turn, name, how + where)
    incident = state.incident
    if incident is not None and (incident.run is not None or state.approvals.pending):
        return
    job.over = True
    why = f"not started again: {job.stays}" if job.stays else ""
    if incident is not None:
        then = closing.NOTHING if job.returncode == 0 else "look at what it left"
        closing.close(turn, incident, f"{how}; {why}" if why else how, then)
    turn.move("exited", f"{how}; {why}" if why else how)
    if job.stopping:
        by = job.stopped_by
        about = incident.headline if incident is not None and by == "policy" else ""
        turn.notify(
            "SEV1", f"stopped by {by} at step {state.step}", verdict=how, why=about, news=True
        )
    elif job.returncode == 0:
        turn.notify("INFO", f"finished at step {state.step}", news=True)
    elif job.interrupted and job.returncode in INTERRUPTED:
        turn.notify("INFO", f"interrupted at step {state.step}", verdict=how, news=True)
    elif failed:
        title = f"the job was started again, and {_how(job)} before its first step"
        turn.notify(
            "SEV1",
            title,
            verdict=why,
            why=f"it was started with {_given(turn.policy)}",
            then="look at its last output, and at job.relaunch",
            news=True,
        )
    else:
        turn.notify("SEV1", how + where, verdict=why, then="look at its last output", news=True)
