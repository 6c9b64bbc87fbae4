"""What the processor knows of a relaunch that is under way."""

from types import SimpleNamespace

import pytest

from supervise.actions import Relaunch
from supervise.core import ApprovalRequest, Incident, Intent, RunbookExecution
from supervise.core.model import OperatorCommand, Payload, Policy, Redactor, Runbook
from supervise.errors import ActionError
from supervise.notifiers import Outbox, Result
from supervise.runtime import EventProcessor

BOOK = Runbook("soften", (Relaunch(at_least=10),), ("relaunch",))


@pytest.fixture
def processor():
    """A processor whose engine waits for a relaunch to step 19, because of a breach at step 60."""
    settings = SimpleNamespace(
        metrics=None,
        policy=Policy("p", "sha256:0", "enforce", {}, ()),
        argv=(),
        run=None,
        reloader=None,
        redactor=Redactor(),
    )
    quiet = {"event": lambda _, **__: 1, "decision": lambda *_: 1}
    processor = EventProcessor(settings, SimpleNamespace(trouble=None, ended=False, **quiet))
    args = Payload({"checkpoint": "a", "step": 19})
    intent = Intent("inc-1/1/0-relaunch", BOOK.steps[0], "relaunch", args)
    run = RunbookExecution(1, BOOK, "SEV1", intent=intent)
    processor.state.incident = Incident("inc-1", 60, 60, "SEV1", ["spike"], run=run)
    return processor


def test_what_may_be_better_lies_between_the_order_and_the_trouble(processor):
    """As far from the first breach as the policy wants it, or from where an operator goes back."""
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
        ended=False,
        event=lambda event, **_: written.append(event.kind) or 1,
        decision=lambda *_: 1,
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
