"""What the desk knows of a relaunch that is under way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from supervise.actions.relaunch import Relaunch
from supervise.app.event_processor import EventProcessor
from supervise.core.model.events import OperatorCommand
from supervise.core.model.policy import Policy, Runbook
from supervise.core.model.redaction import Redactor
from supervise.core.state.incident import Incident
from supervise.core.state.runbook_execution import Intent, RunbookExecution
from supervise.errors import ActionError

BOOK = Runbook("soften", (Relaunch(at_least=10),), ("relaunch",))


@pytest.fixture
def desk():
    """A desk whose engine waits for a relaunch to step 19, because of a breach at step 60."""
    settings = SimpleNamespace(
        policy=Policy("p", "sha256:0", "enforce", {}, ()),
        run=None,
        reloader=None,
        redactor=Redactor(),
    )
    quiet = {"event": lambda _: 1, "decision": lambda *_: 1}
    desk = EventProcessor(settings, SimpleNamespace(trouble=None, ended=False, **quiet))
    args = {"checkpoint": "a", "step": 19}
    intent = Intent("inc-1/1/0-relaunch", BOOK.steps[0], "relaunch", args)
    run = RunbookExecution(1, BOOK, "SEV1", intent=intent)
    desk.state.incident = Incident("inc-1", 60, 60, "SEV1", ["spike"], run=run)
    return desk


def test_what_may_be_better_lies_between_the_order_and_the_trouble(desk):
    """As far from the first breach as the policy wants it, or from where an operator goes back."""
    assert desk.range() == (19, 50)
    desk.state.incident.run.requested.before = 40
    assert desk.range() == (19, 30)


def test_what_people_approved_is_settled(desk):
    """Looking for another one would only keep the job dead for longer."""
    desk.state.incident.run.terms.approved = [{"verb": "relaunch", "args": {}}]

    assert desk.range() is None


def test_a_relaunch_that_nobody_waits_for_is_told_so(desk):
    """Its deadline is over, or the end of the run was asked for."""
    desk.state.incident.run.intent.action_id = None

    for question in (desk.range, desk.choose):
        with pytest.raises(ActionError, match="nobody waits"):
            question()


def test_an_operator_who_said_stop_is_not_answered_by_a_start(desk):
    """The word waits for the end of the relaunch, in which the job is dead."""
    desk.may_start()
    wanted = [OperatorCommand(1, "anna", "resume", {}), OperatorCommand(2, "bob", "stop", {})]
    desk.state.incident.deferred.commands = wanted

    with pytest.raises(ActionError, match="bob said stop"):
        desk.may_start()
    desk.state.incident = None
    desk.may_start()
