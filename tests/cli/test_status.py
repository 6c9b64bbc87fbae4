import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from supervise import system
from supervise.core.model import Announced, Exited, Frame, Launched
from tests.support.recorded_run import WALL

OPEN = {"id": "inc-2", "severity": "SEV1", "phase": "verifying", "runbook": "soften", "acked": ""}
OPEN |= {"headline": "loss 9.7 is 8.2 sigma\033[31m above 2.6", "rules": ["loss_spike.spike"]}
RANK = {"pid": 77, "phase": "step", "silent_s": 0.1, "rollback": "ready", "overhead": 0.0312}
RANK |= {"paused": False, "savepoints": [100, 125], "thinned": {"updates": 8, "attention": 400}}
RANK |= {"collectors": {"loss": "on", "tokens": "off: no input ids seen"}}
TRAINING = {"loss": 2.625, "loss_metric": "train_loss_raw", "steps_per_s": 12.5}
TRAINING |= {"tokens_per_s": 51200.0, "planned_steps": 600, "planned_by": "--steps 600"}
TRAINING |= {"eta_s": 36, "curve": {"steps": [0, 50, 100], "loss": [4.0, "NaN", 2.5]}}
STATE = {"state": "probation", "mode": "enforce", "policy": "nano", "step": 152, "attempt": 1}
STATE |= {"updated_wall": WALL, "messages_to": ["console", "slack"]}
STATE |= {
    "incidents": {"opened": 2, "open": OPEN},
    "budgets": {"all": "1/6", "rollback": "0/2"},
    "rules": {"a": "OK", "b": "OK", "nonfinite.loss": "firing", "amp.scale": "inactive"},
    "ranks": {"0": RANK},
    "training": TRAINING,
    "can": {"rollback": "yes, weights and loop", "relaunch": "not configured"},
    "last_decision": {"kind": "verify", "reason": "loss is back in its band"},
}


def test_a_live_run_is_told_on_one_screen(supervise, recorded, alive, monkeypatch):
    run = recorded()
    run.write_json("state.json", {**STATE, "updated_wall": system.wall_time()})
    alive(run)
    monkeypatch.setenv("COLUMNS", "200")

    code, out, err = supervise("status", run.path)

    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:14] == [
        f"run         {run.id}",
        "job         running, supervised",
        "verdict     recovered so far, on probation (inc-2 SEV1)",
        "incident    inc-2 SEV1 verifying: loss 9.7 is 8.2 sigma [31m above 2.6 (runbook soften)",
        "step        152 of 600, attempt 1",
        "loss        2.625 (train_loss_raw)  █!▁",
        "speed       12.5 steps/s, 51.2k tokens/s",
        "time left   36 s (by --steps 600)",
        "state       probation (mode enforce)",
        "protection  rollback: yes, weights and loop · relaunch: not configured",
        "budgets     all 5 of 6 left, rollback 2 of 2 left",
        "channels    no trouble with console, slack",
        "incidents   2, one open",
        "rules       firing: nonfinite.loss; inactive: amp.scale; OK: 2",
    ]
    assert (
        "rank 0      phase step, silent_s 0.1, pid 77, rollback ready, savepoints 100; 125," in out
    )
    assert ", the probe takes 3.1 % of a step; tokens off: no input ids seen" in out
    assert (
        "sampling    update norm every 8 steps, attention every 400 steps, for their cost: what "
        "only they show is seen that much later" in lines
    )
    assert "last        verify: loss is back in its band" in lines
    assert "\033" not in out


def test_json_is_one_document_with_the_life_of_both(supervise, recorded, alive):
    run = recorded()
    run.write_json("state.json", STATE)
    alive(run)

    code, out, err = supervise("status", "--json", run.path)

    assert (code, err) == (0, "")
    found = json.loads(out)
    (incident,) = found.pop("gravest")
    assert (incident["id"], incident["severity"], incident["phase"]) == ("inc-1", "SEV0", "closed")
    silent = r"unknown: the supervisor has written no status for \d+ min"
    assert re.fullmatch(silent, found.pop("verdict"))
    life = {"supervisor": "running", "job": "running", "exit_code": None}
    assert found["training"] | TRAINING == found["training"]
    assert found | {**STATE, **life, "run": run.id, "training": found["training"]} == found


@pytest.mark.parametrize(
    ("returncode", "text", "code"),
    [
        (-9, "ended with signal 9 (SIGKILL)", 137),
        (-2, "ended with signal 2 (SIGINT)", 130),
        (-40, "ended with signal 40", 168),
        (130, "ended with code 130", 130),
        (137, "ended with code 137", 137),
    ],
)
def test_an_ended_job_is_said_to_have_ended(supervise, recorded, returncode, text, code):
    """In the words of its card, both in the row of the job and in the verdict."""
    run = recorded([Launched(1, 2**22 + 7, 0), Exited(2, returncode)], end=code)
    run.write_json("state.json", STATE)

    out = supervise("status", run.path)[1]
    rows = dict(line.split(None, 1) for line in out.splitlines() if line[0] != " ")
    assert rows["job"] == text
    assert re.fullmatch(rf"{re.escape(text)}(;.*)?", rows["verdict"])
    found = json.loads(supervise("status", "--json", run.path)[1])
    assert (found["supervisor"], found["job"], found["exit_code"]) == ("gone", "ended", code)


