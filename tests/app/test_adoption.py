"""A dead supervisor's work is taken up: one effect, one outcome, no message lost or doubled."""

import hashlib
import itertools
import json
import shutil
from types import SimpleNamespace

import pytest

from supervise.catalog import load_policy
from supervise.core import compare_decisions
from supervise.core.model import Announced, Exited, Frame, Launched, Notice, OperatorCommand
from supervise.errors import StoreError
from supervise.notifiers import Outbox
from supervise.runtime import (
    Adoption,
    EventProcessor,
    FrameEnricher,
    Performer,
    RecoveredRun,
    Settings,
    exit_code_by_policy,
)
from supervise.store import Audit, Journal, Recorder, Reloader, read_audit, read_journal
from tests.support.waiting import wait_until

SECOND = 10**9
SPIKE = (*[2.0] * 20, 8.0)


class FakeJob:
    """A job that answers at once, and remembers under which key it was asked for what."""

    def __init__(self, returncode=None, heard=()):
        self.process = SimpleNamespace(returncode=returncode)
        self.world_size = 1
        self.exit_code = None
        self.paused_until_ns = None
        self.asked = []
        self._heard = heard

    def resume_after_crash(self, paused_until_ns, exit_code):
        self.paused_until_ns, self.exit_code = paused_until_ns, exit_code

    def is_answered(self, key):
        return key in self._heard

    def run_pending_work(self, now_ns):
        pass

    def command(self, verb, args, *, key, deadline_s):
        self.asked.append((verb, key))
        seen = {"lr_scale": args.get("value"), "paused_step": 20}
        return {**seen, "ranks": 1, "ack_step": 20}

    def snapshot(self, incident, *, key, deadline_s):
        return {"path": "x", "sha256": "0", "bytes": 1, "files": []}

    def relaunch(self, args, *, key, deadline_s):
        return {**PID, "step": 4}

    def stop(self, *, grace_s, term_s, exit_code):
        self.asked.append(("stop", exit_code))
        return {"how": "ended", "returncode": 0, "survivors": [], "exit_code": self.exit_code}


class FakeSender:
    name, min_sev = "console", "INFO"
    group_s = gap_s = 0.0
    per_hour = None

    def __init__(self):
        self.sent = []

    def send(self, message, *, key):
        self.sent.append((key, message.title))
        return "printed"


@pytest.fixture
def take_over():
    """A function that lets a new supervisor begin on a run; returns its parts."""
    opened = []

    def begin(run, job, *events):
        past = RecoveredRun.read(run, load_policy)
        now = itertools.count(10**12)
        log = Audit.open(run.audit_path, run.id, at_ns=next(now), wall="")
        recorder = Recorder(Journal.open(run.journal_path), log, lambda: (next(now), ""), print)
        reloader = Reloader(run, past.started, load_policy)
        settings = Settings([], past.policy, reloader, run, run.path, "T1", None, print, past=past)
        processor, sender = EventProcessor(settings, recorder), FakeSender()
        outbox = Outbox([sender], processor.on_result)
        processor.open(Performer(job), outbox)
        left = list(events)
        segments = SimpleNamespace(poll=lambda: [left.pop() for _ in left[:]][::-1])
        adoption = Adoption(past, run, processor, recorder, job, segments)
        rest = adoption.take_over(FrameEnricher(lambda pid, leads: {}), outbox)
        for event in rest:
            processor.process(event)
        wait_until(lambda: processor.collect_results() or not processor.performing, every_s=0)
        outbox.close()
        processor.record_results()
        opened.append(recorder)
        return SimpleNamespace(processor=processor, sent=sender.sent, rest=rest, past=past)

    yield begin
    for recorder in opened:
        recorder.close()


def kinds(run, *wanted):
    return [r for r in read_audit(run.audit_path) if r["kind"] in wanted]


def assert_replayed(run):
    events, log = read_journal(run.journal_path), read_audit(run.audit_path)
    _, differences = compare_decisions(load_policy(run.policy_path), events, log)
    assert differences == []


