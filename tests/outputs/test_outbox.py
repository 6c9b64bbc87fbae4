"""What is sent when, to whom, and as how many messages."""

from supervise.outputs.outbox import Result, with_run
from tests.support.waiting import wait_until

from .senders import FakeSender, Gate, message, outcome


def test_outbox_resumes_undelivered_messages(outbox):
    """Messages without an outcome are sent under their keys, to the same channels."""
    all_of_it = [
        (message("opened", "SEV1", "inc-1"), "run:3", 0.0),
        (message("joined", "SEV2", "inc-1"), "run:5", 0.0),
        (message("elsewhere", "SEV2", "inc-2"), "run:7", 0.0),
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


def test_posting_never_blocks_and_every_outcome_is_reported(outbox):
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


def test_most_severe_first(outbox):
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


def test_hanging_channel_delays_no_other(outbox):
    gate = Gate()
    hanging, other = FakeSender(gate, name="hanging"), FakeSender(name="other")
    box = outbox(hanging, other)
    box.post(message("a", "SEV0"), key="k")

    wait_until(lambda: other.sent)
    assert not hanging.sent
    gate.go.set()


def test_messages_on_one_incident_are_merged(outbox):
    """The newest text, the worst severity, and the earlier titles; all keys are answered."""
    sender = FakeSender(group_s=1000.0)
    box = outbox(sender)
    box.post(message("spike opened", "SEV1", "inc-1"), key="a")
    box.post(message("another", "SEV2", "inc-2"), key="b")
    box.post(message("rolled back", "SEV2", "inc-1"), key="c")
    box.post(message("recovered", "INFO", "inc-1"), key="d")
    box.close()

    assert [(m.title, m.severity) for _, m in sender.sent] == [
        ("recovered", "SEV1"),
        ("another", "SEV2"),
    ]
    assert sender.sent[0][1].facts == (("earlier", "spike opened · rolled back"),)
    assert outcome(box) == dict.fromkeys("abcd", True)
    assert ("a", "c", "d") in [result.keys for result in box.results]


def test_sev0_is_sent_at_once(outbox):
    sender = FakeSender(group_s=1000.0)
    box = outbox(sender)
    box.post(message("spike opened", "SEV1", "inc-1"), key="a")
    box.post(message("loss is NaN", "SEV0", "inc-1"), key="b")

    wait_until(lambda: sender.sent)
    assert sender.titles == ["loss is NaN"]


def test_channel_gets_the_end_of_its_incidents(outbox):
    """A channel for SEV1 gets the INFO on its incident, but not that of another."""
    sender = FakeSender(min_sev="SEV1")
    box = outbox(sender)
    box.post(message("noise", "SEV2", "inc-0"), key="0")
    box.post(message("opened", "SEV1", "inc-1"), key="1")
    wait_until(lambda: sender.sent)
    box.post(message("noise over", "INFO", "inc-0"), key="2")
    box.post(message("over", "INFO", "inc-1"), key="3")
    box.close()

    assert sender.titles == ["opened", "over"]
    assert outcome(box) == {"1": True, "3": True}


def test_rate_limit_and_digest(outbox):
    """20 an hour, the rest is one digest; SEV0 still gets through."""
    sender = FakeSender(per_hour=20)
    box = outbox(sender)
    for n in range(100):
        box.post(message(f"m{n}"), key=f"k{n}")
    wait_until(lambda: len(sender.sent) >= 20)
    box.post(message("fire", "SEV0"), key="fire")
    wait_until(lambda: len(sender.sent) >= 21)
    assert len(box.results) <= 21
    box.close()

    assert len(sender.sent) == 22
    assert sender.sent[19][1].facts[0][0] == "rate limit"
    assert sender.titles[20] == "fire"
    assert sender.titles[21] == "digest of 80 messages"
    assert sender.sent[21][1].verdict.startswith("[SEV2] m20 · [SEV2] m21")
    assert len(outcome(box)) == 101 and all(outcome(box).values())


def test_full_queue_drops_the_least_severe(outbox):
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


def test_close_is_bounded(outbox):
    """A dead receiver does not delay the exit; lost messages are reported."""
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


def test_commands_in_a_message_name_the_run_directory() -> None:
    """They can be pasted as they are; a word RUN elsewhere stays."""
    found = with_run("RUN: supervise approve RUN ask-1, see RUN/incidents/", "/a b/run")
    assert found == "RUN: supervise approve '/a b/run' ask-1, see '/a b/run'/incidents/"
