"""`supervise checkpoints`: the register as people read it."""

from __future__ import annotations

import fcntl
import json
import sys

import pytest

from supervise.checkpoints import Register, stamp_files
from supervise.store import RunDir
from tests.support import recorded_run

SPIKE = (*[2.0] * 40, 8.0, 7.0, *[2.0] * 20)


@pytest.fixture
def run(keep_run):
    """A run with a good checkpoint, one of weights only, and a bad one."""
    run = keep_run([]).path
    register = Register(run)
    good = {"bytes": 4_700_000, "state": "verified", "pinned": True}
    register.add("/data/out/a.pt", step=199, saved="2026-01-05T10:11:12.345Z", **good)
    register.add("/data/out/w.pt", state="verified", resumable="weights only")
    register.add("/data/out/b\033[31m.pt", attempt=1, state="bad", problems=["model.w has NaN"])
    register.write()
    return run


def test_the_register_is_a_table_or_json(run, supervise):
    code, out, _ = supervise("checkpoints", run)
    assert code == 0 and "\033" not in out
    first, weights, second = out.splitlines()[1:]
    assert first.split()[:7] == ["ckpt-1", "199", "0", "verified", "yes", "4.7", "MB"]
    assert "/data/out/w.pt; weights only" in weights
    assert "bad" in second and second.endswith("model.w has NaN")

    code, out, _ = supervise("checkpoints", "--json", run)

    assert code == 0
    assert [entry["id"] for entry in json.loads(out)] == ["ckpt-1", "ckpt-2", "ckpt-3"]


def test_a_run_that_saved_nothing_is_no_error_and_a_register_that_is_none_is_one(
    keep_run, supervise
):
    run = keep_run([]).path
    assert supervise("checkpoints", run)[:2] == (0, "no checkpoints\n")
    code, _, err = supervise("checkpoints", "--verify", run)
    assert code == 64 and "no checkpoint that could be verified" in err
    (run / "checkpoints.json").write_text("[]")
    code, _, err = supervise("checkpoints", run)
    assert code == 64 and "is not a register of checkpoints" in err


def test_an_evaluation_says_why_there_is_none(run, supervise):
    """Of a checkpoint that is bad, or of which the job reported no probe batch; or that is none."""
    code, out, _ = supervise("checkpoint", "eval", "/data/out/w.pt", "--run", run)
    bad = supervise("checkpoint", "eval", "ckpt-3", "--run", run, "--json")
    missing = supervise("checkpoint", "eval", "ckpt-4", "--run", run)

    assert code == 1 and out.startswith("UNKNOWN: nothing is known of checkpoint ckpt-2")
    assert bad[0] == 1 and "only a verified one" in json.loads(bad[1])["reason"]
    assert missing[0] == 64 and "supervise checkpoints" in missing[2]
    (held_out := run / "a=b.bin").touch()
    for val, why in (
        (["no.bin"], "there is no file"),
        (["n" * 300], "File name too long"),
        ([f"a={held_out}"] * 2, "has the name a"),
        ([f"a/b={held_out}"], "'a/b' is no name"),
    ):
        options = [part for each in val for part in ("--val", each)]
        refused = supervise("checkpoint", "eval", "ckpt-2", "--run", run, *options)
        assert refused[0] == 64 and why in refused[2]


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 1])
def test_the_newest_is_verified_on_request(keep_run, supervise, tmp_path, code):
    torch = pytest.importorskip("torch")
    register, path = Register(keep_run([]).path), tmp_path / "last.pt"
    torch.save({"w": torch.ones(2)}, path)
    if code:
        path.write_bytes(path.read_bytes()[:99])
    register.add("/data/out/a.pt", step=199, state="verified", present=False)
    register.add(str(path), step=299, bytes=path.stat().st_size)
    register.write()

    assert supervise("checkpoints", "--verify", tmp_path / "run")[0] == code
    newest = Register(tmp_path / "run").newest()
    assert newest is not None and newest.state == ("bad" if code else "verified")


def test_what_an_incident_made_suspect_is_not_for_going_back(keep_run, supervise, small):
    """The table, --json, the status and --resume-run say the same of it."""
    run = keep_run(recorded_run.make_frames(0, *SPIKE), code=78).path
    register = Register(run)
    register.add("/c/late.pt", step=60, state="verified", pinned=True)
    register.write()
    (run / "state.json").write_text(json.dumps({"state": "halted"}))
    late = "saved since the incident of step 40: not for going back"
    options = ("--policy", small, "--run-dir", run, "--resume-run")

    status = json.loads(supervise("status", "--json", run)[1])
    refused = supervise("run", *options, "--", "true")

    assert supervise("checkpoints", run)[1].rstrip().endswith(f"/c/late.pt; {late}")
    assert json.loads(supervise("checkpoints", "--json", run)[1])[0]["suspect"] == late
    assert status["ending"]["checkpoint"] is None
    assert status["ending"]["suspect"] == f"ckpt-1 of step 60 is verified, {late}"
    assert (
        f"checkpoint  none is good; ckpt-1 of step 60 is verified, {late}"
        in supervise("status", run)[1]
    )
    assert refused[0] == 64 and f"none is good: ckpt-1 of step 60 is verified, {late}" in refused[2]


# An interpreter that evaluates: the first number of a checkpoint, and that of the file `held`.
EVALUATOR = f"""#!{sys.executable}
import json, sys
request = json.load(sys.stdin)
loss = float(open(request["checkpoint"]).read()) + float(open(request["val"]["held"]).read())
answer = {{"was": 1.0, "now": 1.0, "values": {{"checkpoint_val_loss.held": loss}}}}
answer["errors"] = {{"checkpoint_val_loss.held": 0.1}}
answer["unmeasured"] = {{"microbench_score": "no package"}} if request["harness"] else {{}}
assert not request["keep"] and not request["previous"]
print(json.dumps(answer))
"""


