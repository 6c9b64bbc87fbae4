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


def test_what_is_milder_opens_no_alert_of_its_own(hook, message):
    """A person is needed for a SEV2: that is said as SEV1, and its diagnosis as SEV2 again."""
    sender = PagerDutySender(KEY, hook.url)
    for severity, kind in (("SEV1", "held"), ("SEV2", "updated"), ("SEV0", "updated")):
        sender.send(message(kind=kind, severity=severity), key="run-1:7")
    sender.send(message(severity="SEV2", incident="inc-2"), key="run-1:8")

    keys = [json.loads(body)["dedup_key"] for _, _, body in hook.requests]
    alerts = ["inc-1:SEV1", "inc-1:SEV1", "inc-1:SEV0", "inc-2:SEV2"]
    assert keys == [f"run-1:{alert}" for alert in alerts]


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
