"""Which channel gets what, and when: routes and quiet hours."""

from datetime import UTC, datetime

import pytest

from supervise.notifiers import Route
from tests.support.waiting import wait_until

from .senders import FakeSender, message

EVENING, NIGHT = datetime(2026, 1, 5, 20, 59, tzinfo=UTC), datetime(2026, 1, 5, 21, 0, tzinfo=UTC)
BERLIN = (22 * 60, 7 * 60, "Europe/Berlin")


@pytest.mark.parametrize(
    ("route", "fields", "taken"),
    [
        (Route(), {}, True),
        (Route(kinds=("opened", "closed")), {"kind": "closed"}, True),
        (Route(kinds=("opened", "closed")), {"kind": "action"}, False),
        (Route(rules=("ranks.*", "hang.*")), {"rules": ("loss.a", "hang.stuck")}, True),
        (Route(rules=("ranks.*",)), {"rules": ("hang.stuck",)}, False),
        (Route(rules=("ranks.*",)), {"kind": "watcher"}, False),
    ],
)
def test_a_channel_gets_the_kinds_and_rules_it_names(outbox, route, fields, taken):
    sender = FakeSender()
    box = outbox(sender, routes={"fake": route})

    assert box.post(message("m", "SEV1", "inc-1", **fields), key="k") == taken


@pytest.mark.parametrize(
    ("now", "left_s"),
    [
        (EVENING, 0.0),
        (NIGHT, 9 * 3600.0),
        (datetime(2026, 1, 6, 5, 59, 30, tzinfo=UTC), 30.0),
        (datetime(2026, 1, 6, 6, 0, tzinfo=UTC), 0.0),
        (datetime(2026, 7, 5, 20, 0, tzinfo=UTC), 9 * 3600.0),  # summer time
    ],
)
def test_quiet_hours_are_those_of_a_place(now, left_s):
    assert Route(quiet=BERLIN).quiet_left_s(now) == left_s
    day = Route(quiet=(9 * 60, 17 * 60, "UTC"))
    assert day.quiet_left_s(NIGHT.replace(hour=16)) == 3600.0 and not day.quiet_left_s(NIGHT)


def test_what_is_below_sev1_waits_for_the_end_of_quiet_hours(outbox):
    """As one digest; a page and a request do not wait. The end of the run ends them, too."""
    now, sender = [NIGHT], FakeSender()
    box = outbox(sender, routes={"fake": Route(quiet=BERLIN)}, wall=lambda: now[0])
    box.post(message("odd", "SEV2", "inc-1", kind="opened"), key="a")
    box.post(message("fine", "INFO"), key="b")
    wait_until(lambda: box.backlog()["fake"].held == 2)
    box.post(message("worse", "SEV1", "inc-1"), key="c")
    box.post(message("approve?", "SEV2", "inc-2", kind="approval"), key="d")
    wait_until(lambda: len(sender.sent) == 2)
    now[0] = EVENING
    box.post(message("day", "SEV1"), key="e")

    wait_until(lambda: len(sender.sent) == 4)
    assert sorted(sender.titles[:2]) == ["approve?", "worse"]
    assert sorted(sender.titles[2:]) == ["day", "digest of 2 messages"]

    now[0] = NIGHT
    box.post(message("odd", "SEV2"), key="f")
    wait_until(lambda: box.backlog()["fake"].held == 1)
    box.close()
    assert sender.titles[4:] == ["digest of 1 message"]