@pytest.fixture
def open_intent(keep_run, make_frames):
    return keep_run(make_frames(0, *SPIKE), ended=False, answer=lambda action: None)


def test_an_order_without_an_outcome_is_given_again_under_its_key(open_intent, take_over):
    job = FakeJob()
    (intent,) = kinds(open_intent, "intent")
    name = intent["data"]["action"]["id"]

    take_over(open_intent, job)

    assert job.asked == [("lr_scale", f"{open_intent.id}:{name}")]
    assert [r["data"]["action"]["id"] for r in kinds(open_intent, "commit")] == [name]
    assert len(kinds(open_intent, "intent")) == 1
    reasons = [r["reason"] for r in kinds(open_intent, "recovered")]
    assert reasons[0] == "another supervisor took over"
    assert reasons[1] == f"{name} was under way: performed again under its key"
    assert_replayed(open_intent)


def test_an_order_whose_training_is_over_is_not_given_again(keep_run, make_frames, take_over):
    """The job may have met it under the supervisor that died, so it is taken back."""
    frames, names = make_frames(0, *SPIKE), ("train_loss_raw", "grad_global_norm")
    events = [*frames, Announced(frames[-1].at_ns, 0, 1, 7, names, 9)]
    run = keep_run(events, ended=False, answer=lambda action: None)
    job = FakeJob()

    taken = take_over(run, job)

    assert job.asked == [("lr_scale", f"{run.id}:inc-1/1/undo-lr_scale")]
    (abort,) = kinds(run, "abort")
    assert "the training session that it was meant for has ended" in abort["reason"]
    assert taken.processor.state.incident is None
    assert_replayed(run)


@pytest.mark.parametrize("known", [True, False])
def test_an_answer_that_lies_there_comes_before_the_frames_behind_it(open_intent, take_over, known):
    (intent,) = kinds(open_intent, "intent")
    heard = [f"{open_intent.id}:{intent['data']['action']['id']}"] if known else []
    frame = Frame(10**13, 0, 0, 21, (2.0, 1.0))

    taken = take_over(open_intent, FakeJob(heard=heard), frame)

    assert taken.rest == [frame]
    assert len(kinds(open_intent, "commit")) == 1


PAUSING = """\
version: supervise/v1
policy: pausing
mode: enforce
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 5.0}
rules:
  - {id: high, when: high, sev: SEV1, run: back}
runbooks:
  back: [pause, snapshot, {rollback: {at_least: 5}}, resume, verify]
budgets: {all: {max: 9, per: 1000}, rollback: {max: 9, per: 1000}}
savepoints: {every: 5}
warmup: 5
"""


@pytest.mark.parametrize("died_at", ["pause", "snapshot"])
def test_a_pause_that_ended_unwatched_is_known_before_anything_follows(
    keep_run, make_frames, tmp_path, take_over, died_at
):
    (tmp_path / "pausing.yaml").write_text(PAUSING)
    run = keep_run(
        make_frames(0, *SPIKE),
        policy=tmp_path / "pausing.yaml",
        ended=False,
        answer=lambda action: None if action["verb"] == died_at else {"paused_step": 20},
    )
    pause = f"{run.id}:inc-1/1/0-pause"
    job = FakeJob(heard=[pause])
    text = "nobody renewed the pause: the job goes on by itself after 60 s"

    taken = take_over(run, job, Notice(10**13, "pause-ended", text, data={"key": pause}))

    renewed = taken.past.paused_until_ns is not None
    assert renewed == (job.paused_until_ns is not None) == (died_at == "snapshot")
    assert job.asked == ([("pause", pause)] if died_at == "pause" else [])
    assert taken.processor.state.machine == "holding" and not taken.processor.state.job.paused
    assert RecoveredRun.read(run, load_policy).paused_until_ns is None
    assert_replayed(run)


