"""`supervise checkpoints`: the register as people read it."""

from __future__ import annotations

import json

from supervise.checkpoints.registry import Register


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
    register.add("/data/out/b\033[31m.pt", attempt=1, state="bad", problems=["model.w has NaN"])
    register.write()


def test_the_table(keep_run, supervise):
    """One line each, with its problems; no control characters."""
    run = keep_run([]).path
    filled(run)

    code, out, _ = supervise("checkpoints", run)

    assert code == 0 and [line.split() for line in out.splitlines()] == [
        ["id", "step", "attempt", "state", "pinned", "size", "saved", "path"],
        [
            *("ckpt-1", "199", "0", "verified", "yes", "4.7", "MB"),
            "2026-01-05T10:11:12",
            "/data/out/a.pt",
        ],
        [
            "ckpt-2",
            "?",
            "1",
            "bad",
            "no",
            "0",
            "B",
            "/data/out/b",
            "[31m.pt;",
            "model.w",
            "has",
            "NaN",
        ],
    ]


def test_json_and_an_empty_register(keep_run, supervise):
    """For scripts; a run that saved nothing is no error, one that is none is."""
    run = keep_run([]).path
    assert supervise("checkpoints", run)[:2] == (0, "no checkpoints\n")
    filled(run)

    code, out, _ = supervise("checkpoints", "--json", run)

    found = json.loads(out)
    assert code == 0 and [entry["id"] for entry in found] == ["ckpt-1", "ckpt-2"]
    assert supervise("checkpoints", run / "journal")[0] == 64


def test_a_register_that_is_none(keep_run, supervise):
    """One sentence."""
    run = keep_run([]).path
    (run / "checkpoints.json").write_text("[]")

    code, _, err = supervise("checkpoints", run)

    assert code == 64 and "is not a register of checkpoints" in err
