"""`supervise checkpoints`: the register as people read it."""

from __future__ import annotations

import json

import pytest

from supervise.checkpoints import Register
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
    for val, why in ((["no.bin"], "there is no file"), ([f"a={held_out}"] * 2, "has the name a")):
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
