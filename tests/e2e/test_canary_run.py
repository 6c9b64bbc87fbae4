"""`supervise canary run` on a real job: two arms, a crash after the last step, a file elsewhere."""

from __future__ import annotations

import json
import shlex
import sys

from supervise.cli import invoke
from tests.support.supervised_run import JOBS

CRASHES = """\
import pathlib, runpy, sys
pathlib.Path("result.txt").write_text("written to the working directory")
sys.argv = [JOB, "--steps", sys.argv[2], "--exit", "3"]
runpy.run_path(JOB, run_name="__main__")
"""


def test_a_candidate_that_crashes_fails(supervise):
    """The baseline is stopped after its steps; what the candidate writes elsewhere is reported."""
    tiny = JOBS / "tiny.py"
    (supervise.home / "temporary").mkdir()
    work = supervise.home / "work"
    work.mkdir()
    supervise.home, home = work, supervise.home
    (work / "crashes.py").write_text(f"JOB = {str(tiny)!r}\n{CRASHES}")
    supervise.env["TMPDIR"] = str(supervise.home / "temporary")
    baseline = shlex.join(["env", "OUT={out}", sys.executable, str(tiny), "--steps", "100000"])
    candidate = [sys.executable, "crashes.py", "{out}", "{steps}"]
    trial = home / "trial"

    done = supervise.start(
        *("canary", "run", "--baseline", baseline, "--seeds", 1, "--steps", 200, "--dir", trial),
        *("--json", "--", *candidate),
    )
    out, err = done.communicate(timeout=120)

    assert done.returncode == 1, err
    document = json.loads(out)
    assert document["verdict"] == "FAIL"
    assert document["reasons"] == ["crash: the candidate ended with exit code 3"]
    assert document["pairs"][0]["paired"] and document["pairs"][0]["mean"] == 0.0
    (note,) = document["notes"]
    assert note == (
        f"while candidate-1 ran, files outside of its directory changed: {work / 'result.txt'}"
    )
    assert "exit code 143" in err, "the baseline does not end by itself"
    assert list((trial / "scratch").iterdir()) == []
    assert json.loads((trial / "gate.json").read_text()) == document
    assert invoke(["audit", "verify", str(trial / "audit.log")]) == 0


def test_commands_that_are_not_safe_are_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refused(*argv):
        code = invoke(["canary", "run", *argv])
        return code, capsys.readouterr().err

    run = ("--steps", "200", "--baseline")
    code, err = refused(*run, "python a.py {out} {seed}", "--", "python", "a.py", "{out}")
    assert (code, "the candidate has no {seed}" in err) == (64, True)
    assert "try: supervise canary run --baseline" in err
    code, err = refused(*run, "runs/mian", "--", "python", "a.py", "{out}", "{seed}")
    assert (code, "runs/mian is not a run" in err) == (64, True)
    assert refused(*run, "x {out} {seed}")[0] == 64, "no command"
    assert refused("--steps", "100", "--baseline", "x {out}", "--", "y", "{out}")[0] == 64
    assert not any(tmp_path.iterdir()), "nothing was made"
