import json

import pytest

from supervise.notifiers import PagerDutySender

KEY = "R0UT1NGK3Y"


@pytest.fixture
def sent(hook, message):
    """A function that sends a message and returns the event."""

    def send(**fields):
        PagerDutySender(KEY, hook.url).send(message(**fields), key="run-1:7")
        return json.loads(hook.requests[-1][2])

    return send


@pytest.mark.parametrize(
    ("fields", "action", "dedup"),
    [
        ({}, "trigger", "run-1:inc-1:SEV1"),
        ({"kind": "updated", "incident_severity": "SEV0"}, "trigger", "run-1:inc-1:SEV0"),
        ({"kind": "finished", "severity": "SEV0"}, "trigger", "run-1:inc-1:SEV0"),
        ({"kind": "finished", "incident": None}, "trigger", "run-1:end"),
        ({"kind": "watcher", "incident": None}, "trigger", "run-1:7"),
    ],
)
def test_an_incident_is_an_alert_per_severity(sent, fields, action, dedup):
    """What is worse pages again, also those who acknowledged it; a failed end leaves it open."""
    event = sent(**fields)

    assert (event["event_action"], event["dedup_key"]) == (action, dedup)
    assert event["routing_key"] == KEY
    severity = "critical" if fields.get("severity") == "SEV0" else "error"
    assert event["payload"]["severity"] == severity


@pytest.mark.parametrize(
    ("fields", "action"),
    [
        ({"kind": "updated", "acknowledged_by": "anna"}, "acknowledge"),
        ({"kind": "closed", "severity": "INFO"}, "resolve"),
    ],
)
def test_all_alerts_of_an_incident_end(hook, message, fields, action):
    PagerDutySender(KEY, hook.url).send(message(**fields), key="run-1:7")

    events = [json.loads(body) for _, _, body in hook.requests]
    assert {event["event_action"] for event in events} == {action}
    assert [event["dedup_key"] for event in events] == [
        f"run-1:inc-1:SEV{number}" for number in range(3)
    ]
    assert not any("payload" in event for event in events)


def test_a_good_end_raises_nothing(hook, message):
    message = message(kind="finished", severity="INFO", incident=None)
    said = PagerDutySender(KEY, hook.url).send(message, key="k")

    assert "nothing sent" in said and hook.requests == []


def test_a_long_key_is_a_digest(sent):
    """PagerDuty takes 255 characters."""
    keys = {sent(run="r" * 300, incident=name)["dedup_key"] for name in ("inc-1", "inc-2")}

    assert len(keys) == 2 and {len(key) for key in keys} == {64}
