"""`examples/ci/canary.yml`, its script run as in CI: exit code, JUnit, summary, artifacts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from junitparser import JUnitXml
from markdown_it import MarkdownIt

from supervise.cli import invoke
from tests.support.supervised_run import FAST_TORCH, JOBS

ROOT = Path(__file__).parents[2]
TRAIN = """\
import argparse, pathlib, runpy, sys
parser = argparse.ArgumentParser()
for name in ("--out", "--seed"):
    parser.add_argument(name, required=True)
seed = parser.parse_args().seed
if CODE:
    pathlib.Path("result.txt").write_text("written to the working directory")
steps = "400" if CODE else "100000"  # it is stopped after those of the gate
sys.argv = [JOB, "--steps", steps, "--seed", seed, "--exit", str(CODE)]
runpy.run_path(JOB, run_name="__main__")
"""


@pytest.fixture
def workflow(tmp_path):
    """A function that runs the step of the gate in two checkouts; it returns what came of it."""
    steps = yaml.safe_load((ROOT / "examples/ci/canary.yml").read_text())["jobs"]["canary"]["steps"]
    (step,) = (one for one in steps if one.get("name") == "Gate")

    def run(code):
        for name, exit_code in (("baseline", 0), ("candidate", code)):
            (tmp_path / name).mkdir()
            script = f"JOB, CODE = {str(JOBS / 'tiny.py')!r}, {exit_code}\n{TRAIN}"
            (tmp_path / name / "train.py").write_text(script)
        (tmp_path / "temporary").mkdir()
        summary = tmp_path / "summary.md"
        env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GITHUB_ACTIONS": "true",
            "GITHUB_STEP_SUMMARY": str(summary),
            "PYTHONPATH": FAST_TORCH,
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "TMPDIR": str(tmp_path / "temporary"),
        }
        bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        place = tmp_path / step["working-directory"]
        done = subprocess.run(bash, cwd=place, env=env, capture_output=True, text=True, check=False)
        artifacts = steps[-1]["with"]["path"].split()
        missing = [name for name in artifacts if not (tmp_path / name).is_file()]
        assert missing == [], done.stderr
        rendered = MarkdownIt().enable("table").render(summary.read_text())
        return done, JUnitXml.fromfile(str(tmp_path / "canary.xml")), rendered

    return run


@pytest.mark.slow
def test_the_check_fails_for_a_candidate_that_crashes(workflow, tmp_path):
    """Nothing of either run is left."""
    done, junit, summary = workflow(3)
    gate = json.loads((tmp_path / "canary" / "gate.json").read_text())

    assert done.returncode == 1, done.stderr
    assert (junit.failures, junit.errors) == (1, 0)
    (failed,) = (case for suite in junit for case in suite if case.is_failure)
    assert failed.name == "crash"
    assert failed.result[0].message == "the candidate ended with exit code 3"
    assert "::error title=supervise canary FAIL::" in done.stderr
    assert "<h3>supervise canary: FAIL</h3>" in summary
    assert "<td>crash</td>\n<td>fail</td>" in summary
    assert gate["reasons"] == ["crash: the candidate ended with exit code 3"]
    assert gate["pairs"][0]["paired"] and gate["pairs"][0]["mean"] == 0.0
    assert "exit code 143" in done.stderr, "the baseline does not end by itself"
    assert list((tmp_path / "canary" / "scratch").iterdir()) == []
    assert invoke(["audit", "verify", str(tmp_path / "canary" / "audit.log")]) == 0


@pytest.mark.chaos
def test_the_check_passes_for_the_same_program(workflow):
    done, junit, summary = workflow(0)

    assert done.returncode == 0, done.stderr
    assert (junit.failures, junit.errors) == (0, 0) and junit.tests > 8
    assert "::notice title=supervise canary PASS::" in done.stderr
    assert "<h3>supervise canary: PASS</h3>" in summary