def test_a_request_is_shown_with_a_command_to_paste(supervise, recorded, alive):
    run = recorded([Launched(1, os.getpid(), 0)], end=None)
    request = {"id": "ask-1", "runbook": "soften", "steps": [{"verb": "lr_scale", "args": {}}]}
    request |= {"left_s": 600, "on_timeout": "deny"}
    run.write_json("state.json", STATE | {"approvals": [request]})
    log = alive(run)

    out = " ".join(supervise("status", run.path)[1].split())
    text = f"ask-1: soften (lr_scale) waits for `supervise approve {run.path} ask-1`; "
    assert f"waiting {text}10 min left, then deny" in out
    log.close()


def test_a_journal_that_is_incomplete_is_told(supervise, recorded):
    run = recorded(
        [Launched(1, 2**22 + 7, 0), Exited(2, -9), Launched(3, 2**22 + 8, 1), Exited(4, 0)],
        fails_at=2,
        end=0,
    )

    out = " ".join(supervise("status", run.path)[1].split())
    assert "job ended with code 0" in out
    assert "record the journal is incomplete from event 2 on" in out


def test_what_is_known_of_a_job_without_a_supervisor(supervise, recorded):
    run = recorded([Launched(1, os.getpid(), 0)], end=None)
    run.write_json("state.json", STATE)
    text = f"running (pid {os.getpid()}), not supervised: its supervisor died"
    assert text in supervise("status", run.path)[1]

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    shutil.rmtree(run.path)
    run = recorded([Launched(1, gone.pid, 0)], end=None)
    text = f"exit status unknown; `supervise adopt {run.path}` tries to recover it"
    assert text in supervise("status", run.path)[1]
    assert json.loads(supervise("status", "--json", run.path)[1])["job"] == "lost"


def test_an_end_without_a_supervisor_is_told_with_what_adopting_gets(supervise, recorded, alive):
    run = recorded([Launched(1, 2**22 + 7, 0), Exited(2, 0)], end=None)
    died = "ended with code 0; the supervisor died"
    assert f"{died} before the run ended: `supervise adopt" in supervise("status", run.path)[1]

    log, body = alive(run), {"reason": "", "data": {"action": {"verb": "relaunch"}}}
    log.append("intent", actor="app", at_ns=3, wall=WALL, step=9, body=body, sync=False)
    log.close()
    assert f"{died} during a relaunch: `supervise adopt" in supervise("status", run.path)[1]


def test_a_dead_supervisors_status_goes_on_to_the_end_of_its_journal(supervise, recorded):
    frames = [Frame(n, 0, 0, step, (2.0 + n, 9.0)) for n, step in enumerate(range(150, 156), 3)]
    names = ("train_loss_raw", "tokens")
    started = [Launched(1, 2**22 + 7, 0), Announced(2, 0, 1, 2**22 + 7, names)]
    run = recorded([*started, *frames], end=None)
    run.write_json("state.json", STATE | {"attempt": 0})

    found = json.loads(supervise("status", "--json", run.path)[1])

    assert (found["step"], found["training"]["loss"]) == (155, 10.0)
    assert found["training"]["curve"]["steps"] == [0, 50, 100, 153, 154, 155]
    assert found["ending"]["kind"] == "lost" and "can" not in found
    row = json.loads(supervise("runs", "--runs", run.path.parent, "--json")[1])[0]
    assert (row["step"], row["loss"], row["ending"]) == (155, 10.0, found["ending"])
    run.write_json("run.json", run.read_json("run.json") | {"host": "elsewhere"})
    row = json.loads(supervise("runs", "--runs", run.path.parent, "--json")[1])[0]
    assert (row["state"], row["loss"]) == ("unknown", STATE["training"]["loss"]), "it may be alive"
    run.write_json("state.json", STATE | {"attempt": 1})
    assert json.loads(supervise("status", "--json", run.path)[1])["step"] == STATE["step"]


def test_a_channel_that_does_not_deliver_is_told(supervise, recorded):
    run = recorded()
    how = {"undelivered": 3, "since_wall": "2026-01-05T10:11:12.345Z", "error": "500"}
    waiting = {"slack": {"waiting": 2, "held": 3}}
    changed = {"channels": {"webhook": how}, "messages_waiting": waiting}
    run.write_json("state.json", STATE | changed)

    out = " ".join(supervise("status", run.path)[1].split())

    assert (
        "channel webhook: 3 messages not delivered since 2026-01-05T10:11:12.345Z, last error: 500"
    ) in out
    assert "no trouble with console, slack; slack: 2 waiting, 3 held for a digest" in out


def test_a_job_whose_start_was_not_written_down_runs(supervise, recorded):
    """Its supervisor was killed in between: the job is known by the mark of the run."""
    run = recorded([], end=None)
    environ = {**os.environ, "SUPERVISE_LAUNCH": f"{run.id}:0"}
    job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environ)
    try:
        _, out, _ = supervise("status", run.path)
        assert f"running (pid {job.pid}), not supervised" in out
    finally:
        job.kill()
        job.wait()


def test_what_reorders_a_text_is_escaped_in_a_document(supervise, recorded):
    run = recorded()
    run.write_json("state.json", STATE | {"policy": "na\u202eno"})

    _, out, _ = supervise("status", "--json", run.path)

    assert "\u202e" not in out and json.loads(out)["policy"] == "na\u202eno"
