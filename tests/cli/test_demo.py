"""The demo is the first thing a stranger runs, so it has to keep its word, and to say so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import jsonschema
import pytest

from supervise.report.card.incident_schema import schema
from supervise.store import audit
from tests.support.supervised_run import FAST_TORCH


@pytest.mark.slow
def test_the_demo_breaks_a_run_and_shows_it_being_saved(tmp_path):
    """Exit code 0 is a verdict: detected, contained, verified and replayed, all on one screen."""
    done = subprocess.run(
        [sys.executable, "-m", "supervise", "demo", "--run-dir", "run"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "PYTHONPATH": FAST_TORCH},
        capture_output=True,
        text=True,
        timeout=400,
    )
    story = done.stdout.partition("what happened")[2]

    assert done.returncode == 0, done.stdout + done.stderr
    assert "detected: yes, contained: yes, verified: yes, loss back in its band: yes" in story
    for word in ("fault", "detected", "decided", "done", "contained", "verified"):
        assert f"\n{word} " in story
    assert "rollback: from step" in story
    assert "same: " in story  # replay's word
    assert len(re.findall(r"^  \S*supervise (audit|export|--policy) ", story, re.M)) == 3
    assert audit.verify(tmp_path / "run" / "audit.log").exit_code == 0
    assert (tmp_path / "run" / "checkpoints" / "ckpt_000320.pt").is_file()
    home = tmp_path / "run" / "incidents" / "inc-1"
    document = json.loads((home / "incident.json").read_text())
    jsonschema.validate(document, schema())
    assert (document["state"], document["final"]) == ("RECOVERED", True)
    assert document["cause"]["text"].startswith("drill lr_spike at step 150")
    assert "rolled back" in document["did"]["text"] and "⟲" in document["loss"]["spark"]
    (early,) = home.glob("snapshot-*/incident.json")
    assert json.loads(early.read_text())["state"] == "ACTING"
    for directory in (home, early.parent):
        assert document["title"].split()[0] in (directory / "incident.html").read_text()
        assert "**Proof**" in (directory / "summary.md").read_text()
