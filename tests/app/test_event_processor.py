"""The event processor during a relaunch, and what it passes to the guard."""

from operator import attrgetter
from types import SimpleNamespace

import pytest

from supervise.actions import Relaunch
from supervise.core import ApprovalRequest, Incident, Intent, RunbookExecution, initial_state
from supervise.core.model import (
    Announced,
    Frame,
    JobSettings,
    Notice,
    OperatorCommand,
    Payload,
    Policy,
    Redactor,
    Runbook,
)
from supervise.errors import ActionError
from supervise.notifiers import Outbox, Result
from supervise.runtime import EventProcessor, forward_save, may_come_back, run_position

POLICY = Policy("p", "sha256:0", "enforce", {}, ())
BOOK = Runbook("soften", (Relaunch(at_least=10),), ("relaunch",))


@pytest.fixture
def processor():
    settings = SimpleNamespace(
        metrics=None,
        run=SimpleNamespace(id="run"),
        reloader=None,
        argv=(),
        policy=POLICY,
        redactor=Redactor(),
    )
    quiet = {"record_event": lambda _, **__: 1, "record_decision": lambda *_: 1}
    processor = EventProcessor(
        settings, SimpleNamespace(trouble=None, has_journal_ended=False, **quiet)
    )
    args = Payload({"checkpoint": "a", "step": 19})
    intent = Intent("inc-1/1/0-relaunch", BOOK.steps[0], "relaunch", args)
    run = RunbookExecution(1, BOOK, "SEV1", intent=intent)
    processor.state.incident = Incident("inc-1", 60, 60, "SEV1", ["spike"], run=run)
    return processor


def test_what_may_be_better_lies_between_the_order_and_the_trouble(processor):
    assert processor.candidate_steps() == (19, 50)
    processor.state.incident.run.requested.before_step = 40
    assert processor.candidate_steps() == (19, 30)


def test_a_relaunch_that_people_approved_or_nobody_waits_for_looks_for_no_other(processor):
    """Its deadline is over, or the end of the run was asked for."""
    execution = processor.state.incident.run
    execution.terms.approved = [{"verb": "relaunch", "args": {}}]
    assert processor.candidate_steps() is None
    execution.intent.action_id = None

    for question in (processor.candidate_steps, processor.choose_checkpoint):
        with pytest.raises(ActionError, match="nobody waits"):
            question()


def test_an_operator_who_said_stop_is_not_answered_by_a_start(processor):
    """The word waits for the end of the relaunch, in which the job is dead."""
    processor.raise_if_stopped()
    wanted = [OperatorCommand(1, "anna", "resume", {}), OperatorCommand(2, "bob", "stop", {})]
    processor.state.incident.deferred.commands = wanted

    with pytest.raises(ActionError, match="bob said stop"):
        processor.raise_if_stopped()
    processor.state.incident = None
    processor.raise_if_stopped()


def test_the_time_to_answer_begins_with_the_delivery(processor):
    """It is journaled, so that replay comes to the same; before the result, which a crash loses."""
    written = []
    processor.recorder = SimpleNamespace(
        trouble=None,
        has_journal_ended=False,
        record_event=lambda event, **_: written.append(event.kind) or 1,
        record_decision=lambda *_: 1,
        note=lambda kind, *_: written.append(kind),
    )
    processor.open(None, Outbox([], processor.on_result))
    pending = ApprovalRequest(
        *("ask-1", "inc-1", "soften", 0, "", False, "SEV1", [], "sha", "policy"),
        *(0, 900.0, 4_500_000_000_000, "deny"),
    )
    processor.state.approvals.pending = pending
    processor.on_result(Result("slack", ("run:1",), False, "500", 9, "ask-1"))
    processor.record_results()
    assert not pending.delivered

    for _ in range(2):
        processor.on_result(Result("slack", ("run:1",), True, "delivered", 9, "ask-1"))
    processor.record_results()

    assert pending.delivered
    result = "notify_result"
    assert written == [result, "approval-delivered", result, result]


