"""Pings for a monitor outside: what it hears of a run, and when it hears nothing."""

from __future__ import annotations

import threading

import pytest

from supervise.core.model import NotifyError
from supervise.notifiers import DeadManPing, Health, Vitals
from tests.support.waiting import wait_until

REFUSED = NotifyError("404", retry_after_s=None)


class Monitor:
    """A monitor and a run at a time of their own; `script` has what the next pings come to."""

    every_s = 60.0

    def __init__(self, *script: NotifyError | None) -> None:
        self.script = list(script)
        self.pings: list[str] = []
        self.texts: list[str] = []
        self.reported: list[str] = []
        self.now_s, self.progress_s, self.trouble = 1000.0, 1000.0, ""
        self.ping = DeadManPing(
            self, self.vitals, self.reported.append, look_s=0.01, monotonic=lambda: self.now_s
        )

    def send(self, kind: str, text: str) -> None:
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error
        self.pings.append(kind)
        self.texts.append(text)

    def vitals(self) -> Vitals:
        return Vitals("run-1: step 7, nominal", int(self.progress_s * 1e9), self.trouble)

    def after(self, seconds: float, *, progress: bool = True) -> list[str]:
        """Let time pass second by second; return the pings that were sent meanwhile."""
        before = len(self.pings)
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.progress_s = self.now_s if progress else self.progress_s
            self.ping.ping_if_due()
        return self.pings[before:]


def test_a_healthy_run_pings_at_its_interval():
    monitor = Monitor()

    assert monitor.after(180) == ["ping"] * 3
    assert monitor.texts[0] == "run-1: step 7, nominal"
    assert monitor.ping.health() == Health(60.0, 59.0)


def test_a_supervisor_without_progress_sends_nothing_until_it_has_some():
    """The silence is the alarm."""
    monitor = Monitor()
    monitor.after(10)

    assert monitor.after(300, progress=False) == []
    assert monitor.ping.health().withheld.endswith("no progress for 300 s")
    assert monitor.after(1) == ["ping"]


def test_an_uncontained_sev0_is_one_failure_at_once_and_then_silence():
    monitor = Monitor()
    monitor.after(10)
    monitor.trouble = "inc-1 SEV0 loss is NaN"

    assert monitor.after(300) == ["fail"]
    assert monitor.texts[-1].endswith("nominal; inc-1 SEV0 loss is NaN")
    monitor.trouble = ""
    assert monitor.after(1) == ["ping"]


def test_a_refused_ping_is_repeated_soon_and_reported_once():
    """A failure too: what was refused is not taken for reported."""
    monitor = Monitor(REFUSED, REFUSED)
    assert monitor.after(29) == []
    assert (monitor.ping.health().error, len(monitor.reported)) == ("404", 1)
    assert monitor.after(31) == ["ping"]
    assert monitor.ping.health().error == ""

    monitor.script, monitor.trouble = [REFUSED], "inc-1 SEV0"
    assert monitor.after(60) == ["fail"]


@pytest.mark.parametrize(("code", "last"), [(0, "ping"), (75, "ping"), (1, "fail"), (143, "fail")])
def test_a_run_reports_its_start_and_its_end(code, last):
    monitor = Monitor()
    monitor.ping.start(begins=True)
    wait_until(lambda: len(monitor.pings) == 2)
    monitor.ping.end(code, 5.0)

    assert monitor.pings == ["start", "ping", last]
    assert monitor.texts[-1].endswith(f"exit code {code}")


def test_a_monitor_that_does_not_answer_makes_nobody_wait():
    monitor, entered, go = Monitor(), threading.Event(), threading.Event()

    def hang(kind: str, text: str) -> None:
        entered.set()
        go.wait(120)

    monitor.send = hang
    monitor.ping.start(begins=False)
    assert entered.wait(60)
    monitor.ping.end(0, 0.05)

    assert monitor.ping.health().accepted_s is None
    go.set()
