"""The senders here are complete fakes behind one edge; real HTTP is in tests/notifiers."""

import itertools
import threading
import time

import pytest

from supervise.core.shapes import Message, NotifyError
from supervise.outputs.outbox import Outbox, Result


class FakeSender:
    """Remembers what it was sent; `script` holds what to do with the next tries."""

    def __init__(self, *script, name="fake", min_sev="INFO", group_s=0.0, gap_s=0.0, per_hour=None):
        self.name, self.min_sev = name, min_sev
        self.group_s, self.gap_s, self.per_hour = group_s, gap_s, per_hour
        self.script = list(script)
        self.sent: list[tuple[str, Message]] = []
        self.tried: list[str] = []

    def send(self, message: Message, *, key: str) -> str:
        self.tried.append(key)
        act = self.script.pop(0) if self.script else None
        if callable(act):
            act()
        elif act is not None:
            raise act
        self.sent.append((key, message))
        return "delivered"

    @property
    def titles(self) -> list[str]:
        return [message.title for _, message in self.sent]


def message(title, severity="SEV2", incident=None) -> Message:
    return Message("run-1", incident, severity, title, "", "", "", 7)


@pytest.fixture
def outbox():
    """A function that opens an outbox; `results` are its results."""
    opened = []

    def open_(*senders, **more):
        results: list[Result] = []
        box = Outbox(senders, results.append, **more)
        box.results = results
        opened.append(box)
        return box

    yield open_
    for box in opened:
        box.close(0.0)


def outcome(box) -> dict[str, bool]:
    """What came of each message, by key; each must have exactly one result."""
    found = [(key, result.ok) for result in box.results for key in result.keys]
    assert len(found) == len({key for key, _ in found})
    return dict(found)


class Gate:
    """Holds a sender inside `send` until it is opened."""

    def __init__(self):
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.go.wait(30)


def test_an_outbox_goes_on_for_the_one_before_it(outbox):
    """What no channel answered for is sent under its key, to those who heard of the incident."""
    all_of_it = [
        (message("opened", "SEV1", "inc-1"), "run:3"),
        (message("joined", "SEV2", "inc-1"), "run:5"),
        (message("elsewhere", "SEV2", "inc-2"), "run:7"),
    ]
    pager = FakeSender(name="pager", min_sev="SEV1")
    slow = FakeSender(name="slow")
    fresh = FakeSender(name="fresh")
    box = outbox(pager, slow, fresh)

    assert box.channels == ["pager", "slow", "fresh"]
    assert box.resume(all_of_it, {"pager": {"run:3"}, "slow": {"run:5", "run:7"}}) == 2
    box.close()

    assert pager.sent == [("run:5", all_of_it[1][0])]
    assert slow.sent == [("run:3", all_of_it[0][0])]
    assert fresh.sent == []  # it was no channel of the one before


def test_posting_never_waits_and_everything_is_reported(outbox):
    """The loop goes on while a receiver hangs; what came of it is told once per message."""
    gate = Gate()
    sender = FakeSender(gate)
    box = outbox(sender)
    for n in range(50):
        box.post(message(f"m{n}"), key=f"k{n}")
    gate.entered.wait()
    assert box.results == []

    gate.go.set()
    box.close()

    assert outcome(box) == {f"k{n}": True for n in range(50)}
    assert sender.titles == [f"m{n}" for n in range(50)]
    assert box.results[0] == Result("fake", ("k0",), True, "delivered", 1)


def test_sev0_overtakes_the_backlog(outbox):
    """What must be known first is sent first, whenever it came."""
    gate = Gate()
    sender = FakeSender(gate)
    box = outbox(sender)
    box.post(message("first"), key="0")
    gate.entered.wait()
    for n, severity in enumerate(["INFO", "SEV2", "SEV1", "SEV0", "SEV2", "SEV0"]):
        box.post(message(f"{severity} {n}", severity), key=f"k{n}")

    gate.go.set()
    box.close()

    assert sender.titles == ["first", "SEV0 3", "SEV0 5", "SEV1 2", "SEV2 1", "SEV2 4", "INFO 0"]


def test_a_hanging_channel_delays_no_other(outbox):
    """Each has a thread of its own."""
    gate = Gate()
    hanging, other = FakeSender(gate, name="hanging"), FakeSender(name="other")
    box = outbox(hanging, other)
    box.post(message("a", "SEV0"), key="k")

    while not other.sent:
        time.sleep(0.001)

    assert not hanging.sent
    gate.go.set()


