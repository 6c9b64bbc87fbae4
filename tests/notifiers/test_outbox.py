"""What is sent when, to whom, and as how many messages."""

from msgspec import convert

from supervise.core.model import Notified, NotifyError
from supervise.notifiers import Result, message_of
from tests.support.waiting import wait_until

from .senders import FakeSender, Gate, message, outcome


def test_outbox_resumes_undelivered_messages(outbox):
    """Messages without an outcome are sent under their keys, to the same channels."""
    opened, joined = message("opened", "SEV1", "inc-1"), message("joined", "SEV2", "inc-1")
    other = message("elsewhere", "SEV2", "inc-2")
    pager = FakeSender(name="pager", min_sev="SEV1")
    slow, fresh = FakeSender(name="slow"), FakeSender(name="fresh")
    box = outbox(pager, slow, fresh)

    owed = [(opened, "run:3", 0.0), (joined, "run:5", 0.0), (other, "run:7", 0.0)]
    assert box.channels == ["pager", "slow", "fresh"]
    assert box.resume(owed, {"pager": {"run:3"}, "slow": {"run:5", "run:7"}}) == 2
    box.close()

    assert (pager.sent, slow.sent) == ([("run:5", joined)], [("run:3", opened)])
    assert fresh.sent == []  # it was no channel of the one before


def test_what_all_channels_get_is_sent_to_all_again_after_a_takeover(outbox):
    text = message("the record ended", "SEV2", to_all=True)
    pager = FakeSender(name="pager", min_sev="SEV0")
    box = outbox(pager)
    assert box.resume([(text, "run:3", 0.0)], {"pager": set()}) == 1
    box.close()
    assert pager.sent == [("run:3", text)]


def test_posting_never_blocks_and_the_most_severe_goes_first(outbox):
    """Every outcome is reported, with the number of tries."""
    gate = Gate()
    sender = FakeSender(gate)
    box = outbox(sender)
    box.post(message("first"), key="0")
    gate.entered.wait()
    for n, severity in enumerate(["INFO", "SEV2", "SEV1", "SEV0", "SEV2", "SEV0"]):
        box.post(message(f"{severity} {n}", severity), key=f"k{n}")
    for n in range(50):
        box.post(message(f"m{n}", "INFO"), key=f"m{n}")
    assert box.results == []

    gate.go.set()
    box.close()

    ranked = ["SEV0 3", "SEV0 5", "SEV1 2", "SEV2 1", "SEV2 4", "INFO 0"]
    assert sender.titles == ["first", *ranked, *(f"m{n}" for n in range(50))]
    assert len(outcome(box)) == 57 and all(outcome(box).values())
    assert box.results[0] == Result("fake", ("0",), True, "delivered", 1)


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

    assert sender.titles == ["recovered", "another"]
    assert [m.severity for _, m in sender.sent] == ["SEV1", "SEV2"]
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


def test_a_merged_message_keeps_the_rule_and_the_kind_of_the_opening(outbox):
    """And what must not be missed stays a message of its own, behind what came before it."""
    sender = FakeSender(group_s=1000.0)
    box = outbox(sender)
    opened = message("spike", "SEV1", "inc-1", kind="opened", why="rule jump: high")
    box.post(opened, key="a")
    box.post(message("started", "SEV1", "inc-1", kind="action", why="harm"), key="b")
    box.post(message("approve?", "SEV1", "inc-1", kind="approval"), key="c")
    wait_until(lambda: len(sender.sent) == 2)
    box.post(message("relapse", "SEV1", "inc-1", kind="updated"), key="d")
    box.post(message("over", "SEV1", "inc-1", kind="closed"), key="e")
    box.post(message("the job ended", "SEV1", "inc-1", kind="finished"), key="f")
    box.close()

    assert sender.titles == ["started", "approve?", "relapse", "over", "the job ended"]
    first = sender.sent[0][1]
    assert (first.kind, first.why) == ("opened", "rule jump: high; harm")


