"""`supervise checkpoints`: the register as people read it."""

from __future__ import annotations

import json

import pytest

from supervise.checkpoints import Register


def filled(path):
    register = Register(path)
    register.add(
        "/data/out/a.pt",
        step=199,
        bytes=4_700_000,
        state="verified",
        pinned=True,
        saved="2026-01-05T10:11:12.345Z",
    )
    register.add("/data/out/w.pt", state="verified", resumable="weights only")
    register.add("/data/out/b\033[31m.pt", attempt=1, state="bad", problems=["model.w has NaN"])
    register.write()


def test_json_and_an_empty_register(keep_run, supervise):
    """For scripts; a run that saved nothing is no error, one that is none is."""
    run = keep_run([]).path
    assert supervise("checkpoints", run)[:2] == (0, "no checkpoints\n")
    filled(run)
    code, out, _ = supervise("checkpoints", run)
    assert code == 0 and "\033" not in out
    first, weights, second = out.splitlines()[1:]
    assert first.split()[:7] == ["ckpt-1", "199", "0", "verified", "yes", "4.7", "MB"]
    assert "/data/out/w.pt; weights only" in weights
    assert "bad" in second and second.endswith("model.w has NaN")

    code, out, _ = supervise("checkpoints", "--json", run)

    found = json.loads(out)
    assert code == 0 and [entry["id"] for entry in found] == ["ckpt-1", "ckpt-2", "ckpt-3"]
    assert supervise("checkpoints", run / "journal")[0] == 64


def test_an_evaluation_says_what_it_does_not_know(keep_run, supervise):
    """Of a checkpoint that is bad, or of which the job reported no probe batch; or that is none."""
    run = keep_run([]).path
    filled(run)

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
    """After a run that did not have the time for it."""
    torch = pytest.importorskip("torch")
    run, path = keep_run([]).path, tmp_path / "last.pt"
    torch.save({"w": torch.ones(2)}, path)
    if code:
        path.write_bytes(path.read_bytes()[:99])
    register = Register(run)
    register.add("/data/out/a.pt", step=199, state="verified", present=False)
    register.add(str(path), step=299, bytes=path.stat().st_size)
    register.write()

    assert supervise("checkpoints", "--verify", run)[0] == code

    newest = Register(run).newest()
    assert newest is not None and newest.state == ("bad" if code else "verified")


def test_a_run_without_checkpoints_and_a_register_that_is_none(keep_run, supervise):
    run = keep_run([]).path
    code, _, err = supervise("checkpoints", "--verify", run)
    assert code == 64 and "no checkpoint that could be verified" in err
    (run / "checkpoints.json").write_text("[]")
    code, _, err = supervise("checkpoints", run)
    assert code == 64 and "is not a register of checkpoints" in err
