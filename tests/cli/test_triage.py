"""supervise triage: where a score that got worse comes from, in a strict order."""

from __future__ import annotations

import json

import pytest

from supervise.core.model import Announced, Event, Exited, Frame, LateFrame, Launched

NAMES = (
    *("train_loss_raw", "val_loss", "eval_artifact_hash", "batch_token_entropy"),
    *("batch_unique_ratio", "max_attn_logit", "grad_global_norm", "batch_pad_fraction"),
    "checkpoint_proved",
)
STAGES = ["harness", "data", "internals", "architecture"]


def run_of(worse=True, without=(), **changes) -> list[Event]:
    """160 steps, an evaluation every 10, whose score is best at step 79; `changes`: since then."""
    events: list[Event] = [Launched(1, 2**22 + 7, 0), Announced(2, 0, 1, 2**22 + 7, NAMES)]
    for step in range(160):
        values = {
            "train_loss_raw": 2.0 + 0.01 * (step % 7),
            "batch_token_entropy": 3.0 + 0.001 * (step % 5),
            "batch_unique_ratio": 0.5,
            "max_attn_logit": 20.0 + 0.1 * (step % 3),
            "grad_global_norm": 1.0 if step < 100 else 0.2,
            "batch_pad_fraction": 10.0 + 0.01 * (step % 3),
        }
        if step % 10 == 9:
            values["val_loss"] = 3.0 - 0.01 * step + worse * 0.02 * max(0, step - 79)
            values["eval_artifact_hash"], values["checkpoint_proved"] = 7.0, 1.0
        if step > 79:
            values |= {name: value for name, value in changes.items() if name in values}
        row = tuple(None if name in without else values.get(name) for name in NAMES)
        events.append(Frame(10 + step * 1_000_000, 0, 0, step, row))
    beside = {"checkpoint_unknown": 0.0, "eval_artifact_hash": 5.0}  # not the job's own number
    if "eval_artifact_hash" not in without:
        events += [LateFrame(10**9, "checkpoint", 0, step, beside) for step in (39, 99)]
    return [*events, Exited(10**9, 0)]


@pytest.mark.parametrize(
    ("changes", "excluded", "record"),
    [
        (
            {"eval_artifact_hash": 8.0, "batch_token_entropy": 2.0},
            0,
            "evaluation: eval_artifact_hash changed at step 89",
        ),
        ({"checkpoint_proved": 0.0}, 0, "weights: checkpoint_proved changed at step 89"),
        (
            {"batch_token_entropy": 2.0, "max_attn_logit": 90.0},
            1,
            "batch_token_entropy 3.002 → 2",
        ),
        ({"max_attn_logit": 90.0}, 2, "max_attn_logit 20.1 → 90"),
        ({}, 3, "experts"),
    ],
    ids=["evaluation", "weights", *STAGES[1:]],
)
def test_the_first_that_is_not_excluded_is_where_to_look(
    supervise, recorded, changes, excluded, record
):
    run = recorded(run_of(**changes), end=0)
    found = json.loads(supervise("triage", "--json", run.path)[1])
    code, out, _ = supervise("triage", run.path)

    assert code == 0
    assert (found["metric"], found["good"], found["bad"]) == ("val_loss", 79, 159)
    assert [stage["stage"] for stage in found["stages"]] == STAGES
    verdicts = [stage["verdict"] for stage in found["stages"]]
    assert verdicts[:excluded] == ["excluded"] * excluded
    assert verdicts[excluded] == ("found" if changes else "not known")
    assert set(verdicts[excluded + 1 :]) <= {"later"}
    first = found["stages"][excluded]
    moved = [c["metric"] for check in first["checks"] for c in check["changes"] if c["moved"]]
    assert moved == list(changes)[:1]
    assert found["next"] == first["command"]
    assert record in out and f"    {first['command']}" in out.splitlines()
    if changes:  # an architecture is not changed before all else is excluded
        assert "canary" not in out and f"architecture later, behind {first['stage']}" in out