def test_files_wait_for_an_action_that_has_just_begun(processor, monkeypatch):
    """To make them takes longer than several steps, which a rollback would lose."""
    flushed, now_ns, second = [], 5_000_000_000, 1_000_000_000
    monkeypatch.setattr("supervise.system.monotonic_ns", lambda: now_ns)
    begin = SimpleNamespace(poll=lambda: None, running=None, start=lambda *_, **__: None)
    processor.open(begin, Outbox([], processor.on_result))
    processor.recorder.limit_journal = lambda limit: None
    processor.incident_files = SimpleNamespace(flush=flushed.append)

    processor.collect_results()
    processor.resume_action()
    processor.collect_results()
    assert flushed == [5 * second] and processor.performing == "relaunch"
    now_ns = 6 * second
    processor.collect_results()
    assert flushed == [5 * second, 6 * second]


# ── what the guard is told of the run ─────────────────────────────────────────────────────────────


def test_the_guard_learns_the_first_step_of_each_attempt_that_went_back(processor, make_frames):
    """Also where the loop goes on with its count and the weights of step 4."""
    processor.recorder.note = lambda *_: None
    processor.process(Announced(1, 0, 1, 7, ("train_loss_raw", "grad_global_norm")))
    for first, attempt in ((0, 0), (7, 1), (9, 2)):
        if attempt == 2:
            origin = Payload({"attempt": 2, "to": 4, "path": ""})
            processor.process(Notice(2, "weights-restored", "", 0, 9, origin))
        for frame in make_frames(first, 1.0, 1.0, attempt=attempt):
            processor.process(frame)

    assert run_position(processor).first_steps == {1: 7, 2: 5}


@pytest.mark.parametrize(
    ("code", "mode", "on_crash", "change", "comes_back"),
    [
        (-9, "enforce", "restart", {}, True),
        (1, "approve", "restart", {}, True),
        (0, "enforce", "restart", {}, False),
        (143, "enforce", "restart", {}, False),
        (75, "enforce", "restart", {}, False),
        (1, "observe", "restart", {}, False),
        (1, "enforce", None, {}, False),
        (1, "enforce", "restart", {"job.stopping": True}, False),
        (1, "enforce", "restart", {"job.end_requested": True}, False),
        (1, "enforce", "restart", {"step": 7, "job.restarts.crashes": [7]}, False),
        (1, "enforce", "restart", {"job.unavailable": {"relaunch": "nobody said how"}}, False),
        (1, "enforce", "restart", {"incident": SimpleNamespace(is_held=True)}, False),
    ],
)
def test_nobody_waits_at_the_end_of_a_job_that_stays_ended(
    code, mode, on_crash, change, comes_back
):
    policy = Policy("p", "sha256:0", mode, {}, (), job=JobSettings(on_crash=on_crash))
    state = initial_state(policy)
    state.job.unavailable.clear()
    for path, value in change.items():
        part, _, name = path.rpartition(".")
        setattr(attrgetter(part)(state) if part else state, name, value)

    assert may_come_back(policy, state, code) is comes_back


def test_each_rank_counts_on_from_its_own_counters():
    """Rank 0 saves; rank 1 is in the next step already, 2 pads more, and 3 is read a step late."""
    names = ("step_time", "tokens_seen", "steps_seen")
    frames = [(1, 8, 90.0, 9.0), (2, 8, 88.0, 9.0), (1, 9, 100.0, 10.0), (2, 9, 98.0, 10.0)]
    frames += [(1, 10, 110.0, 11.0), (3, 8, 80.0, 9.0), (0, 8, 90.0, 9.0), (0, 9, 100.0, 10.0)]
    window = [(names, Frame(0, rank, 0, step, (0.1, *values))) for rank, step, *values in frames]
    own = {"tokens_seen": 100.0, "steps_seen": 10.0}
    notice = Notice(0, "checkpoint-saved", "", 0, 10, {"path": "/a.pt", "counters": own})
    saved = []

    forward_save(SimpleNamespace(on_save=saved.append), notice, window)

    two, three = ({**own, "tokens_seen": count} for count in (98.0, 90.0))
    assert saved[0].data["counters"] == {"all": own, "2": two, "3": three}
    assert saved[0].data["values"] == {"step_time": 0.1, **own}
