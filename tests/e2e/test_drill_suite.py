"""`supervise drill suite` on a real job: a fault, a healthy run, and a suite that goes on."""

from __future__ import annotations

import json
import sys

import pytest

from supervise.cli import invoke
from tests.support.supervised_run import JOBS

TINY = str(JOBS / "tiny.py")
JOB = ("env", "OUT={out}", sys.executable, TINY, "--steps", "{steps}", "--seed", "{seed}")
POLICY = """\
version: supervise/v1
policy: drilled
extends: nano
notify: {webhook: {url_env: NOBODY_MAY_CALL}}
job: {relaunch: {args: ["--resume"]}, on_crash: restart}
"""


@pytest.mark.chaos  # takes long, and others look at each part
def test_a_suite_shows_which_alarm_leads_the_loss_and_goes_on_where_it_was(supervise):
    """The rate alarm leads; a fault without routers is refused; nothing is made twice."""
    path, mine = supervise.home / "suite", supervise.home / "p.yaml"
    mine.write_text(POLICY)
    options = ("--policy", mine, "--seeds", 1, "--steps", 200, "--jobs", 2, "--dir", path)
    faults = ("--fault", "lr_spike", "--fault", "router")

    def suite():
        done = supervise.start("drill", "suite", *options, *faults, "--json", "--", *JOB)
        out, err = done.communicate(timeout=240)
        assert done.returncode == 0, err
        return json.loads(out), err

    whole, _ = suite()

    spike, router = whole["faults"]
    assert spike["detected"] == spike["runs"] == 1
    assert spike["monitors"][0]["rule"].startswith("update_scale.rate_")
    assert spike["monitors"][0]["delay"]["median"] == 0.0
    assert spike["lost"]["runs"] == spike["lost_acting"]["runs"] == 1
    runs = ("healthy-1", "lr_spike-1-unattended", "lr_spike-1-acting")
    modes = [json.loads((path / run / "run.json").read_text())["mode"] for run in runs]
    assert modes == ["enforce", "observe", "enforce"]
    assert router["excluded"].startswith("no matrix of the model")
    assert whole["healthy"][0]["acts"] == []
    assert whole["policy"]["without"] == ["notify", "job.relaunch", "job.on_crash"]
    assert list((path / "scratch").iterdir()) == []
    assert (path / "suite.html").read_text().startswith("<!doctype html>")
    assert invoke(["audit", "verify", str(path / "audit.log")]) == 0

    kept = path / "outcomes" / "lr_spike-1-unattended.json"
    kept.unlink()  # as if it had been interrupted in the middle of this run
    before = (path / "outcomes" / "healthy-1.json").stat().st_mtime_ns
    again, err = suite()

    assert kept.exists()
    assert (path / "outcomes" / "healthy-1.json").stat().st_mtime_ns == before
    assert again["faults"][0]["monitors"][0] == spike["monitors"][0]
    assert "router-1-unattended" in err, "what was kept is counted, too"

    mine.write_text(f"{POLICY}cites: [suite]\n")
    done = supervise(
        *("--policy", mine, "--mode", "observe", "--run-dir", "run", "--cite", path),
        *("--", sys.executable, TINY, "--steps", 20),
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(supervise("record", "run", "--format", "json").stdout)
    assert [one["trial"] for one in record["citations"]] == [whole["suite"]] * 2
    first = spike["monitors"][0]["rule"]
    (rule,) = (one for one in record["rules"] if one["rule"] == first)
    assert rule["lead_time"]["suites"][0]["delays"]["lr_spike"] == [0]
    checked = supervise("policy", "check", mine).stdout
    assert "1 file: good" in checked and "cites" not in checked
    mine.write_text(f"{POLICY}cites: [suite]\noverride: {{{first}: {{for: 2}}}}\n")
    checked = supervise("policy", "check", mine).stdout
    assert f"cites {path}: rules that changed since: {first}" in checked