def test_decisions_are_written_late_and_messages_sent_under_their_keys(open_intent, take_over):
    """The log is cut right after the rule that fired: all that follows from it is made up for."""
    lines = open_intent.audit_path.read_bytes().splitlines(keepends=True)
    fired = next(i for i, line in enumerate(lines) if b'"kind":"rule"' in line)
    open_intent.audit_path.write_bytes(b"".join(lines[: fired + 1]))
    job = FakeJob()

    taken = take_over(open_intent, job)

    posted = kinds(open_intent, "notify_intent")
    keys = [f"{open_intent.id}:{r['seq']}" for r in posted]
    results = [key for r in kinds(open_intent, "notify_result") for key in r["data"]["keys"]]
    assert set(results) == set(keys)
    assert [key for key, _ in taken.sent] == [key for key in keys if key in dict(taken.sent)]
    assert [verb for verb, _ in job.asked] == ["lr_scale"]
    assert kinds(open_intent, "recovered")[0]["data"]["late"] > 2
    assert_replayed(open_intent)


ANSWER = "{lr_scale: {set: 0.5, rewarm: 10}}"


@pytest.fixture
def stopping(keep_run, make_frames, small):
    """A function that keeps a run which was to be stopped, with this answer to the stop."""

    def keep(answer, *events):
        text = small.read_text().replace(ANSWER, "snapshot, {stop: {}}")
        text = text.replace("    verify: {within: 30, clear_for: 5}\n", "")
        small.write_text(text.replace("  lr_scale: {max: 2, per: 1000}\n", ""))
        return keep_run(
            [*make_frames(0, *SPIKE), *events],
            ended=False,
            answer=lambda action: answer if action["verb"] == "stop" else {},
        )

    return keep


def test_a_job_that_ended_in_the_middle_of_a_stop_was_stopped(stopping, take_over):
    run = stopping(None)
    job = FakeJob(returncode=0)

    taken = take_over(run, job)

    assert job.asked == [("stop", 78)]
    assert job.exit_code == 78
    assert taken.processor.state.job.stopping
    (commit,) = [r for r in kinds(run, "commit") if "stop" in r["reason"]]
    assert commit["data"]["result"]["exit_code"] == 78


def test_a_stop_that_was_carried_out_decides_with_which_code_to_exit(stopping):
    stopped = {"how": "term", "returncode": -15, "survivors": [], "exit_code": 78}
    past = RecoveredRun.read(stopping(stopped, Exited(99 * SECOND, -15)), load_policy)

    assert (past.exit_code, past.exited) == (78, True)


@pytest.fixture
def relaunching(keep_run, make_frames, small):
    """A function that keeps a run whose supervisor died while it started the job again."""

    def keep(*events):
        text = small.read_text().replace(ANSWER, "snapshot, {relaunch: {}}")
        text = text.replace("  lr_scale: {max: 2, per: 1000}\n", "  restart: {max: 2, per: 1000}\n")
        small.write_text(text + "job: {relaunch: {args: [--resume]}}\n")
        good = {"id": "a", "step": 4, "attempt": 0, "path": "/a.pt", "ok": True, "bytes": 1}
        frames = make_frames(0, *[2.0] * 20)
        verified = Notice(frames[-1].at_ns, "checkpoint", "a was verified", data=good)
        return keep_run(
            [*frames, verified, *make_frames(20, 8.0), *events],
            ended=False,
            answer=lambda action: None if action["verb"] == "relaunch" else {},
        )

    return keep


MARKS = {"how": "term", "returncode": -15, "path": "/ckpt.pt", "moved": []}
PID = {"pid": 9, "attempt": 1}


AGAIN = [Exited(21 * SECOND, -15), Launched(21 * SECOND, 9, 1)]