def test_a_failed_try_is_repeated_with_the_same_key(outbox):
    """The key is how a receiver drops a repetition."""
    sender = FakeSender(
        NotifyError("500", retry_after_s=0.0), NotifyError("503", retry_after_s=0.0)
    )
    box = outbox(sender, backoff_s=0.001)
    box.post(message("a"), key="k")

    while not box.results:
        time.sleep(0.001)

    assert sender.tried == ["k", "k", "k"]
    assert box.results == [Result("fake", ("k",), True, "delivered", 3)]


def test_a_refusal_is_final_and_a_bug_in_a_notifier_is_one_failure(outbox):
    """Neither stops the channel; a bug's text may hold an address, so only its type is told."""
    sender = FakeSender(NotifyError("400", retry_after_s=None), ValueError("https://secret"))
    box = outbox(sender)
    for key in "abc":
        box.post(message(key), key=key)
    box.close()

    assert [(r.ok, r.detail) for r in box.results] == [
        (False, "400"), (False, "ValueError in the notifier"), (True, "delivered"),
    ]  # fmt: skip


def test_after_many_tries_it_is_given_up(outbox):
    """A receiver that never works costs eight tries a message."""
    sender = FakeSender(*[NotifyError("500", retry_after_s=0.0)] * 8)
    box = outbox(sender, backoff_s=1e-6)
    box.post(message("a"), key="k")

    while not box.results:
        time.sleep(0.001)

    assert box.results == [Result("fake", ("k",), False, "500", 8)]


def test_retry_after_is_kept_even_for_sev0(outbox):
    """Who asks for time gets it: more knocking would only prolong it."""
    sender = FakeSender(NotifyError("429", retry_after_s=0.4))
    box = outbox(sender, backoff_s=1e-6)
    box.post(message("a"), key="a")
    while not sender.tried:
        time.sleep(0.001)
    began = time.monotonic()
    box.post(message("b", "SEV0"), key="b")

    while len(sender.sent) < 2:
        time.sleep(0.001)

    assert time.monotonic() - began > 0.3
    assert sender.tried == ["a", "b", "a"]


def test_sev0_does_not_wait_for_somebody_elses_backoff(outbox):
    """Our own pause was a guess; the worst news tries at once."""
    sender = FakeSender(NotifyError("500", retry_after_s=0.0))
    box = outbox(sender, backoff_s=1e6)
    box.post(message("a"), key="a")
    while not sender.tried:
        time.sleep(0.001)
    box.post(message("b", "SEV0"), key="b")

    while not sender.sent:
        time.sleep(0.001)

    assert sender.titles[0] == "b"


def test_words_on_one_incident_become_one_message(outbox):
    """The newest text, the worst severity, and what came before; all keys are answered."""
    sender = FakeSender(group_s=1000.0)
    box = outbox(sender)
    box.post(message("spike opened", "SEV1", "inc-1"), key="a")
    box.post(message("another", "SEV2", "inc-2"), key="b")
    box.post(message("rolled back", "SEV2", "inc-1"), key="c")
    box.post(message("recovered", "INFO", "inc-1"), key="d")
    box.close()

    assert [(m.title, m.severity) for _, m in sender.sent] == [
        ("recovered", "SEV1"), ("another", "SEV2"),
    ]  # fmt: skip
    assert sender.sent[0][1].facts == (("before that", "spike opened · rolled back"),)
    assert outcome(box) == dict.fromkeys("abcd", True)
    assert ("a", "c", "d") in [result.keys for result in box.results]


def test_sev0_does_not_wait_for_its_group(outbox):
    """And takes along what was waiting."""
    sender = FakeSender(group_s=1000.0)
    box = outbox(sender)
    box.post(message("spike opened", "SEV1", "inc-1"), key="a")
    box.post(message("loss is NaN", "SEV0", "inc-1"), key="b")

    while not sender.sent:
        time.sleep(0.001)

    assert sender.titles == ["loss is NaN"]


def test_a_tried_message_is_never_changed(outbox):
    """The receiver may know it under its key already; what is new is a message of its own."""
    gate = Gate()

    def lost_answer():
        gate()
        raise NotifyError("no answer", retry_after_s=0.0)

    sender = FakeSender(lost_answer)
    box = outbox(sender, backoff_s=0.001)
    box.post(message("opened", "SEV1", "inc-1"), key="a")
    gate.entered.wait()
    box.post(message("closed", "INFO", "inc-1"), key="b")
    gate.go.set()
    box.close()

    assert [(key, m.title) for key, m in sender.sent] == [("a", "opened"), ("b", "closed")]