@pytest.mark.parametrize(
    ("weights", "data", "verdict"),
    [
        (0.0, 0.0, "neither"),
        (1.0, 0.0, "model"),
        (0.0, 1.0, "harness"),
        (1.0, 1.0, "both"),
        (0.35, 0.0, "open"),
    ],
)
def test_crossed_evaluations_tell_a_changed_model_from_a_changed_harness(
    keep_run, supervise, tmp_path, weights, data, verdict
):
    """Nothing of them is kept for the next evaluation."""
    run = evaluated_run(keep_run, tmp_path, (2.0, 2.0 + weights))
    for name, loss in (("old", 0.0), ("new", data)):
        (tmp_path / name).write_text(str(loss))
        evaluate = f"{{val: {{held: {tmp_path / name}}}, tasks: {{include: t, names: [a]}}}}"
        write_policy(tmp_path / f"{name}.yaml", evaluate)
    policies = [str(tmp_path / f"{name}.yaml") for name in ("old", "new")]

    argv = ["checkpoint", "cross", "ckpt-1", "ckpt-2", "--run", run, "--harness", *policies]
    code, out, _ = supervise(*argv)
    document = json.loads(supervise(*argv, "--json")[1])
    unknown = supervise("checkpoint", "cross", "ckpt-1", "ckpt-2", "--run", run, "--harness")

    assert code == 0 and verdict in out and "microbench_score: UNKNOWN: no package" in out
    (row,) = document["metrics"]
    assert row["verdict"] == verdict and not document["unknown"]
    assert row["values"] == [2.0, 2.0 + weights, 2.0 + data, 2.0 + weights + data]
    assert unknown[0] == 64


def test_crossed_evaluations_that_share_no_metric_say_what_is_missing(
    keep_run, supervise, tmp_path
):
    run = evaluated_run(
        keep_run, tmp_path, (2.0, 3.0), EVALUATOR.replace('"errors"', '"unmeasured"')
    )
    write_policy(policy := tmp_path / "p.yaml", f"{{val: {{held: {tmp_path / '0.pt'}}}}}")
    argv = ["checkpoint", "cross", "ckpt-1", "ckpt-2", "--run", run, "--harness", policy, policy]

    code, out, _ = supervise(*argv)
    (run / f"probe_batch/structure.{32 * '0'}.pkl").unlink()
    lost = supervise(
        "checkpoint", "eval", "ckpt-1", "--run", run, "--val", f"held={tmp_path / 'p.yaml'}"
    )

    assert lost[0] == 1 and "pkl is missing, of which the model is rebuilt" in lost[1]
    assert code == 1 and out.startswith("UNKNOWN: no metric has a standard error in all four")
    assert json.loads(supervise(*argv, "--json")[1])["metrics"] == []


def test_a_run_that_was_moved_is_evaluated_where_it_is(keep_run, supervise, tmp_path):
    place = "assert 'elsewhere' in request['batch']"
    evaluator = f"{EVALUATOR.partition('assert')[0]}{place}\nprint(json.dumps(answer))\n"
    run = evaluated_run(keep_run, tmp_path, (2.0,), evaluator)
    argv = ("checkpoint", "eval", "ckpt-1", "--val", f"held={tmp_path / '0.pt'}", "--run")

    before = supervise(*argv, run)
    run.rename(tmp_path / "elsewhere")
    again = supervise(*argv, tmp_path / "elsewhere")

    assert before[0] == 1 and again[0] == 0, again


@pytest.mark.parametrize("lives", [False, True])
def test_what_is_evaluated_by_hand_is_no_reference_of_the_supervisor_of_the_run(
    lives, keep_run, supervise, tmp_path
):
    condition = f'bool(request["keep"]) == {not lives}'
    evaluator = EVALUATOR.replace('not request["keep"] and', f"{condition} and")
    run = evaluated_run(keep_run, tmp_path, (2.0,), evaluator)
    with RunDir.open(run).audit_path.open() as audit:
        if lives:
            fcntl.flock(audit, fcntl.LOCK_EX)
        code, out, _ = supervise(
            "checkpoint", "eval", "ckpt-1", "--val", f"held={tmp_path / '0.pt'}", "--run", run
        )

    assert code == 0, out


def evaluated_run(keep_run, folder, losses, evaluator=EVALUATOR):
    """Register a checkpoint for each loss, with the interpreter that evaluates them."""
    (python := folder / f"python-{len(losses)}").write_text(evaluator)
    python.chmod(0o755)
    run = keep_run([]).path
    (probe := run / "probe_batch").mkdir()
    (probe / "batch.pt").touch()
    (probe / f"structure.{32 * '0'}.pkl").touch()
    register = Register(run)
    for step, loss in enumerate(losses):
        (path := folder / f"{step}.pt").write_text(str(loss))
        facts = {"path": str(probe / "batch.pt"), "value": 1.0, "model": 32 * "0"}
        entry = register.add(str(path), step=step, state="verified", probe_batch=facts)
        entry.stamp, entry.python = stamp_files(str(path)), str(python)
    register.write()
    return run


def write_policy(path, evaluate):
    text = "version: supervise/v1\npolicy: one\nuse: [quality]\n"
    path.write_text(f"{text}job: {{evaluate: {evaluate}}}\n")
