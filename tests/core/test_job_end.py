"""How a job ends: signals that wait for a checkpoint, early ends, skipped epochs, a full disk."""

from __future__ import annotations

import pytest

from supervise.actions import Stop
from supervise.core.model import (
    JobSettings,
    Launched,
    Notice,
    Preemption,
    Settled,
    decision_record,
)
from supervise.detectors import Descent, Threshold
from supervise.report import Record, Status, status_of

from .conftest import (
    NAN,
    above,
    crashing,
    messages,
    one_rule,
    rules_of,
    runbook_of,
    save,
)

SIGINT, SIGTERM, SIGUSR1, SIGUSR2 = "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"
NOW, GRACE = 100.0, 20.0


@pytest.fixture
def offered():
    """A preemption that holds signals for up to `GRACE` seconds, offered until NOW + 4."""
    made = Preemption()
    made.hold_signals_until(GRACE, NOW + 4)
    return made


def test_a_signal_waits_for_the_checkpoint_and_is_then_passed_on(offered):
    assert offered.on_signal(SIGTERM, NOW, handled=False) == []
    assert offered.expire(NOW + GRACE - 0.01) == []
    assert offered.settle_and_release_signals(NOW + 3) == [SIGTERM]

    assert list(offered.settled) == [Settled("SIGTERM", "", 3.0, ("SIGTERM",))]
    assert offered.on_signal(SIGUSR1, NOW + 3.1, handled=False) == [SIGUSR1]  # it had its turn


def test_no_signal_waits_longer_than_its_grace(offered):
    """Also one that joins late, behind a request that may wait for longer."""
    assert offered.request_checkpoint("walltime", NOW, NOW + 120)
    assert offered.on_signal(SIGTERM, NOW + 5, handled=False) == []
    assert offered.on_signal(SIGUSR2, NOW + 10, handled=False) == []
    assert offered.request.deadline_s == NOW + 5 + GRACE
    assert offered.expire(NOW + 5 + GRACE) == [SIGTERM, SIGUSR2]

    (settled,) = offered.settled
    assert (settled.cause, settled.refusal) == ("walltime", "it was not written within 25 s")


def test_a_request_without_a_signal_may_be_repeated_until_one_is_answered(offered):
    assert offered.request_checkpoint("drain", NOW, NOW + 10)
    assert not offered.request_checkpoint("walltime", NOW + 1, NOW + 10)
    assert offered.settle_and_release_signals(NOW + 2, "the newest step was not finite") == []
    assert offered.request_checkpoint("walltime", NOW + 3, NOW + 10)
    assert offered.settle_and_release_signals(NOW + 4) == []
    assert not offered.request_checkpoint("drain", NOW + 5, NOW + 10)


def test_the_same_signal_again_goes_through_at_once(offered):
    assert offered.on_signal(SIGUSR1, NOW, handled=False) == []
    assert offered.on_signal(SIGTERM, NOW + 1, handled=False) == []
    assert offered.on_signal(SIGTERM, NOW + 2, handled=False) == [SIGUSR1, SIGTERM, SIGTERM]
    assert offered.settled[0].refusal == "a second SIGTERM came"


def test_a_signal_that_comes_on_two_ways_is_one(offered):
    """Slurm signals every process of a step, and `srun` passes on what it got."""
    assert not offered.is_echo(SIGTERM, NOW)
    assert offered.on_signal(SIGTERM, NOW, handled=False) == []
    assert offered.is_echo(SIGTERM, NOW + 0.9) and not offered.is_echo(SIGUSR1, NOW + 0.1)
    assert not offered.is_echo(SIGTERM, NOW + 1.0)
    assert offered.settle_and_release_signals(NOW + 1.1) == [SIGTERM]
    assert not offered.is_echo(SIGTERM, NOW + 1.2)


def test_what_never_waits(offered):
    """Signals that the job handles, those of a terminal, and all without a fresh offer."""
    assert offered.on_signal(SIGTERM, NOW, handled=True) == [SIGTERM]
    assert offered.on_signal(SIGINT, NOW, handled=False) == [SIGINT]
    assert offered.on_signal(SIGTERM, NOW + 4.1, handled=False) == [SIGTERM]  # the loop hangs
    offered.withdraw()
    assert offered.on_signal(SIGTERM, NOW, handled=False) == [SIGTERM]


def test_the_next_process_gets_what_waited(offered):
    offered.on_signal(SIGTERM, NOW, handled=False)
    assert offered.reset_and_release_signals(NOW + 1) == [SIGTERM]
    assert offered.on_signal(SIGTERM, NOW + 1, handled=False) == [SIGTERM]  # not offered yet
    offered.hold_signals_until(GRACE, NOW + 10)
    assert offered.on_signal(SIGTERM, NOW + 2, handled=False) == []