def test_a_merged_message_keeps_what_the_graver_rule_found(outbox):
    """Also where less joins it in these seconds; what ends it replaces it."""
    sender = FakeSender(group_s=1000.0)
    box = outbox(sender)
    graver, less = ("SEV1", "rank 2 is slow"), ("SEV2", "it waits for input")
    for incident, rows in (("inc-1", [graver, less]), ("inc-2", [graver, less, ("SEV1", "over")])):
        for number, (severity, verdict) in enumerate(rows):
            text = message("slow", severity, incident, verdict=verdict)
            box.post(text, key=f"{incident}-{number}")
    box.close()

    verdicts = [sent.verdict for _, sent in sender.sent]
    assert verdicts == ["rank 2 is slow; it waits for input", "over"]


def test_nothing_overtakes_a_message_on_its_incident(outbox):
    """Also a more severe one; another incident does not wait for it."""
    gate, down = Gate(), NotifyError("500", retry_after_s=0.0)

    def fail():
        gate()
        raise down

    sender = FakeSender(fail, down)
    box = outbox(sender, backoff_s=0.001)
    box.post(message("opened", "SEV2", "inc-1", kind="opened"), key="a")
    gate.entered.wait()
    box.post(message("worse", "SEV0", "inc-1"), key="b")
    box.post(message("other", "SEV1", "inc-2", kind="opened"), key="c")
    box.post(message("over", "SEV0", "inc-1", kind="closed"), key="d")
    gate.go.set()
    wait_until(lambda: len(sender.sent) == 4)

    assert sender.tried[:3] == ["a", "a", "a"]  # the worse one counts for it
    assert [title for title in sender.titles if title != "other"] == ["opened", "worse", "over"]


def test_a_request_counts_as_delivered_where_people_read(outbox):
    """The console may be a file: it counts only where no other channel has the request."""
    box = outbox(FakeSender(name="console"), FakeSender(name="pager", min_sev="SEV1"))
    for name, severity in (("ask-1", "SEV1"), ("ask-2", "SEV2")):
        text = message("approve?", severity, name, kind="approval", request=name)
        assert box.post(text, key=name)
    box.close()

    counted = {(r.channel, r.request) for r in box.results if box.reaches_people(r)}
    assert counted == {("pager", "ask-1"), ("console", "ask-2")}


def test_a_request_is_not_held_for_a_digest(outbox):
    """What is held of an incident keeps its other messages, so that the order stays."""
    sender = FakeSender(per_hour=2)
    box = outbox(sender)
    for n in range(2):
        box.post(message(f"m{n}"), key=f"k{n}")
    wait_until(lambda: len(sender.sent) == 2)
    box.post(message("opened", "SEV1", "inc-1", kind="opened"), key="a")
    wait_until(lambda: box.backlog()["fake"].held == 1)
    box.post(message("approve?", "SEV1", "inc-1", kind="approval"), key="b")
    wait_until(lambda: len(sender.sent) == 3)
    assert sender.titles[2] == "approve?"
    box.close()

    assert sender.titles[3] == "digest of 1 message"


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
    assert sender.titles[20:] == ["fire", "digest of 80 messages"]
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


def test_commands_in_a_message_name_the_run_directory():
    """They can be pasted as they are; a word RUN elsewhere stays, and a job's own path."""
    command = "supervise --policy RUN/policy.yaml -- COMMAND --load /c/RUN/1"
    steps = [{"text": "RUN: as RUN", "command": command}, {"command": "supervise ack RUN"}]
    text = dict.fromkeys(("severity", "title", "why", "next"), "") | {"step": 7, "rules": []}
    text |= {"kind": "opened", "verdict": "see RUN/incidents/", "steps": steps}
    made = convert({"reason": "", "message": text}, Notified)

    message = message_of(made, "run-1", "", "/a b/run", "python 'a b.py'")
    assert message.verdict == "see '/a b/run'/incidents/"
    assert [(step.text, step.command) for step in message.next.steps] == [
        (
            "RUN: as RUN",
            "supervise --policy '/a b/run'/policy.yaml -- python 'a b.py' --load /c/RUN/1",
        ),
        ("", "supervise ack '/a b/run'"),
    ]


def test_a_record_without_steps_is_read_as_its_text():
    text = dict.fromkeys(("severity", "title", "verdict", "why"), "") | {"step": 7, "rules": []}
    text |= {"kind": "opened", "lead": "nothing to do", "next": "it was planned", "live": "numbers"}
    made = convert({"reason": "", "message": text}, Notified)

    assert message_of(made, "run-1", "").next.text == "nothing to do; it was planned"