def test_what_is_not_on_record_is_asked_and_not_passed_over(supervise, recorded):
    events = run_of(batch_token_entropy=2.0, without=("eval_artifact_hash",))
    run = recorded(events, end=0)
    out = supervise("triage", run.path)[1]
    found = json.loads(supervise("triage", "--json", run.path)[1])

    assert "1 harness      not known" in out
    assert "compare tokenizer, prompts, decoding, data and code of both evaluations:" in out
    assert "2 data         found; harness is not excluded" in out
    assert "3 internals    later, behind data" in out
    assert found["next"].startswith("supervise checkpoints"), "the order is strict"


def test_each_check_that_the_record_cannot_answer_has_its_reason_and_its_command(
    supervise, recorded
):
    run = recorded(run_of(batch_pad_fraction=11.0), end=0)
    unseen = {"batch_ids_outside": "the model has no nn.Embedding"}
    status = {"state": "OVER", "ranks": {"0": {"unseen": unseen}}}
    (run.path / "state.json").write_text(json.dumps(status))
    data = json.loads(supervise("triage", "--json", run.path)[1])["stages"][1]
    out = supervise("triage", run.path)[1].splitlines()

    seen = {check["name"]: [c["metric"] for c in check["changes"]] for check in data["checks"]}
    assert seen.pop("tokens") == ["batch_token_entropy", "batch_unique_ratio"]
    assert seen.pop("lengths") == ["batch_pad_fraction"]
    assert seen == {name: [] for name in ("amount", "order", "ids", "sources", "corpus")}
    assert "2 data         excluded, but for amount, order, ids, sources, corpus" in out
    line = "    ids: not looked at (batch_ids_outside): the model has no nn.Embedding:"
    assert out[out.index(line) + 1] == "    supervise metrics show batch_ids_outside"
    spectra = next(line for line in out if "spectra: not looked at" in line)
    assert "add mechanisms: {}" in spectra
    assert "    supervise data check DATA --val VAL --baseline data.json" in out
    assert all(not check["absent"] or check["command"] for check in data["checks"])


def test_a_norm_that_fell_with_the_rate_is_no_finding(supervise, recorded):
    run = recorded(run_of(grad_global_norm=0.2, max_attn_logit=5.0), end=0)
    stages = json.loads(supervise("triage", "--json", run.path)[1])["stages"]

    assert [stage["verdict"] for stage in stages][:3] == ["excluded"] * 3


def test_without_a_score_the_last_good_step_is_asked_and_taken(supervise, recorded):
    without = ("val_loss", "eval_artifact_hash")
    run = recorded(run_of(batch_token_entropy=2.0, without=without), end=0)
    asked = supervise("triage", run.path)[1].splitlines()
    told = json.loads(supervise("triage", "--good", 79, "--json", run.path)[1])

    assert asked[0] == "no evaluation is on record"
    assert asked[-1].startswith("name the step of the last good evaluation: supervise triage")
    assert (told["metric"], told["before"], told["good"]) == ("", None, 79)
    out = supervise("triage", "--good", 79, run.path)[1].splitlines()
    assert out[0] == "compared before and since step 79; no evaluation is on record"
    assert "    tokens: batch_token_entropy 3.002 → 2" in out


def test_a_score_that_did_not_get_worse_is_said(supervise, recorded):
    run = recorded(run_of(worse=False), end=0)
    out = supervise("triage", run.path)[1]

    assert out.splitlines()[0].endswith("the newest is the best one")
    assert "supervise triage --good N" in out
    named = next(line for line in out.splitlines() if "eval_artifact_hash" in line)
    assert named.endswith(": nothing to compare: no last good evaluation before the newest:")
    assert "tokens: not looked at" in out and ": nothing to compare" in out.split("tokens: not")[1]

    early = supervise("triage", "--good", 1, run.path)[1]
    assert "(batch_seq_len_p50, batch_seq_len_p95, batch_pad_fraction): " in early
    assert "too few values before or since" in early.partition("lengths: not looked at")[2]