@pytest.mark.parametrize(
    ("phase", "severity", "title"),
    [
        ("saved", "INFO", "ended at step 49 after SIGTERM, with a checkpoint"),
        ("failed", "INFO", "ended at step 49 after SIGTERM, without a checkpoint"),
        ("requested", "SEV1", "the job is DOWN: it ended with signal 12 (SIGUSR2) at step 49"),
    ],
)
def test_people_are_notified_once_of_what_is_lost(tell, phase, severity, title):
    story = crashing(tell)
    held = {"signal": "SIGTERM", "final": True, "held": True}
    story.notice("signal", "SIGTERM waits", data=held)
    before = len(messages(story))
    data = {"phase": phase, "cause": "SIGTERM", "signals": ["SIGTERM"], "path": "out/c.pt"}
    story.notice("preempt", "SIGTERM: a checkpoint", data=data)
    at_once = [each["severity"] for each in messages(story)[before:]]
    assert story.state.job.held_signals == (("SIGTERM",) if phase == "requested" else ())
    story.exit(-12)

    assert at_once == {"saved": ["SEV2"], "failed": ["SEV1"], "requested": []}[phase]
    assert story.state.job.over and story.actions() == []
    assert (messages(story)[-1]["severity"], messages(story)[-1]["title"]) == (severity, title)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("out/c.pt", "resume from out/c.pt"),
        ("out/c.pt.partial", "good checkpoints: supervise checkpoints RUN"),
        ("out/tmp-checkpoint-50/model.pt", "good checkpoints: supervise checkpoints RUN"),
    ],
)
def test_nobody_is_sent_to_a_file_that_is_renamed(tell, path, advice):
    story = crashing(tell)
    data = {"phase": "saved", "cause": "SIGTERM", "signals": ["SIGTERM"], "path": path}
    story.notice("preempt", "SIGTERM: a checkpoint", data=data)

    assert messages(story)[-1]["next"] == advice


# ── an end with code 0 before the planned length is SEV1, unless somebody asked for it ────────────


def library(done, total, *, stopped=False):
    data = {"done": done, "total": total, "stopped": stopped}
    return Notice(0, "training-ended", "Trainer ended", data=data)


def newest(story):
    """Return severity and title of the newest message."""
    message = messages(story)[-1]
    return message["severity"], message["title"]


@pytest.mark.parametrize(
    ("steps", "before", "shortfall"),
    [
        (None, [], ""),
        (50, [], ""),
        (60, [], "50 of 60 steps"),
        (None, [library(30, 40)], "30 of 40 steps"),
        (60, [library(40, 40)], ""),
        (60, [library(30, 40, stopped=True)], ""),
        (None, [library(30, 40), library(40, 40)], ""),
        (60, [Notice(0, "signal", "SIGUSR1", data={"signal": "SIGUSR1", "final": False})], ""),
        (60, [library(30, 40), Launched(0, 2, 1)], "50 of 60 steps"),
        (None, [Notice(0, "training-ended", "damaged", data={"done": "x"})], ""),
    ],
)
def test_success_before_the_planned_length_is_reported_and_a_failure_as_one(
    tell, steps, before, shortfall
):
    story = tell(job=JobSettings(steps=steps), healthy=50)
    for event in before:
        story.send(event)
    story.exit(0)

    early = ("SEV1", f"the job ended with code 0 after {shortfall}")
    assert newest(story) == (early if shortfall else ("INFO", "finished at step 49"))


@pytest.mark.parametrize(("signal", "by_drill"), [(9, True), (11, False)])
def test_a_process_that_a_drill_killed_is_not_looked_for_elsewhere(tell, signal, by_drill):
    killed = {"kind": "signal", "type": "SIGKILL", "cls": "killed", "leading": True}
    killed |= {"title": "killed, by what is unknown", "then": "look for who sent it"}
    drill = {"fault": "crash", "params": {"signal": signal}, "steps": 1}
    story = tell(healthy=50)
    story.notice("drill", "drill crash begins at step 50", 0, 50, drill)
    story.notice("failure", "SIGKILL", 0, data=killed)
    story.exit(-9)
    assert ("a drill ended it" in messages(story)[-1]["verdict"]) == by_drill
    (note,) = story.kinds("note", "failure")
    assert note.data["details"]["cls"] == ("drill" if by_drill else "killed")

    story.launch(2, 1)
    assert story.state.job.drill_signal == ""


@pytest.mark.parametrize(
    ("damaged", "then"),
    [
        ([39, 49], "no checkpoint of this run is good"),
        ([49], "use ckpt-39 of step 39 instead"),
        ([39], ""),
    ],
)
def test_a_damaged_last_checkpoint_is_reported(tell, damaged, then):
    """No frame follows in which a rule could see it; an older one that was torn is no matter."""
    story = tell(healthy=50)
    for step in (39, 49):
        is_good = step not in damaged
        save(story, f"ckpt-{step}", step, ok=is_good, damage="" if is_good else "torn")
    story.exit(0)

    title = "finished at step 49, and the newest checkpoint is damaged"
    assert newest(story) == (("SEV1", title) if then else ("INFO", "finished at step 49"))
    assert then in str(messages(story)[-1])


