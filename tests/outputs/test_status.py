"""Loss, speed and planned length of a training, and the verdict about it."""

import math
from dataclasses import replace

import msgspec
import pytest

from supervise.checkpoints import Entry
from supervise.core import initial_state
from supervise.core import step as step_engine
from supervise.core.model import CheckpointState, Frame, JobSettings, Notice, RelaunchSettings
from supervise.runtime import (
    Life,
    ProbeStatus,
    Status,
    TrainingProgress,
    explain_missing_probe,
    first_step_deadline_s,
    format_capabilities,
    is_rollback_known,
    judge_ending,
    judge_status,
    list_capabilities,
)
from supervise.store import RunOutcome
from tests.support.recorded_run import shipped_policy

NAMES = ("train_loss_raw", "tokens_per_update")
SECOND = 1_000_000_000


def fed(losses, *, argv=(), attempt=0, first=0, rank=0, into=None):
    """Return the progress after a step each quarter of a second."""
    progress = into or TrainingProgress(argv)
    for step, loss in enumerate(losses, first):
        values = (loss, 1000.0)
        progress.add_frame(NAMES, Frame(step * SECOND // 4, rank, attempt, step, values))
    return progress


def test_speed_and_time_left_follow_from_the_newest_steps():
    progress = fed([3.0] * 99 + [2.5], argv=["python", "train.py", "--max-steps=500"])
    fed([9.0] * 98, rank=1, into=progress)

    training = progress.status(None, now_ns=26 * SECOND)

    assert (training.loss, training.loss_metric, training.loss_rank) == (2.5, "train_loss_raw", 0)
    assert training.steps_per_s == pytest.approx(4.0)
    assert (training.tokens_per_s, training.tokens_of) == (pytest.approx(4000.0), "rank")
    assert (training.planned_steps, training.planned_by) == (500, "--max-steps=500")
    assert (training.eta_s, training.last_step_s) == (100, 1.2)
    assert training.lag == {"0": 0, "1": 2}
    assert progress.status(200, 26 * SECOND).planned_by == "job.steps"
    probe = ProbeStatus(trained_by="Trainer", planned_steps=300)
    training = progress.status(None, 26 * SECOND, probe)
    assert (training.planned_steps, training.planned_by) == (300, "Trainer")


def test_a_pause_is_not_counted_as_speed():
    progress = TrainingProgress(["--steps", "300"])
    for step in (*range(40), *range(50, 100)):
        at_ns = step * SECOND // 4 + (step >= 60) * 100 * SECOND
        progress.add_frame(NAMES, Frame(at_ns, 0, 0, step, (2.0, 1000.0)))

    training = progress.status(None, now_ns=125 * SECOND)

    assert training.steps_per_s == pytest.approx(4.0)
    assert training.eta_s == 50


def test_a_rollback_starts_the_speed_again_and_keeps_the_curve():
    progress = fed([3.0] * 50)
    fed([2.0], attempt=1, first=20, into=progress)
    fed([7.0], first=99, into=progress)  # a late frame of the attempt before

    training = progress.status(None, now_ns=60 * SECOND)

    assert (training.loss, training.steps_per_s, training.eta_s) == (2.0, None, None)
    assert training.curve.steps == [*range(50), 20]


@pytest.mark.parametrize("count", [128, 5000])
def test_the_curve_is_bounded_and_loses_no_spike(count):
    losses = [1.0] * count
    losses[count // 3], losses[count // 2] = 8.0, math.nan
    curve = fed(losses).status(None, 0).curve

    assert 64 <= len(curve.steps) == len(curve.loss) <= 128
    assert curve.loss.count(8.0) == 1 and sum(map(math.isnan, curve.loss)) == 1
    assert curve.steps == sorted(set(curve.steps))


def test_metrics_of_all_ranks_come_before_those_of_one_and_one_makes_the_curve():
    """A loss that is absent in a step is not replaced by another one."""

    def after(names, *rows):
        progress = TrainingProgress()
        for step, values in enumerate(rows):
            progress.add_frame(names, Frame(step * SECOND, 0, 0, step, values))
        return progress.status(None, SECOND)

    names = ("tokens_per_update", "job_tokens", "train_loss", "job_loss")
    training = after(names, (8.0, None, 2.0, None), (8.0, 32.0, 2.0, 3.0))
    assert (training.loss, training.loss_metric) == (3.0, "job_loss")
    assert (training.tokens_per_s, training.tokens_of) == (32.0, "job")

    training = after(("train_loss_raw", "train_loss"), (8.0, 2.0), (8.0, None), (8.0, 1.9))
    assert training.loss_metric == "train_loss"
    assert (training.curve.steps, training.curve.loss) == ([0, 2], [2.0, 1.9])


@pytest.mark.parametrize(
    ("argv", "total"),
    [
        ("train.py --steps 600 --lr 1e-3", 600),
        ("train.py --max_iters=600", 600),
        ("train.py config/gpt.py --max-steps 300 --save-steps 50", 300),
        ("train.py trainer.max_steps=300", None),
        ("train.py --max-steps " + "9" * 5000, None),
        ("train.py --max-steps 300 --train-iters 600", None),
        ("train.py steps 600", None),
        ("train.py --steps many", None),
    ],
)
def test_the_planned_length_is_read_from_the_command(argv, total):
    assert TrainingProgress(argv.split()).status(None, 0).planned_steps == total


INCIDENT = {"opened": 2, "open": {"id": "inc-2", "severity": "SEV1", "headline": "loss 9"}}
ASKED = {"incidents": INCIDENT, "approvals": [{"id": "ask-1", "runbook": "soften"}]}
FORGED = {"incidents": INCIDENT, "approvals": [{"id": "ask-1; rm -r .", "runbook": "soften"}]}
FORGED_ID = "waits for a person: supervise approve RUN 'ask-1; rm -r .' (soften, inc-2 SEV1)"
HELD = "automatic actions are off, a person is needed: supervise release RUN (no incident)"


def status_of(**parts):
    """Return the status that a `state.json` with these parts holds."""
    return msgspec.convert(
        {"state": "nominal", "tier": "T1"} | parts, Status, dec_hook=lambda form, value: form(value)
    )


def training(last_step_s, steps_per_s):
    return {"training": {"last_step_s": last_step_s, "steps_per_s": steps_per_s}}


@pytest.mark.parametrize(
    ("parts", "age_s", "text"),
    [
        ({}, 1.0, "healthy"),
        ({}, 300.0, "unknown: the supervisor has written no status for 5 min"),
        ({"incidents": INCIDENT}, 1.0, "incident open: inc-2 SEV1: loss 9"),
        (ASKED, 1.0, "waits for a person: supervise approve RUN ask-1 (soften, inc-2 SEV1)"),
        (FORGED, 1.0, FORGED_ID),
        ({"state": "holding"}, 1.0, HELD),
        ({"ranks": {"0": {"paused": True}}}, 1.0, "paused: supervise resume RUN (no incident)"),
        (training(29.0, 9.0), 1.0, "healthy"),
        (training(31.0, 9.0), 1.0, "no step for 31 s"),
        (training(31.0, 0.1), 1.0, "healthy"),
        ({"rules": {"a": "OK", "b": "blind"}}, 1.0, "partly blind: b"),
        ({"rules": {"a": "blind", "b": "firing"}}, 1.0, "no incident, firing: b"),
        ({"rules": {"b": "firing"}, "muted": {"b": "phase:steady"}}, 1.0, "healthy"),
        ({"tier": "T0"}, 1.0, "no probe: only exit and signals are watched"),
        ({"state": "warming"}, 1.0, "warming up: the baselines are not complete yet"),
        ({"trouble": "disk full"}, 1.0, "no action is possible: disk full"),
    ],
)
def test_the_verdict_names_the_gravest_thing(parts, age_s, text):
    assert judge_status(status_of(**parts), age_s) == text


RAISED = {"ended_by": {"text": "OSError at a.py:1"}}
FAILED = "ended with code 3: OSError at a.py:1"
KILLED = "ended with code 137, loss is NaN"
DAMAGED = "newest checkpoint ckpt-2 is damaged"
UNSETTLED = "inc-1 SEV0 unresolved at the end, ask-1 unanswered"
NOT_FINITE = {"training": {"loss": math.nan}}
PERSON, INCIDENT_1 = "a person is needed: supervise", "why RUN inc-1"
ALL_OF_IT = f"{DAMAGED}, {UNSETTLED}; {PERSON} {INCIDENT_1}"
GONE = "its supervisor died, and the job has ended; supervise adopt RUN records how it ended"
NOTHING_RESUMES = f"{GONE}, and resumes nothing: no relaunch is configured, no checkpoint is good"
RESUMES = f"{GONE}, and starts it again from ckpt-1 of step 49 if it crashed"
CHECKPOINTS = [Entry("ckpt-1", "/c/1", 49, state="verified"), Entry("ckpt-2", "/c/2", 99)]


def outcome_of(severity="SEV0", slow_step=None, **closed):
    """Return the outcome of a run whose only incident, with a request, closed like this."""
    outcome = RunOutcome()
    record = {"incident": "inc-1", "severity": severity, "step": 9, "reason": "loss 9"}
    asked = {"what": "withdrawn", "id": "ask-1"}
    began = {"what": "opened", "slow_step": slow_step, "breach_step": 500}
    outcome.add_record(record | {"kind": "incident", "data": began})
    outcome.add_record(record | {"kind": "approval", "data": asked})
    outcome.add_record(record | {"kind": "incident", "data": {"what": "closed", **closed}})
    return outcome


@pytest.mark.parametrize(
    ("steps", "states", "damaged"),
    [
        ((49, 99, 99), ("verified", "bad", "verified"), "ckpt-1"),  # a torn model, its optimizer
        ((49, 99), ("bad", "verified"), None),
        ((99, 49), ("bad", "verified"), "ckpt-0"),  # verified in another order
        ((-1, -1), ("bad", "verified"), None),  # of steps that nobody knows
        ((-1, -1), ("verified", "bad"), "ckpt-1"),
    ],
)
def test_the_newest_checkpoint_is_that_of_the_newest_step_and_of_several_the_damaged_one(
    steps, states, damaged
):
    saved = [
        Entry(f"ckpt-{number}", f"/c/{number}", step, state=state)
        for number, (step, state) in enumerate(zip(steps, states, strict=True))
    ]
    life = Life(job="ended", over=True, exit_code=0)
    ending = judge_ending(life, status_of(), outcome_of(outcome="recovered"), saved)

    assert (f"newest checkpoint {damaged} is damaged" in ending.text) == (damaged is not None)
    assert damaged or "damaged" not in ending.text


@pytest.mark.parametrize(
    ("kind", "code", "status", "newest", "closed", "text"),
    [
        ("finished", 0, {}, "verified", "recovered", "finished"),
        ("not_finite", 0, NOT_FINITE, "bad", "job_ended", f"finished, loss is NaN, {ALL_OF_IT}"),
        ("damaged", 0, {}, "bad", "recovered", f"finished, {DAMAGED}; {PERSON} checkpoints RUN"),
        ("unsettled", 0, {}, "found", "job_ended", f"finished, {UNSETTLED}; {PERSON} {INCIDENT_1}"),
        ("failed", 3, RAISED, "found", "job_ended", f"{FAILED}; {PERSON} {INCIDENT_1}"),
        ("killed", 137, NOT_FINITE, "found", "recovered", f"{KILLED}; {PERSON} {INCIDENT_1}"),
        ("stopped", 130, {}, "found", "job_ended", "ended with code 130"),
    ],
)
def test_the_verdict_of_an_ended_run_is_the_gravest_thing(kind, code, status, newest, closed, text):
    checkpoints = [CHECKPOINTS[0], Entry("ckpt-2", "/c/2", 99, state=newest)]
    life, outcome = Life(job="ended", over=True, exit_code=code), outcome_of(outcome=closed)
    ending = judge_ending(life, status_of(**status), outcome, checkpoints)

    assert (ending.kind, ending.text) == (kind, text)
    assert ending.facts[0].kind == kind and text.endswith(ending.command)
    assert ending.checkpoint.id == ("ckpt-2" if newest == "verified" else "ckpt-1")


def incident(code, attempt, step, severity="SEV1", **data):
    at = {"attempt": attempt, "step": step, "severity": severity, "incident": "inc-1"}
    return {"kind": "incident", "reason": code, "data": {"what": code, **data}, **at}


OPENED = incident("opened", 0, 152, breach_step=150)
BACK_AT_END = {"outcome": "job_ended", "spike": {"questions": {"rejoined": {"answer": "yes"}}}}
ADVISORY = incident("opened", 0, 152, "SEV2", breach_step=150)


@pytest.mark.parametrize(
    ("records", "saved", "good"),
    [
        ([OPENED], [(0, 149), (0, 199)], 1),
        ([OPENED], [(0, 150)], None),
        ([OPENED, incident("closed", 0, 886, outcome="job_ended")], [(0, 149), (0, 900)], 1),
        ([OPENED, incident("closed", 0, 886, **BACK_AT_END)], [(0, 149), (0, 799)], 2),
        ([OPENED, incident("closed", 1, 276, outcome="recovered")], [(0, 159), (1, 199)], 2),
        ([OPENED, incident("closed", 2, 276, outcome="recovered")], [(0, 9), (1, 199)], 1),
        ([OPENED, incident("closed", 0, 300, outcome="rebaselined")], [(0, 200), (0, 301)], 2),
        ([OPENED, incident("closed", 0, 300, outcome="rebaselined")], [(0, 9), (0, 300)], 1),
        ([OPENED, incident("joined", 0, 153, breach_step=99)], [(0, 9), (0, 100)], 1),
        ([ADVISORY], [(0, 149), (0, 199)], 2),
        ([ADVISORY, incident("raised", 0, 300, breach_step=250)], [(0, 199), (0, 299)], 1),
    ],
)
def test_what_an_incident_made_suspect_is_not_offered_to_go_back_to(records, saved, good):
    outcome = RunOutcome()
    for record in records:
        outcome.add_record(record)
    checkpoints = [
        Entry(f"ckpt-{i}", f"/c/{i}", step, attempt, state="verified")
        for i, (attempt, step) in enumerate(saved, 1)
    ]
    ending = judge_ending(Life(job="ended", over=True, exit_code=0), None, outcome, checkpoints)

    assert (ending.checkpoint and ending.checkpoint.id) == (good and f"ckpt-{good}")
    is_newest = good == len(saved)
    assert ending.suspect.endswith("" if is_newest else ": not for going back")
    assert bool(ending.suspect) != is_newest


def test_weights_alone_are_offered_where_nothing_else_is_good():
    weights = Entry("ckpt-2", "/c/2", 99, state="verified", resumable="weights only")
    life = Life(job="ended", over=True, exit_code=0)
    for checkpoints, name in (([weights], "ckpt-2"), ([CHECKPOINTS[0], weights], "ckpt-1")):
        assert judge_ending(life, None, RunOutcome(), checkpoints).checkpoint.id == name


YES = {"answer": "yes"}


@pytest.mark.parametrize(
    ("severity", "closed"),
    [
        ("SEV2", {"outcome": "job_ended"}),
        ("SEV0", {"outcome": "job_ended", "asked": True}),
        ("SEV1", {"outcome": "job_ended", "spike": {"questions": {"rejoined": YES}}}),
    ],
)
def test_an_incident_that_nobody_must_answer_leaves_a_good_end(severity, closed):
    life, outcome = Life(job="ended", over=True, exit_code=0), outcome_of(severity, **closed)
    assert judge_ending(life, status_of(), outcome).text == "finished"


def test_steps_that_stay_slow_are_unresolved_though_the_loss_is_as_it_was():
    slow = {"since": 60, "before_s": 0.1, "now_s": 0.3}
    closed = {"outcome": "job_ended", "spike": {"questions": {"rejoined": YES}}}
    outcome = outcome_of("SEV1", slow_step=slow, **closed)
    ending = judge_ending(Life(job="ended", over=True, exit_code=0), status_of(), outcome)
    assert ending.kind == "unsettled"
    assert ending.facts[0].text == "inc-1 SEV1 unresolved at the end, ask-1 unanswered"


@pytest.mark.parametrize(
    ("job", "restarts", "checkpoints", "text"),
    [
        ("running", None, [], "not supervised: its supervisor died; supervise adopt RUN"),
        ("unknown", None, [], "its supervisor died, and no start of the job is on record"),
        ("lost", None, [], f"{GONE}, and resumes nothing: no checkpoint was saved"),
        ("lost", None, CHECKPOINTS, GONE),
        ("lost", False, CHECKPOINTS[1:], NOTHING_RESUMES),
        ("ended", True, CHECKPOINTS, RESUMES),
    ],
)
def test_the_verdict_without_a_supervisor_says_what_adopting_gets(job, restarts, checkpoints, text):
    status = status_of(restarts=restarts)
    assert judge_ending(Life(job=job), status, RunOutcome(), checkpoints).text == text


@pytest.mark.parametrize(
    ("marks", "worked_s", "deadline_s"),
    [
        ({"boot", "armed"}, 0.0, 120.0),  # it waits for something from the start
        ({"boot", "armed"}, 700.0, 820.0),  # it loads a model, or compiles
        ({"boot", "armed"}, 9000.0, 3600.0),
        ({"boot"}, 700.0, 820.0),  # it prepares its data
        ({"boot"}, 9000.0, 900.0),  # another framework than torch trains
        (set(), 700.0, 120.0),  # no Python of ours was started
    ],
)
def test_a_first_step_is_waited_for_while_the_job_works(marks, worked_s, deadline_s):
    assert first_step_deadline_s(marks, worked_s) == deadline_s


# ── what can be done in a job is one line, from the policy and what the job has shown ─────────────


NANO = shipped_policy("nano")
AGAIN = replace(NANO, job=JobSettings(relaunch=RelaunchSettings(resume="library")))
READY = {"savepoints": [25, 50, 75]}


def capabilities_of(policy, probe, ranks=1, channels=("console",), checkpoint=None, **missing):
    state = initial_state(policy)
    state.job.world_size, state.step = ranks, 80
    for verb, why in missing.items():
        notice = Notice(1, f"{verb}-unavailable", f"what it means: {why}")
        state, _ = step_engine(policy, state, notice)
    if checkpoint is not None:
        state.checkpoints.add_noticed(
            CheckpointState(id=checkpoint, step=50, path="/c/50", ok=True)
        )
    status = ProbeStatus(**probe)
    known = is_rollback_known(policy, state, status)
    return list_capabilities(policy, state, status, channels), known


@pytest.mark.parametrize(
    ("marks", "reason", "text"),
    [
        ({"boot", "armed", "off"}, None, None),
        ({"boot", "armed"}, "sleep is not Python", "step was seen: sleep is not Python; only"),
        ({"boot", "armed"}, None, "the job imported torch, but made no optimizer step"),
        ({"boot"}, None, "the job runs Python, but has not imported torch"),
        ((), None, "the probe was not loaded"),
    ],
)
def test_why_no_step_is_seen_follows_from_how_far_the_probe_came(marks, reason, text):
    message = explain_missing_probe(marks, reason)

    assert message is None if text is None else text in message


def test_the_capabilities_of_a_job_of_a_library_are_one_line():
    capabilities, known = capabilities_of(NANO, READY | {"trained_by": "Trainer"})

    assert known
    assert format_capabilities(capabilities) == (
        "rollback: yes · relaunch: not configured (Trainer recognised: supervise init -- COMMAND)"
        " · ranks: 1 · messages: console only"
    )


@pytest.mark.parametrize(
    ("policy", "probe", "facts", "what", "how"),
    [
        (NANO, READY, {}, "rollback", "yes"),
        (NANO, READY, {"ranks": 2}, "rollback", "yes"),
        (NANO, READY, {"rollback": "too large; relaunch"}, "rollback", "no (what it means: too"),
        (NANO, {"unavailable": {"rollback": "no room"}}, {}, "rollback", "no (no room)"),
        (NANO, {}, {}, "rollback", "not yet (savepoints are taken every 25"),
        (replace(NANO, runbooks={}), READY, {}, "rollback", "no (policy nano never runs it)"),
        (NANO, READY, {}, "relaunch", "not configured (supervise init -- COMMAND)"),
        (AGAIN, READY, {}, "relaunch", "not yet (no checkpoint is verified)"),
        (AGAIN, READY, {"checkpoint": "ckpt-50"}, "relaunch", "yes, from ckpt-50"),
        (replace(AGAIN, runbooks={}), READY, {}, "relaunch", "only by command (policy nano never"),
        (NANO, READY | {"unavailable": {"a": "why"}}, {}, "a", "no (why)"),
        (NANO, READY, {"channels": ("console", "slack")}, "messages", "console, slack"),
        (replace(NANO, mode="observe"), {}, {}, "actions", "none in mode observe (--mode enforce)"),
    ],
)
def test_each_capability_has_its_reason(policy, probe, facts, what, how):
    found, known = capabilities_of(policy, probe, **facts)
    assert found[what].startswith(how)
    assert known is (bool(probe) or policy.mode == "observe")


@pytest.mark.parametrize(("steps", "apart"), [([0, 75], 75), ([9], 71), ([0, 25, 50], 0)])
def test_savepoints_that_come_late_for_their_cost_are_told(steps, apart):
    found, _ = capabilities_of(NANO, READY | {"savepoints": steps})
    late = f", savepoints {apart} steps apart for their cost"
    assert found["rollback"] == "yes" + (late if apart else "")


@pytest.mark.parametrize(
    ("runbook", "outcome", "text"),
    [
        ("", "commit", "stopped by an operator: the job ended with signal 2 (SIGINT), "),
        ("stop-sev0", "commit", "stopped by runbook stop-sev0: the job ended with signal 2"),
        ("", None, "stopped by an operator: supervise returned 78"),
        ("", "abort", "ended with signal 2 (SIGINT): KeyboardInterrupt; supervise returned 78"),
    ],
)
def test_an_ordered_end_says_who_ordered_it_how_the_job_ended_and_what_came_back(
    runbook, outcome, text
):
    at = {"attempt": 0, "step": 9, "incident": None}
    action = {"id": "inc-1/5/0-stop", "verb": "stop", "runbook": runbook or "stop"}
    order = {"what": "operator", "command": "stop", "action": action["id"]}
    result = {"action": {"id": action["id"]}, "result": {"returncode": -2}}
    records = [
        *([] if runbook else [{"kind": "note", "data": order, **at}]),
        {"kind": "intent", "data": {"action": action}, **at},
        *([{"kind": outcome, "data": result, **at}] if outcome else []),
        {"kind": "run_end", "data": {"exit_code": 78}, **at},
    ]
    story = RunOutcome()
    for record in records:
        story.add_record(record)
    life = Life(job="ended", over=True, exit_code=130, signal="SIGINT")
    ending = judge_ending(life, status_of(ended_by={"text": "KeyboardInterrupt"}), story)

    assert ending.text.startswith(text) and ending.text.endswith("supervise returned 78")
    assert ending.stopped_by == (text.split(":")[0][11:] if text.startswith("stopped") else "")
    assert (ending.kind, ending.command) == ("stopped", "")