def test_who_heard_of_an_incident_hears_its_end(outbox):
    """A channel for SEV1 gets the INFO that its incident is over, but not that of another."""
    sender = FakeSender(min_sev="SEV1")
    box = outbox(sender)
    box.post(message("noise", "SEV2", "inc-0"), key="0")
    box.post(message("opened", "SEV1", "inc-1"), key="1")
    while not sender.sent:
        time.sleep(0.001)
    box.post(message("noise over", "INFO", "inc-0"), key="2")
    box.post(message("over", "INFO", "inc-1"), key="3")
    box.close()

    assert sender.titles == ["opened", "over"]
    assert outcome(box) == {"1": True, "3": True}


def test_a_storm_becomes_a_few_messages_and_one_digest(outbox):
    """20 an hour, the last one says so, the rest is one digest; SEV0 still gets through."""
    sender = FakeSender(per_hour=20)
    box = outbox(sender)
    for n in range(100):
        box.post(message(f"m{n}"), key=f"k{n}")
    while len(sender.sent) < 20:
        time.sleep(0.001)
    box.post(message("fire", "SEV0"), key="fire")
    while len(sender.sent) < 21:
        time.sleep(0.001)
    assert len(box.results) <= 21
    box.close()

    assert len(sender.sent) == 22
    assert sender.sent[19][1].facts[0][0] == "quiet now"
    assert sender.titles[20] == "fire"
    assert sender.titles[21] == "80 messages were held back"
    assert sender.sent[21][1].verdict.startswith("[SEV2] m20 · [SEV2] m21")
    assert len(outcome(box)) == 101 and all(outcome(box).values())


def test_after_the_hour_the_digest_comes_by_itself(outbox):
    """Nobody has to wait for the end of the run."""
    now = [0.0]
    sender = FakeSender(per_hour=2)
    box = outbox(sender, monotonic=lambda: now[0])
    for n in range(5):
        box.post(message(f"m{n}"), key=f"k{n}")
    while box.backlog() != {"fake": {"waiting": 0, "held": 3}}:
        time.sleep(0.001)
    now[0] = 3601.0
    box.post(message("later"), key="later")  # any change wakes the lane up

    while len(sender.sent) < 4:
        time.sleep(0.001)

    assert "3 messages were held back" in sender.titles
    assert "later" in sender.titles


def test_a_full_queue_drops_the_least_severe_and_says_so(outbox):
    """Memory is bounded whatever happens, and SEV0 stays."""
    gate = Gate()
    sender = FakeSender(gate)
    box = outbox(sender)
    box.post(message("first"), key="first")
    gate.entered.wait()
    box.post(message("fire", "SEV0"), key="fire")
    for n in range(400):
        box.post(message(f"m{n}"), key=f"k{n}")

    dropped = [result for result in box.results if not result.ok]
    assert len(dropped) == 401 - 256
    assert {result.detail for result in dropped} == {"queue full"}
    gate.go.set()
    box.close()
    assert outcome(box)["fire"]
    assert len(outcome(box)) == 402


def test_the_end_waits_a_few_seconds_and_no_longer(outbox):
    """A dead receiver cannot keep the supervisor from exiting; what was lost is told."""
    gate = Gate()
    sender = FakeSender(gate)
    box = outbox(sender)
    box.post(message("hangs"), key="a")
    gate.entered.wait()
    box.post(message("waits", "SEV0"), key="b")

    box.close(0.1)

    assert {r.keys: r.detail for r in box.results} == {
        ("a",): "no answer before the supervisor ended",
        ("b",): "not delivered before the supervisor ended",
    }
    gate.go.set()
    box.post(message("too late"), key="c")
    assert box.results[-1] == Result("fake", ("c",), False, "the supervisor is ending", 0)
    assert outcome(box) == {"a": False, "b": False, "c": False}


def test_the_end_does_not_wait_for_a_retry_that_comes_too_late(outbox):
    """What must wait an hour is told at once as not delivered."""
    sender = FakeSender(NotifyError("429", retry_after_s=3600.0))
    box = outbox(sender)
    box.post(message("a"), key="a")
    while not sender.tried:
        time.sleep(0.001)
    began = time.monotonic()

    box.close(60.0)

    assert time.monotonic() - began < 30
    assert outcome(box) == {"a": False}


