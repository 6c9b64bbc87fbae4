"""Every kind of message: its facts, and the text that people read."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from supervise.core import NOTICES
from supervise.core.model import Advice, Lead, SpikeClass

CORE = Path(__file__).parents[2] / "supervisor" / "supervise" / "core"
INC = {"severity": "SEV1", "incident": "inc-1"}
RUN = {"severity": "SEV1"}
RULE = {"rule": "a.b", "expression": "x and y", "numbers": "loss 9 (limit 5)", "step": 7}
RULE_WHY = "rule a.b: x and y"
CHECK = Advice(Lead.NO_ACTION, "to look closer: supervise runbook nan")
DOWN = "the job is DOWN"
TEXT = {"text": "rank 0 said so"}
SPACE = TEXT | {"mount": "/d", "need_bytes": 200_000_000, "runs": "/d/runs"}
FREE = (
    "free 200 MB on /d; what fills it: du -xm /d | sort -n | tail; old runs: supervise gc "
    "--older-than 1d /d/runs"
)
COMES_BACK = (
    "protection comes back with the next start of the job; to go on from: supervise checkpoints RUN"
)
WIRING = {"rule": "a.b", "expression": "x and y", "names": "a.weight, 7 more", "made": "train.py:7"}
# Kind -> its facts, title, what, why, next.
TABLE = [
    (
        "RuleFires",
        INC | RULE | {"subject": "loss 9", "advice": CHECK},
        ("inc-1: loss 9 at step 7", "loss 9 (limit 5)", RULE_WHY, CHECK.text),
    ),
    (
        "RuleFiresAlone",
        RUN | RULE | {"subject": "loss 9"},
        ("loss 9 at step 7", "loss 9 (limit 5)", RULE_WHY, ""),
    ),
    (
        "RuleFiresBeside",
        RUN | RULE | {"subject": "Slow steps"},
        ("Slow steps at step 7", "loss 9 (limit 5)", RULE_WHY, ""),
    ),
    (
        "RuleIsBlind",
        INC | RULE | {"numbers": "no usable value"},
        ("inc-1: rule a.b is blind at step 7", "no usable value", "", ""),
    ),
    (
        "RuleGrows",
        INC | RULE,
        ("inc-1: worse than before at step 7", "loss 9 (limit 5)", RULE_WHY, ""),
    ),
    *(
        (
            kind,
            RUN | {"rule": "a.b", "changes": 7, "steps": 500},
            (
                "a.b is flapping",
                "7 changes in 500 steps",
                "",
                "no further notification until it settles or grows",
            ),
        )
        for kind in ("RuleFlapping", "RuleFlappingBeside")
    ),
    (
        "RuleSettles",
        RUN | {"rule": "a.b", "expression": "x and y", "steps": 501},
        ("a.b no longer flaps: it has been firing for 501 steps", "", RULE_WHY, ""),
    ),
    (
        "RuleWouldRun",
        INC | {"rule": "a.b", "mode": "shadow", "runbook": "soften"},
        (
            "inc-1: a.b",
            "",
            "",
            "shadow mode: nothing was changed; enforce would have run soften",
        ),
    ),
    (
        "Diagnosed",
        INC | {"spike": SpikeClass.PLATEAU, "summary": "the loss stays higher than before"},
        ("inc-1: diagnosis: new worse plateau", "the loss stays higher than before", "", ""),
    ),
    (
        "StillOpen",
        INC | {"headline": "loss 9"},
        (
            "inc-1: still open, and nobody has acknowledged it",
            "loss 9",
            "",
            "to end these reminders: supervise ack RUN",
        ),
    ),
    (
        "Held",
        INC | {"cause": "nothing helped", "status": "the job keeps training"},
        (
            "inc-1: automatic actions are off; a person is needed",
            "nothing helped; the job keeps training",
            "",
            "",
        ),
    ),
    ("StillHeld", RUN, ("automatic actions are still off; a person is needed", "", "", "")),
    (
        "NothingPossible",
        INC | {"headline": "code 1", "status": "", "runbook": "restart", "refusal": "no way"},
        ("inc-1: no automatic action is possible", "code 1", "restart: no way", ""),
    ),
    (
        "Closed",
        INC | {"outcome": "over", "summary": "the loss is back to normal"},
        ("inc-1: closed", "over; the loss is back to normal", "", ""),
    ),
    (
        "GivenUp",
        INC | {"cause": "nothing helped"},
        (
            "inc-1: given up",
            "nothing helped",
            "",
            "evidence is collected, and the job is ended",
        ),
    ),
    (
        "GivenUpIfIdle",
        INC | {"cause": "nothing helped"},
        (
            "inc-1: given up",
            "nothing helped",
            "",
            "evidence is collected, and the job is ended if it is idle",
        ),
    ),
    (
        "StillUnhelped",
        INC | {"steps": 20, "status": "the job keeps training", "headline": "loss 9"},
        (
            "inc-1: still no automatic action can help; a person is needed",
            "for 20 steps; the job keeps training",
            "loss 9",
            "",
        ),
    ),
    (
        "StillOff",
        INC | {"steps": 20, "status": "the job keeps training", "headline": "loss 9"},
        (
            "inc-1: automatic actions are still off; a person is needed",
            "for 20 steps; the job keeps training",
            "loss 9",
            "",
        ),
    ),
    (
        "ApprovalAsked",
        INC
        | {
            "runbook": "soften",
            "cause": "a.b: loss 9",
            "plan": "pause, resume",
            "request": "ask-1",
            "timeout_s": 900.0,
            "consequence": "it runs",
            "status": "the job keeps training",
        },
        (
            "inc-1: approve soften?",
            "a.b: loss 9",
            "plan: pause, resume",
            "supervise approve RUN ask-1 (or: supervise deny RUN ask-1); without an answer "
            "within 900 s of this message, it runs; the job keeps training meanwhile",
        ),
    ),
    (
        "ApprovalUnneeded",
        INC | {"runbook": "soften", "request": "ask-1", "summary": "the loss is back to normal"},
        (
            "inc-1: soften is no longer needed; ask-1 still waits",
            "the loss is back to normal",
            "",
            "",
        ),
    ),
    (
        "ActionStarts",
        INC | {"runbook": "soften", "cause": "a.b: loss 9"},
        ("inc-1: automatic action started: soften", "", "a.b: loss 9", ""),
    ),
    (
        "EvidenceOf",
        INC | {"headline": "no heartbeat for 121 s", "standstill": "rank 2 waits"},
        (
            "inc-1: no heartbeat for 121 s",
            "rank 2 waits",
            "",
            "",
        ),
    ),
    (
        "UndoFailed",
        INC | {"error": "no answer", "consequence": "it may affect the next one"},
        ("inc-1: undoing an action failed", "no answer", "", "it may affect the next one"),
    ),
    (
        "CommandFailed",
        INC | {"operator": "anna", "error": "no savepoint"},
        ("inc-1: command of anna failed", "no savepoint", "", ""),
    ),
    (
        "ActionWithdrawn",
        INC | {"runbook": "stop", "cause": "it makes progress", "headline": "no step"},
        (
            "inc-1: stop is not carried out",
            "it makes progress",
            "no step",
            "",
        ),
    ),
    (
        "RecoveredSoFar",
        INC | {"steps": 100, "proof": "loss 2.4 (2.4 before)"},
        (
            "inc-1: recovered so far; watched for 100 more steps",
            "loss 2.4 (2.4 before)",
            "",
            "",
        ),
    ),
    (
        "CheckpointAwaited",
        INC | {"runbook": "restart", "before_step": 50},
        (
            "inc-1: restart waits for a good checkpoint",
            "",
            "",
            "checkpoints from before step 50 are verified at once, the newest first; the "
            "relaunch follows the first good one",
        ),
    ),
    (
        "PausedForCheckpoint",
        INC | {"candidates": 3, "before_step": 50, "runbook": "restart"},
        (
            "inc-1: the job is paused while a checkpoint is verified",
            "3 from before step 50 to verify, the newest first",
            "",
            "nothing to do; restart follows the first good one; to let the job train on "
            "instead: supervise resume RUN",
        ),
    ),
    (
        "PauseOver",
        RUN | {"step": 7, "cause": "the lease is over"},
        (
            "the pause ended without a resume; the job trains on from step 7",
            "the lease is over",
            "",
            "to pause it again: supervise pause RUN",
        ),
    ),
    (
        "RanksDiffer",
        INC | {"headline": "rank 1 did not roll back"},
        (
            "inc-1: the ranks differ",
            "rank 1 did not roll back",
            "",
            "no command can repair that: supervise stop RUN, and start it from a checkpoint",
        ),
    ),
    (
        "RanksUnfenceable",
        RUN | {"cause": "rank 1 is stalled"},
        (
            "the ranks cannot be changed together: no rollback, rate or pause from here on",
            "",
            "rank 1 is stalled",
            "for a relaunch: job.relaunch, which supervise init shows, then supervise reload RUN",
        ),
    ),
    (
        "RanksUnfenceableRelaunch",
        RUN | {"cause": "rank 1 is stalled"},
        (
            "the ranks cannot be changed together: no rollback, rate or pause from here on",
            "",
            "rank 1 is stalled",
            "a relaunch is left; to see from where: supervise checkpoints RUN",
        ),
    ),
    (
        "GoesOnOtherwise",
        RUN | {"things": "another rate", "differences": "rate 1", "consequence": "it goes on"},
        ("since its restart the job has another rate", "rate 1; it goes on", "", ""),
    ),
    (
        "WithoutGradient",
        RUN | WIRING | {"count": 8, "total": 10},
        (
            "8 of 10 tensors of the optimizer never had a gradient: a.weight, 7 more",
            "these weights stay as they began, while the others train",
            RULE_WHY,
            "look between them and the loss for detach(), no_grad(), .data, or a reentrant "
            "checkpoint whose input needs no gradient (use_reentrant=False mends that); the "
            "optimizer is made at train.py:7",
        ),
    ),
    (
        "LossCutOff",
        RUN | WIRING | {"made": ""},
        (
            "no tensor of the optimizer ever had a gradient: a.weight, 7 more",
            "all weights stay as they began: the job runs and learns nothing",
            RULE_WHY,
            "check that backward() is called, and that the loss has its graph: no item(), detach() "
            "or new tensor in between",
        ),
    ),
    (
        "WithoutOptimizer",
        RUN | WIRING | {"count": 8},
        (
            "8 tensors of the model have gradients and are in no optimizer: a.weight, 7 more",
            "these weights stay as they began, while the others train",
            RULE_WHY,
            "give them to the optimizer, and make it when the model is complete, or freeze them by "
            "requires_grad_(False); it is made at train.py:7",
        ),
    ),
    (
        "OptimizerOfOthers",
        RUN | WIRING | {"count": 8},
        (
            "the optimizer holds tensors of another model; those of the one that trains are in "
            "none: a.weight, 7 more",
            "the model stays as it began: 8 tensors have gradients and never change",
            RULE_WHY,
            "make the optimizer after the model is made, loaded, copied or wrapped; it is made at "
            "train.py:7",
        ),
    ),
    (
        "ModelInEval",
        RUN | WIRING,
        (
            "the model is in eval mode in the training steps: a.weight, 7 more",
            "dropout does nothing there, and normalization goes by old statistics",
            RULE_WHY,
            "call model.train() before the first step, and again after each evaluation",
        ),
    ),
    (
        "RoundedAway",
        RUN | WIRING | {"share": 85.4},
        (
            "85 % of the 16-bit weights do not move: a.weight, 7 more",
            "their updates are below half the spacing of the type, and are rounded away",
            RULE_WHY,
            "keep the weights in float32 and compute under torch.autocast, or keep a master copy",
        ),
    ),
    (
        "NormsAlone",
        RUN | WIRING | {"rows": 2.0},
        (
            "each rank's BatchNorm normalizes over 2 rows of its own",
            "its statistics are noisy, and those that are saved are of one rank",
            RULE_WHY,
            "before DistributedDataParallel: "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or GroupNorm",
        ),
    ),
    (
        "AlwaysClipped",
        RUN | WIRING | {"share": 100.0, "ratio": 65536.0, "course": "no", "scale": "65536"},
        (
            "the gradients are clipped in 100 % of the steps, by 7e+04; no",
            "updates are that many times smaller than the gradients ask for",
            RULE_WHY,
            "they are clipped while still multiplied by the loss scale 65536: call "
            "scaler.unscale_(optimizer) first; the clip is at train.py:7",
        ),
    ),
    (
        "WeightsStandStill",
        RUN | WIRING | {"ratio": 1e-7, "rate": 1e-9},
        (
            "a step moves the weights by 1e-07 of their size",
            "at this size they take a million steps to change",
            RULE_WHY,
            "check the learning rate (1e-09), the scale of the loss, and the clip",
        ),
    ),
    (
        "UpdatesTooLarge",
        RUN | WIRING | {"ratio": 2.0},
        (
            "each step moves the weights by 2 times their size",
            "nothing that they learned outlives a step",
            RULE_WHY,
            "lower the learning rate: supervise lr RUN 0.1; then check its schedule",
        ),
    ),
    (
        "EpochsSkipped",
        RUN | {"step": 7, "epoch": 3.0, "expected": 1.5, "skipped": 1.5},
        (
            "the restart skipped 1.5 epochs: step 7 is in 3.00, and 1.50 was expected",
            "the job trains on, and the data between is not trained on",
            "",
            "let the loader save where it is (a StatefulDataLoader), or resume from the end of an "
            "epoch: supervise checkpoints RUN",
        ),
    ),
    ("AsReported", RUN | TEXT, ("rank 0 said so", "", "", "")),
    (
        "PreemptSaved",
        RUN | TEXT | {"path": "/c/7", "signals": "SIGTERM"},
        ("rank 0 said so", "SIGTERM is passed on", "", "resume from /c/7"),
    ),
    (
        "PreemptSaved",
        RUN | TEXT,
        (
            "rank 0 said so",
            "the job is ended with exit code 75",
            "",
            "good checkpoints: supervise checkpoints RUN",
        ),
    ),
    *(
        (
            "PreemptFailed",
            RUN | TEXT | facts,
            ("rank 0 said so", what, "", "good checkpoints: supervise checkpoints RUN"),
        )
        for facts, what in (
            ({"step": -1}, "no step was made, so none is lost"),
            ({"step": 7}, "no checkpoint is verified: an end at step 7 may lose every step"),
            (
                {"step": 7, "checkpoint": "c-5", "checkpoint_step": 5},
                "an end at step 7 loses the steps since c-5 (step 5)",
            ),
        )
    ),
    (
        "PreemptUnavailable",
        RUN | TEXT,
        (
            "rank 0 said so",
            "signals are passed on at once, and no checkpoint is requested before the end",
            "",
            "",
        ),
    ),
    (
        "RollbackLost",
        RUN | {"cause": "the state is too large"},
        (
            "no rollback is possible from here on",
            "",
            "the state is too large",
            "for a relaunch: job.relaunch, which supervise init shows, then supervise reload RUN",
        ),
    ),
    (
        "RollbackLostRelaunch",
        RUN | {"cause": "the state is too large"},
        (
            "no rollback is possible from here on",
            "",
            "the state is too large",
            "a relaunch is left; to see from where: supervise checkpoints RUN",
        ),
    ),
    (
        "HostDoubted",
        RUN | TEXT,
        (
            "rank 0 said so",
            "the job is started all the same",
            "",
            "to look again: supervise doctor --health -- COMMAND",
        ),
    ),
    ("JobSuspended", RUN | TEXT, ("rank 0 said so", "no action is taken", "", "")),
    (
        "StartSlow",
        RUN | TEXT,
        (
            "rank 0 said so",
            "it is not stopped for this",
            "",
            "`supervise stop RUN` if it should have started",
        ),
    ),
    (
        "ProgramChanged",
        RUN | TEXT,
        (
            "rank 0 said so",
            "steps before and after it are of different programs; no action is taken",
            "",
            "if that is not intended: supervise stop RUN",
        ),
    ),
    (
        "OrphansFound",
        RUN | TEXT | {"consequence": "they hold memory", "command": "kill 7"},
        ("rank 0 said so", "they hold memory", "", "to end them: kill 7"),
    ),
    (
        "Unmonitored",
        RUN | TEXT | {"meaning": "no metrics from here on"},
        (
            "rank 0 said so",
            "no metrics from here on",
            "",
            "what a probe finds here: supervise doctor -- COMMAND",
        ),
    ),
    (
        "MetricsMissing",
        RUN | TEXT,
        ("rank 0 said so", "rules that read these metrics are not evaluated", "", ""),
    ),
    (
        "UpdatesDiscarded",
        RUN | TEXT,
        (
            "rank 0 said so",
            "the job runs and learns nothing, and no action inside it comes about",
            "",
            "`supervise stop RUN`; to go on from: supervise checkpoints RUN",
        ),
    ),
    (
        "LogFailure",
        RUN | {"meaning": "a GPU fell off", "text": "Xid 79", "remedy": "drain the host"},
        (
            "a line in a log of the job: a GPU fell off: Xid 79",
            "no action is taken for a line of a log",
            "",
            "drain the host",
        ),
    ),
    (
        "ThreadFailure",
        RUN | {"text": "ValueError"},
        (
            "a thread of the job ended with an error: ValueError",
            "the job goes on without it",
            "",
            "supervise status RUN shows whether steps are still made",
        ),
    ),
    ("MonitoredAgain", RUN | TEXT, ("the run is monitored again", "rank 0 said so", "", "")),
    ("StepsUnseen", RUN | TEXT, ("rank 0 said so", "these steps were not evaluated", "", "")),
    (
        "Acknowledged",
        INC | {"operator": "anna"},
        ("inc-1: acknowledged by anna", "reminders stopped", "", ""),
    ),
    (
        "RecordSpaceShort",
        RUN | SPACE | {"acts": True, "reserve_bytes": 8_000_000, "seconds": 600.0},
        (
            "no space is left for the record of this run",
            "it is written from a reserve of 8 MB, about 10 min at this rate, and actions go on; "
            "when it is used up, nothing is acted on any more",
            "rank 0 said so",
            FREE,
        ),
    ),
    (
        "RecordSpaceShort",
        RUN | SPACE | {"acts": False, "reserve_bytes": 8_000, "seconds": 60.0},
        (
            "no space is left for the record of this run",
            "it is written from a reserve of 8 kB, about 60 s at this rate",
            "rank 0 said so",
            FREE,
        ),
    ),
    (
        "RecordSpaceEnough",
        RUN | SPACE | {"acts": True},
        (
            "there is space for the record of this run again",
            "its reserve is whole again, and it has no gap",
            "rank 0 said so",
            "",
        ),
    ),
    (
        "RecordEnded",
        RUN | SPACE | {"acts": True},
        (
            "this run is not protected any more: nothing is acted on",
            "the job goes on, and what its rules find is reported",
            "rank 0 said so",
            f"{FREE}; {COMES_BACK}",
        ),
    ),
    (
        "RecordEnded",
        RUN | SPACE | {"acts": False, "need_bytes": None},
        (
            "the record of this run has ended, and nothing more of it is kept",
            "the job goes on, and what its rules find is reported",
            "rank 0 said so",
            COMES_BACK,
        ),
    ),
    *(
        (
            kind,
            RUN | {"error": "StoreError: gone"} | pid,
            (
                title,
                "the job goes on; nothing that goes wrong in it is reported, and no command is "
                "taken",
                "StoreError: gone; its traceback is in RUN/supervisor.log",
                then,
            ),
        )
        for kind, pid, title, then in (
            ("Unwatched", {}, "this run is not watched any more", COMES_BACK),
            (
                "Unprotected",
                {"pid": 7},
                "this run is not protected any more: nothing is acted on",
                "to go on protected now: kill -KILL 7 && supervise adopt RUN, unless a container "
                f"or a batch job ends with process 7; {COMES_BACK}",
            ),
        )
    ),
    ("EndMeant", RUN | {"end": "stopped", "outcome": "code 0"}, ("stopped", "code 0", "", "")),
    ("JobFinished", RUN | {"step": 7}, ("finished at step 7", "", "", "")),
    (
        "JobEndedEarly",
        RUN | {"shortfall": "7 of 9 steps"},
        (
            "the job ended with code 0 after 7 of 9 steps",
            "it reports success and is not complete; nothing asked it to stop",
            "",
            "read the end of the job's output, then its data and its stop condition",
        ),
    ),
    (
        "JobStopped",
        RUN | {"step": 7, "outcome": "signal 15"},
        (f"{DOWN}: supervise stopped it at step 7, as the policy says", "signal 15", "", ""),
    ),
    (
        "JobStoppedIn",
        RUN | {"step": 7, "outcome": "signal 15", "headline": "no step"},
        (
            f"{DOWN}: supervise stopped it at step 7, as the policy says",
            "no step; signal 15",
            "",
            "",
        ),
    ),
    (
        "JobFailed",
        RUN | {"end": "ended with code 1", "cause": "not restarted", "others": "3 others"},
        (f"{DOWN}: it ended with code 1", "3 others; not restarted", "", ""),
    ),
    (
        "JobFailed",
        RUN | {"end": "ended", "failure": "MemoryError", "meaning": "out of memory"},
        (f"{DOWN}: it ended", "MemoryError; out of memory", "", ""),
    ),
    (
        "RestartFailed",
        RUN | {"end": "ended", "cause": "it ended there before", "command": "--resume c"},
        (
            f"{DOWN}: its restart ended",
            "it ended there before",
            "it was started with --resume c",
            "",
        ),
    ),
    (
        "HostUnfit",
        RUN | {"end": "ended", "cause": "a GPU is gone"},
        (
            f"{DOWN}: it ended, and cannot run on this host",
            "a GPU is gone",
            "",
            "repair or free what is named, or start the job on another host; to look again: "
            "supervise doctor --health -- COMMAND",
        ),
    ),
    (
        "CheckpointDamaged",
        RUN | {"end": "it ended", "checkpoint": "c-7", "path": "/c", "damage": "cut"},
        (
            "it ended, and the newest checkpoint is damaged",
            "c-7 in /c cannot be used",
            "cut",
            "",
        ),
    ),
    (
        "PolicyNotReloaded",
        RUN | {"refusal": "line 3"},
        (
            "the policy was not reloaded",
            "line 3",
            "",
            "the previous policy stays in force",
        ),
    ),
    (
        "PolicyInForce",
        RUN | {"name": "nano", "mode": "enforce", "changes": "one rule"},
        ("policy nano (enforce) was reloaded", "one rule", "", ""),
    ),
    *(
        (
            "ChannelFailed",
            RUN | {"channel": "slack", "messages": count, "error": "403", "silent_s": silent_s},
            (
                title,
                what,
                "notifications are not reaching this channel; the run itself goes on as before",
                "check the settings and the service of slack; state of the channels: supervise "
                "status RUN",
            ),
        )
        for count, silent_s, title, what in (
            ("1 message was", None, "slack: 1 message was not delivered", "last error: 403"),
            (
                "2 messages were",
                21.2,
                "slack: 2 messages were not delivered",
                "no message was delivered for 21 s; last error: 403",
            ),
        )
    ),
    (
        "ChannelRecovered",
        RUN | {"channel": "slack"},
        ("slack works again", "the waiting messages are being delivered", "", ""),
    ),
    (
        "ChannelRecovered",
        RUN | {"channel": "slack", "lost": 2},
        ("slack works again", "2 messages were lost", "", "read them with: supervise why RUN"),
    ),
    (
        "Digest",
        RUN | {"messages": "2 messages", "titles": "[SEV1] a · [SEV2] b"},
        (
            "digest of 2 messages",
            "[SEV1] a · [SEV2] b",
            "they waited for the end of quiet hours, or were too many in an hour",
            "list all of them with: supervise audit show RUN",
        ),
    ),
]


@pytest.mark.parametrize(("kind", "facts", "texts"), TABLE, ids=[row[0] for row in TABLE])
def test_the_facts_of_a_kind_make_its_text(kind, facts, texts):
    notice = NOTICES[kind](**facts)

    assert (notice.title, notice.verdict, notice.reason, notice.then.text) == texts


def test_every_kind_is_in_the_table():
    assert {kind for kind, _, _ in TABLE} == {*NOTICES}


def test_no_other_module_makes_the_text_of_a_message():
    """Nothing but `MessageDraft.of` makes a draft, which it makes of a notice."""
    made: Counter[str] = Counter()
    for path in CORE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                made[path.stem] += getattr(node.func, "id", "") in ("MessageDraft", "MessageText")

    assert +made == {"run_state": 1}