@pytest.mark.parametrize(
    ("marks", "events", "dead", "code"),
    [
        (MARKS, [], True, 78),  # stopped, and never started again
        (MARKS, AGAIN, False, None),  # it was, and the mark of that was lost
        (MARKS | PID, [], False, None),  # it was, and the record of that was lost
        ({**MARKS, "how": "ended"}, [], True, None),  # it had ended by itself
        (None, [], True, 78),  # the marks cannot be read: who finds the job dead should look
        (None, [], False, None),
    ],
)
def test_whether_a_relaunch_left_the_job_dead_is_known(
    relaunching, take_over, marks, events, dead, code
):
    run = relaunching(*events)
    key = f"{run.id}:inc-1/1/1-relaunch"
    path = run.path / f"relaunch/{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    path.parent.mkdir()
    path.write_text("{" if marks is None else json.dumps({"key": key, **marks}))
    job = FakeJob(returncode=-15 if dead else None)

    take_over(run, job)

    assert job.exit_code == code
    assert kinds(run, "intent")[-1]["data"]["action"]["id"] == "inc-1/1/1-relaunch"


@pytest.mark.parametrize(("code", "passed_on"), [(2, 78), (0, None), (75, None)])
def test_that_what_was_started_failed_at_once_is_known(relaunching, take_over, code, passed_on):
    run = relaunching(*AGAIN, Exited(21 * SECOND, code))
    job = FakeJob(returncode=code)

    taken = take_over(run, job)

    assert taken.processor.state.job.over
    assert exit_code_by_policy(job, taken.processor.state, taken.processor.policy) == passed_on
    reason = kinds(run, "incident")[-1]["reason"]
    assert ("job.relaunch.args --resume" in reason) is (code != 0)
    assert_replayed(run)


# ── what a run has come to, by its records alone ──────────────────────────────────────────────────


@pytest.fixture
def troubled(keep_run, make_frames):
    return keep_run(make_frames(0, *SPIKE, *[2.0] * 20), ended=False)


def engine_records(run):
    return [r for r in read_audit(run.audit_path) if r["actor"] == "engine"]


def test_decisions_that_were_not_written_any_more_are_known(troubled):
    """Wherever a kill cut the log after the last judged event: what is left is what replay says."""
    whole, lines = engine_records(troubled), troubled.audit_path.read_bytes().splitlines(True)
    for length in range(len(lines), 1, -1):
        troubled.audit_path.write_bytes(b"".join(lines[:length]))
        left, past = engine_records(troubled), RecoveredRun.read(troubled, load_policy)
        late = [(event, decision.reason) for event, _, decision in past.unwritten]
        assert late == [(r["event"], r["reason"]) for r in whole[len(left) :]]
        assert left == whole[: len(left)]
        assert (past.state.step, past.state.machine) == (40, "probation")
        assert past.names == {0: ("train_loss_raw", "grad_global_norm")}
        assert [frame.step for _, frame in past.window] == list(range(41))
        assert (past.exited, past.launched.pid) == (False, 2**22 + 7)


def test_a_log_that_says_something_else_is_not_gone_on_with(troubled, keep_run, make_frames):
    other = keep_run(make_frames(0, *[2.0] * 9, 8.0, *[2.0] * 40), ended=False, name="other")
    shutil.rmtree(troubled.journal_path)
    shutil.copytree(other.journal_path, troubled.journal_path)

    with pytest.raises(StoreError, match="does not follow from its journal from record"):
        RecoveredRun.read(troubled, load_policy)


def test_a_run_whose_journal_lost_its_end_is_not_gone_on_with(troubled):
    [segment] = troubled.journal_path.iterdir()
    segment.write_bytes(segment.read_bytes()[:-900])

    with pytest.raises(StoreError, match="is incomplete, so nobody can take the run over"):
        RecoveredRun.read(troubled, load_policy)


def test_the_policy_of_a_reload_is_in_force(keep_run, make_frames, small):
    second = small.with_name("second.yaml")
    second.write_text(small.read_text().replace("gt: 5.0", "gt: 6.0"))
    reload = OperatorCommand(12 * SECOND, "anna", "reload", {"policy": str(second), "key": "9-9"})
    run = keep_run([*make_frames(0, 2.0, 2.0), reload, *make_frames(2, 5.5)], ended=False)

    past = RecoveredRun.read(run, load_policy)

    assert past.started.digest != past.policy.digest == load_policy(second).digest
    assert past.reload == (str(second), None)
    assert (past.asked, past.received) == (None, {"9-9"})
    assert past.state.incident is None  # 5.5 is none of its breaches
