"""`supervise canary`: two recorded runs, every report, and the exit codes."""

from __future__ import annotations

import json
import random
import shlex
from xml.etree import ElementTree

import pytest

from supervise.core.model import Announced, Exited, Frame, Launched

STEPS = 260
NAMES = ("train_loss_raw", "grad_global_norm", "batch_fingerprint", "tokens_per_update")


@pytest.fixture
def arm(recorded, tmp_path):
    """A function that records a run of 260 steps with exit code `end` and returns its path."""

    def make(name, *, seed=0, shift=0.0, tokens=512.0, end=0):
        shared, own = random.Random(1), random.Random(seed)
        events = [Launched(1, 2**22 + 7, 0), Announced(2, 0, 1, 2**22 + 7, NAMES)]
        for step in range(STEPS):
            loss = 3.0 + shift + shared.gauss(0.0, 0.05) + own.gauss(0.0, 0.01)
            values = (loss, 1.0 + own.gauss(0.0, 0.05), float(1000 + step), tokens)
            events.append(Frame(10 + step * 1_000_000, 0, 0, step, values))
        run = recorded([*events, Exited(10**9, end)], end=end)
        return run.path.rename(tmp_path / name)

    return make


def test_a_regression_is_reported_everywhere(supervise, arm, tmp_path, monkeypatch):
    main, branch = arm("main"), arm("branch<b>", seed=1, shift=0.06)
    page, xml, summary = (tmp_path / name for name in ("gate.html", "gate.xml", "summary.md"))
    summary.write_text("# before\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))

    code, out, err = supervise("canary", "compare", main, branch, "--html", page, "--junit", xml)

    assert code == 1
    assert out.startswith("FAIL: train_loss_raw +0.0")
    assert "loss: +0.06" in out and "more than the margin of 0.03" in out
    assert "not measured" in out and "the same" in out
    assert err.startswith("::error title=supervise canary FAIL::train_loss_raw +0.0")
    assert err.count("\n") == 1, "a workflow command is one line"
    assert summary.read_text().startswith("# before\n### supervise canary: FAIL\n")
    assert "branch&lt;b>" in summary.read_text()
    suite = ElementTree.parse(xml).getroot().find("testsuite")
    cases = {case.get("name"): case for case in suite}
    assert suite.get("failures") == "1"
    assert cases["loss"].find("failure").get("message").startswith("+0.06")
    assert cases["update_norm"].find("skipped") is not None
    assert len(cases["tokens_per_update"]) == 0, "passed"
    html = page.read_text()
    assert "<svg" in html and "branch&lt;b&gt;" in html
    assert "<script" not in html and "http" not in html


def test_the_verdict_is_the_exit_code(supervise, arm):
    main, same = arm("main"), arm("same", seed=1)
    crashed, other = arm("crashed", seed=2, end=3), arm("other", seed=3, tokens=256.0)

    def verdict(*argv):
        code, out, _ = supervise("canary", "compare", *argv, "--json")
        document = json.loads(out)
        assert document["pairs"][0]["baseline"] == str(argv[0]), "as it was given"
        return code, document["verdict"]

    assert verdict(main, same) == (0, "PASS")
    assert verdict(main, same, "--steps", 400) == (2, "INCONCLUSIVE")
    assert verdict(main, other) == (3, "VOID")
    assert verdict(main, other, "--fail-on", "fail") == (0, "VOID")
    assert verdict(main, crashed, "--fail-on", "fail") == (1, "FAIL")
    assert supervise("canary", "compare", main, same, main, same)[0] == 0
    calibrated = supervise("canary", "compare", main, same, "--calibrate", main, same)[1]
    assert "A/A pairs differ by" in calibrated


def test_usage_and_own_errors_are_no_verdict(supervise, arm):
    main, same = arm("main"), arm("same", seed=1)
    compare = ("canary", "compare", main)
    options = ("--fail-on", "void"), ("--looks", "1,0.5"), ("--ignore", "crash")

    for wrong in ((), (main,), (main.with_name("none"),), *((same, *each) for each in options)):
        assert supervise(*compare, *wrong)[0] == 64, wrong
    log = same / "audit.log"
    log.write_bytes(log.read_bytes().replace(b"the job was started", b"the job was STARTED"))
    code, _, err = supervise(*compare, same)
    assert code == 70, "a changed log has the exit code 1 elsewhere"
    assert "changed" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("canary run --steps 200 --baseline 'x {out} {seed}' -- y {out}", "has no {seed}"),
        ("canary run --steps 200 --baseline runs/mian -- y {out} {seed}", "runs/mian is not a run"),
        ("canary run --steps 200 --baseline 'x {out} {seed}'", "command"),
        ("canary run --steps 100 --baseline 'x {out}' -- y {out}", "200"),
        ("drill suite --steps 200 -- python a.py {out}", "the command has no {seed}"),
        ("drill suite --steps 200 --fault lr_spyke -- a {out} {seed}", "lr_spike"),
        ("drill suite --steps 200 --at 200 -- a {out} {seed}", "comes after the 200 steps"),
        ("drill suite --steps 200", "command"),
    ],
)
def test_trials_that_cannot_be_made_are_refused(supervise, tmp_path, monkeypatch, line, said):
    monkeypatch.chdir(tmp_path)
    code, _, err = supervise(*shlex.split(line))

    assert (code, said in err) == (64, True), err
    assert not any(tmp_path.iterdir()), "nothing was made"


@pytest.mark.slow  # a real arm
def test_an_interrupted_arm_ends_the_trial(supervise, tmp_path, monkeypatch):
    """Ctrl-C reaches the arm before us: the baseline did not crash, and no arm follows."""
    monkeypatch.chdir(tmp_path)
    arm = ["sh", "-c", "exit 130", "{out}", "{seed}"]
    args = ["canary", "run", "--steps", "200", "--dir", "trial", "--baseline", shlex.join(arm)]

    code, out, said = supervise(*args, "--", *arm)

    assert (code, out) == (130, "")
    assert said.rstrip().endswith(f"interrupted; next: supervise {shlex.join([*args, '--', *arm])}")
    assert [path.name for path in (tmp_path / "trial" / "scratch").iterdir()] == ["baseline-1"]
