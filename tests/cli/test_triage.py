"""supervise triage: where a score that got worse comes from, in a strict order."""

from __future__ import annotations

import json

import pytest

from supervise.core.model import Announced, Event, Exited, Frame, Launched

NAMES = (
    *("train_loss_raw", "val_loss", "eval_artifact_hash", "batch_token_entropy"),
    *("batch_unique_ratio", "max_attn_logit", "grad_global_norm"),
)
STAGES = ["harness", "data", "internals", "architecture"]


def run_of(changes=(), *, worse=True, without=()) -> list[Event]:
    """160 steps, an evaluation every 10, whose score is best at step 79; `changes`: since then."""
    events: list[Event] = [Launched(1, 2**22 + 7, 0), Announced(2, 0, 1, 2**22 + 7, NAMES)]
    for step in range(160):
        values = {
            "train_loss_raw": 2.0 + 0.01 * (step % 7),
            "batch_token_entropy": 3.0 + 0.001 * (step % 5),
            "batch_unique_ratio": 0.5,
            "max_attn_logit": 20.0 + 0.1 * (step % 3),
            "grad_global_norm": 1.0,
        }
        if step % 10 == 9:
            values["val_loss"] = (
                3.0 - 0.01 * step + (0.02 * (step - 79) if worse else 0.0) * (step > 79)
            )
            values["eval_artifact_hash"] = 7.0
        for name, value in changes if step > 79 else ():
            if name in values:
                values[name] = value
        row = tuple(None if name in without else values.get(name) for name in NAMES)
        events.append(Frame(10 + step * 1_000_000, 0, 0, step, row))
    return [*events, Exited(10**9, 0)]


@pytest.mark.parametrize(
    ("changes", "verdicts", "record"),
    [
        (
            [("eval_artifact_hash", 8.0), ("batch_token_entropy", 2.0)],
            ["found", "later", "later", "later"],
            "the evaluation itself changed at step 89",
        ),
        (
            [("batch_token_entropy", 2.0), ("max_attn_logit", 90.0)],
            ["excluded", "found", "later", "later"],
            "batch_token_entropy 3.002 → 2",
        ),
        (
            [("max_attn_logit", 90.0)],
            ["excluded", "excluded", "found", "later"],
            "max_attn_logit 20.1 → 90",
        ),
        ([], ["excluded", "excluded", "excluded", "not known"], "experts"),
    ],
    ids=STAGES,
)
def test_the_first_that_is_not_excluded_is_where_to_look(
    supervise, recorded, changes, verdicts, record
):
    run = recorded(run_of(changes), end=0)
    found = json.loads(supervise("triage", "--json", run.path)[1])
    code, out, _ = supervise("triage", run.path)

    assert code == 0
    assert (found["metric"], found["good"], found["bad"]) == ("val_loss", 79, 159)
    assert [stage["stage"] for stage in found["stages"]] == STAGES
    assert [stage["verdict"] for stage in found["stages"]] == verdicts
    first = next(stage for stage in found["stages"] if stage["verdict"] != "excluded")
    assert record in " ".join(first["record"])
    assert found["next"].endswith(first["command"])
    assert record in out and f"    {first['command']}" in out.splitlines()
    if first["stage"] != "architecture":
        assert "canary" not in out, "an architecture is not changed before all else is excluded"
        assert f"architecture later, behind {first['stage']}" in out


def test_what_is_not_on_record_is_asked_and_not_passed_over(supervise, recorded):
    """Without hashes of the evaluation the data are not blamed, however they moved."""
    events = run_of([("batch_token_entropy", 2.0)], without=("eval_artifact_hash",))
    run = recorded(events, end=0)
    out = supervise("triage", run.path)[1]

    assert "1 harness      not known" in out
    assert "compare tokenizer, prompts, decoding, data and code of both evaluations:" in out
    assert "2 data         later, behind harness" in out


def test_without_a_score_the_last_good_step_is_asked_and_taken(supervise, recorded):
    without = ("val_loss", "eval_artifact_hash")
    run = recorded(run_of([("batch_token_entropy", 2.0)], without=without), end=0)
    asked = supervise("triage", run.path)[1].splitlines()
    told = json.loads(supervise("triage", "--good", 79, "--json", run.path)[1])

    assert asked[0] == "no evaluation is on record"
    assert asked[-1].startswith("name the step of the last good evaluation: supervise triage")
    assert told["text"] == "compared before and since step 79; no evaluation is on record"
    assert told["stages"][1]["record"][0] == "batch_token_entropy 3.002 → 2"


def test_a_score_that_did_not_get_worse_is_said(supervise, recorded):
    run = recorded(run_of(worse=False), end=0)
    out = supervise("triage", run.path)[1]

    assert out.splitlines()[0].endswith("the newest is the best one")
    assert "supervise triage --good N" in out