@pytest.mark.parametrize(
    ("losses", "steps", "title"),
    [
        ([NAN], None, "finished at step 50, and its loss is NaN or Inf from step 50 on"),
        ([2.0], 60, "the job ended with code 0 after 51 of 60 steps"),
        (
            [NAN, NAN],
            60,
            "the job ended with code 0 after 52 of 60 steps, its loss NaN or Inf from step 50 on",
        ),
    ],
)
def test_a_damaged_last_checkpoint_hides_nothing_worse(tell, losses, steps, title):
    """Of an end that looks good: whoever starts it again must know both."""
    story = tell(job=JobSettings(steps=steps), healthy=50)
    save(story, "ckpt-1", 39)
    save(story, "ckpt-2", 49, ok=False, damage="torn")
    story.frames(*losses)
    story.exit(0)

    assert newest(story) == ("SEV1", title)
    damage = "; the newest checkpoint, ckpt-2 in /c/ckpt-2, is damaged: torn"
    assert messages(story)[-1]["verdict"].endswith(damage)
    assert ("ckpt-1 of step 39 (" in str(messages(story)[-1])) == (NAN in losses)


@pytest.mark.parametrize("code", [0, -15])
def test_a_damaged_last_checkpoint_is_told_behind_a_stop_of_the_policy(tell, code):
    """With code 0 as well: whoever stopped it, the next start would load the damaged one."""
    rule = one_rule(above("train_loss_raw", 5.0), "SEV1", "end")
    books = {"end": runbook_of("end", Stop())}
    story = tell(**rule, runbooks=books, answer=lambda key: None, healthy=50)
    save(story, "ckpt-1", 49, ok=False, damage="torn")
    story.frames(8.0)
    story.exit(code)
    stop = story.kinds("intent")[-1].data["action"]["id"]
    story.finish(stop, {"exit_code": 78, "returncode": code})

    title = "the job is DOWN: supervise stopped it at step 50, as the policy says"
    assert newest(story) == ("SEV1", title)
    damage = "; the newest checkpoint, ckpt-1 in /c/ckpt-1, is damaged: torn"
    assert messages(story)[-1]["verdict"].endswith(damage)


@pytest.mark.parametrize("damaged", [1, 3])
def test_of_checkpoints_without_a_step_the_last_one_saved_is_the_newest(tell, damaged):
    """Not the first one, nor the last verdict: the newest is verified before the others."""
    story = tell(healthy=50)
    for number in (1, 3, 2):
        ok = number != damaged
        save(story, f"ckpt-{number}", -1, ok=ok, damage="" if ok else "torn")
    story.exit(0)

    ckpt = story.state.checkpoints.newest()
    assert ckpt is not None
    assert ckpt.id == "ckpt-3"
    assert newest(story)[0] == ("SEV1" if damaged == 3 else "INFO")


def test_of_files_of_one_save_without_a_step_the_damaged_one_counts(tell):
    """As the weights beside the optimizer; that of an older save does not."""
    story = tell(healthy=50)
    save(story, "ckpt-1", -1, save=1, ok=False, damage="torn")
    save(story, "ckpt-2", -1, save=1)
    assert story.state.checkpoints.newest().id == "ckpt-1"
    save(story, "ckpt-3", -1, save=3)
    assert story.state.checkpoints.newest().id == "ckpt-3"


def test_a_crash_behind_a_damaged_checkpoint_says_so_where_it_names_the_good_one(tell):
    story = tell(healthy=50)
    for step in (39, 49):
        save(story, f"ckpt-{step}", step, ok=step == 39, damage="torn" * (step == 49))
    story.exit(3)

    assert newest(story) == ("SEV1", "the job is DOWN: it ended with code 3 at step 49")
    assert "; ckpt-49 of step 49 is newer, but damaged: torn)" in str(messages(story)[-1])


# ── a launch that goes on in a later epoch than it came from is SEV1 ──────────────────────────────


NAMES = ("loss", "epoch")
EPOCH_STEPS = 40  # of an epoch


def train(story, first, last, epoch_of):
    story.step = first - 1
    story.rows(*({"loss": 2.0, "epoch": epoch_of(step)} for step in range(first, last)))


def launch_again(story):
    story.attempt += 1
    story.exit(1)
    story.launch(2, story.attempt)
    story.announce(0, 1, 2)


