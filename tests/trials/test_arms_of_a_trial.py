"""What a trial does to the machine: environment, the log of verdicts."""

from __future__ import annotations

import pytest

from supervise.core.model import NOTHING, Payload
from supervise.errors import StoreError, TamperError
from supervise.trials import SUITE_LOG, VERDICT_LOG, arm_environment, cite_trial, open_log


def test_an_arm_is_offline_and_goes_on_with_nothing(tmp_path):
    before = {"PATH": "/bin", "WANDB_RUN_ID": "abc", "WANDB_MODE": "online", "WANDB_RESUME": "must"}

    found = arm_environment(before, tmp_path)

    assert found["PATH"] == "/bin"
    assert found["WANDB_MODE"] == "offline" and found["HF_HUB_OFFLINE"] == "1"
    assert found["WANDB_DIR"] == str(tmp_path)
    assert not {"WANDB_RUN_ID", "WANDB_RESUME"} & found.keys()


VERDICT = Payload({"verdict": "PASS", "effect": {"mean": 0.001}, "margin": 0.03, "runs": []})


def test_verdicts_are_kept_together_and_a_change_is_noticed(tmp_path):
    path = tmp_path / "audit.log"
    for verdict in ("PASS", "FAIL"):
        with open_log(path) as log:
            log.note(VERDICT_LOG, verdict, VERDICT.extended(verdict=verdict))

    found = cite_trial(path)

    assert (found["verdict"], found["record"], found["records"]) == ("FAIL", 1, 2)
    assert cite_trial(tmp_path) == found, "a directory stands for its log"
    assert found["trial"].startswith("canary-") and len(found["head"]) == 64
    path.write_bytes(path.read_bytes().replace(b'"verdict":"FAIL"', b'"verdict":"PASS"'))
    with pytest.raises(TamperError), open_log(path):
        pass
    with pytest.raises(TamperError):
        cite_trial(path)


def test_a_trial_without_a_result_cannot_be_cited(tmp_path):
    with open_log(tmp_path / "audit.log", SUITE_LOG) as log:
        log.note("suite_plan", "1 fault", NOTHING)

    with pytest.raises(StoreError, match="has no result of a trial"):
        cite_trial(tmp_path)


def test_the_log_of_a_run_is_left_alone(tmp_path, keep_run, make_frames):
    run = keep_run(make_frames(0, 1.0))

    with pytest.raises(StoreError, match="is the log of a run"), open_log(run.audit_path):
        pass