def test_the_gap_between_two_messages_is_kept(outbox):
    """Slack takes one a second."""
    times = []
    sender = FakeSender(*[lambda: times.append(time.monotonic())] * 3, gap_s=0.1)
    box = outbox(sender)
    for key in "abc":
        box.post(message(key), key=key)
    while len(sender.sent) < 3:
        time.sleep(0.001)

    assert min(b - a for a, b in itertools.pairwise(times)) >= 0.1


def test_a_listener_in_trouble_does_not_silence_the_channel():
    """The audit log may be full: people are still told."""
    sender = FakeSender()

    def listener(result):
        raise OSError("disk full")

    box = Outbox([sender], listener)
    for key in "ab":
        box.post(message(key), key=key)
    box.close()

    assert sender.titles == ["a", "b"]


def failing(tries=99):
    return [NotifyError("500", retry_after_s=0.0)] * tries


def test_a_channel_that_fails_is_told_once_on_the_others_and_again_when_it_works(outbox):
    """Also on a console that wants none of it; not over the channel itself, until it works."""
    now = [0.0]
    pager = FakeSender(*failing(2), name="pager")
    console = FakeSender(name="console", min_sev="SEV0")
    slack = FakeSender(name="slack")
    box = outbox(pager, console, slack, monotonic=lambda: now[0], backoff_s=1000.0)
    box.post(message("a", "SEV1", "inc-1"), key="run:a")
    while len(pager.tried) < 1:
        time.sleep(0.001)
    assert box.look() == []  # a moment is no news

    now[0] = 20.0
    [trouble] = box.look()
    assert (trouble.channel, trouble.since_s, trouble.undelivered) == ("pager", 0.0, 1)
    assert trouble.error == "500"
    assert box.look() == [trouble]
    while not (console.sent and len(slack.sent) == 2):
        time.sleep(0.001)

    for _, told in (console.sent[0], slack.sent[1]):
        assert (told.severity, told.incident, told.run, told.step) == ("SEV2", None, "run-1", 7)
        assert told.title == "pager: 1 message was not delivered"
        assert told.verdict == "no message got through for 20 s; last error: 500"
    box.post(message("b", "SEV0"), key="run:b")  # SEV0 is tried at once
    while len(pager.tried) < 2:
        time.sleep(0.001)
    box.post(message("c", "SEV0"), key="run:c")
    while not pager.sent:
        time.sleep(0.001)
    while box.look():
        time.sleep(0.001)
    box.close()

    assert sorted(console.titles) == [
        "b", "c", "pager works again", "pager: 1 message was not delivered",
    ]  # fmt: skip
    assert slack.titles.count("pager works again") == 1


def test_a_channel_that_never_answers_is_told_too(outbox):
    """Its thread is inside the sender, so somebody else must look."""
    now = [0.0]
    gate = Gate()
    hanging, console = FakeSender(gate, name="pager"), FakeSender(name="console")
    box = outbox(hanging, console, monotonic=lambda: now[0])
    box.post(message("a"), key="run:a")
    gate.entered.wait()
    now[0] = 20.0

    [trouble] = box.look()

    assert trouble.error == "no answer yet"
    gate.go.set()


def test_what_is_given_up_is_told_at_once_and_at_the_end_of_the_run(outbox):
    """The console is let out last, so that it can say what the others could not."""
    pager = FakeSender(*failing(), name="pager", min_sev="SEV1")
    console = FakeSender(name="console")
    refused = FakeSender(NotifyError("410 Gone", retry_after_s=None), name="hook", min_sev="SEV0")
    box = outbox(pager, console, refused)
    box.post(message("a", "SEV0"), key="run:a")
    while not refused.tried or not pager.tried:
        time.sleep(0.001)
    while [t.channel for t in box.look()] != ["hook"]:
        time.sleep(0.001)

    box.close(0.5)

    assert console.titles == [
        "a", "hook: 1 message was not delivered", "pager: 1 message was not delivered",
    ]  # fmt: skip
    assert [(t.channel, t.undelivered, t.error) for t in box.look()] == [
        ("hook", 1, "410 Gone"),
        ("pager", 1, "not delivered before the supervisor ended; last try: 500"),
    ]
    told = [(result.channel, key) for result in box.results for key in result.keys]
    assert len(told) == len(set(told))