@pytest.mark.parametrize(
    ("again", "told"),
    [
        (lambda step: step / EPOCH_STEPS, False),  # it goes on where it was
        (lambda step: (step - 48) / EPOCH_STEPS + 1.0, False),  # the epoch starts again
        (lambda step: (step - 48) / EPOCH_STEPS + 2.0, True),  # 48 of 40 is 1.2
        (lambda step: (step - 48) / EPOCH_STEPS + 1.5, False),  # a part of it
    ],
)
def test_the_rest_of_an_epoch_that_is_given_up_is_reported(tell, again, told):
    story = tell(names=NAMES)
    train(story, 0, 60, lambda step: step / EPOCH_STEPS)
    launch_again(story)
    train(story, 48, 70, again)

    text = "the restart skipped 0.8 epochs: step 48 is in 2.00, and 1.20 was expected"
    assert ([m["title"] for m in messages(story)][-1] == text) is told


def test_whole_epochs_and_short_launches_tell_nothing(tell):
    story = tell(names=NAMES)
    train(story, 0, 60, lambda step: float(step // EPOCH_STEPS))
    launch_again(story)
    train(story, 48, 53, lambda step: 7.0 + step / EPOCH_STEPS)
    launch_again(story)
    train(story, 50, 90, lambda step: 9.0 + step / EPOCH_STEPS)
    story.attempt += 1
    train(story, 50, 90, lambda step: 11.0 + step / EPOCH_STEPS)

    assert not [m["title"] for m in messages(story) if "skipped" in m["title"]]


# ── what people are told when the record of the run has no space ──────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "acts", "severity"),
    [
        ("record-space-short", True, "SEV1"),
        ("unprotected", True, "SEV1"),
        ("record-space-short", False, "SEV2"),
    ],
)
def test_every_channel_is_told_what_to_free_unless_the_run_is_only_observed(
    tell, kind, acts, severity
):
    story = tell()
    data = {"need_bytes": 19_000_000, "reserve_bytes": 18_000_000, "seconds": 720}
    data |= {"mount": "/data", "runs": "/data/runs", "acts": acts}
    story.notice(kind, "the disk of /data/runs/a: No space left on device", data=data)
    message = messages(story)[-1]

    assert (message["severity"], message.get("to_all", False)) == (severity, acts)
    assert message["next"].startswith(
        "free 19 MB on /data; what fills it: du -xm /data | sort -n | tail; "
        "old runs: supervise gc --older-than 1d /data/runs"
    )
    reserve = "a reserve of 18 MB, about 12 min at this rate, and actions go on"
    assert (reserve in message["verdict"]) == (kind == "record-space-short" and acts)
    assert acts or "nothing is acted on" not in message["verdict"]


@pytest.mark.parametrize(
    ("losses", "severity"),
    [
        ([2.0, NAN], "SEV1"),
        ([2.0, float("inf"), NAN, None], "SEV1"),
        ([NAN, 2.0], "INFO"),
        ([2.0, 2.0], "INFO"),
    ],
)
def test_a_job_that_finishes_with_a_loss_that_is_no_number_has_not_ended_well(
    tell, losses, severity
):
    story = tell(healthy=40)
    save(story, "ckpt-1", 30)
    story.frames(*losses)
    story.exit(0)

    last = messages(story)[-1]
    assert (last["kind"], last["severity"]) == ("finished", severity)
    if severity == "SEV1":
        assert last["title"].endswith("its loss is NaN or Inf from step 41 on")
        assert "ckpt-1 of step 30" in " ".join(step["text"] for step in last["steps"])


def test_a_last_update_that_was_skipped_did_the_weights_no_harm(tell):
    names = ("train_loss_raw", "update_skipped")
    story = tell(names=names)
    story.rows(*[{"train_loss_raw": 2.0, "update_skipped": 0.0}] * 40)
    story.rows({"train_loss_raw": NAN, "update_skipped": 1.0})
    story.exit(0)

    assert messages(story)[-1]["severity"] == "INFO"


def test_a_loss_that_never_fell_has_nothing_to_recover_to(tell):
    """As in reinforcement learning, where it rises with the return."""
    detectors = {"jumps": Threshold("train_loss_raw", gt=5.0), "falls": Descent("train_loss_raw")}
    for fall, status in ((0.0, Status.JOB_ENDED), (0.02, Status.UNRECOVERED)):
        story = tell(**rules_of(detectors, ("jumps", "SEV2")))
        story.frames(*[4.0 - fall * n + 0.01 * (n % 3) for n in range(120)])
        story.frames(7.0, 7.1, times=60)
        story.exit(0)
        closed = story.kinds("incident", "closed")[-1]

        assert closed.spike.no_objective is (fall == 0.0)
        head = {"actor": "engine", "seq": 0, "event": 0, "mono_ns": 0, "wall": None}
        assert status_of([Record.decode(decision_record(closed) | head)]) == status
