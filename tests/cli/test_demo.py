"""The demo is the first thing a stranger runs, so it has to keep its word, and to say so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import jsonschema
import pytest

from supervise.cli import invoke
from supervise.report import incident_schema
from supervise.store import verify_audit
from tests.support.supervised_run import FAST_TORCH


def is_complete(run):
    """Assert that the stability record of the demo holds what only a real run has, and verifies."""
    assert invoke(["record", str(run)]) == 0
    assert invoke(["record", "verify", str(run)]) == 0
    record = json.loads((run / "record" / "record.json").read_text())
    assert record["identity"]["first"]["packages"]["versions"]["torch"]
    (drill,) = record["fault_injection"]["in_this_run"]
    assert (drill["fault"], drill["step"]) == ("lr_spike", 150)
    assert 0 <= drill["reported_after"] <= 10 and 0 <= drill["acted_after"] <= 20
    loss = next(one for one in record["monitors"] if one["signal"] == "train_loss_raw")
    assert loss["module"].startswith("loss: ") and loss["healthy_baseline"]["values"] > 100
    fired = next(one for one in record["rules"] if one["rule"] == drill["rule"])
    assert fired["fired"] and fired["threshold_source"].startswith("shipped policy nano, unchanged")
    assert fired["lead_time"]["in_this_run"][0]["reported_after"] == drill["reported_after"]
    shown = [r for r in record["rules"] if "recordings" in r["lead_time"]]
    assert shown and all(r["blind_to"] for r in shown)
    assert record["interventions"]["by_name"]["rollback"] == {"done": 1}
    (back,) = (one for one in record["recovery"] if one["used"])
    assert (back["verified"], back["failed"]) == (1, 0) and "rollback" in back["procedure"]
    assert back["shown"][0]["machine"] and back["procedure"][-1] == "verify"
    assert record["cost"]["steps"] > 0 and record["cost"]["device_hours"] > 0
    assert record["gaps"]["blind_share"] == 0.0


@pytest.mark.slow
def test_the_demo_breaks_a_run_and_shows_it_being_saved(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "supervise", "demo", "--run-dir", "run"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "PYTHONPATH": FAST_TORCH},
        capture_output=True,
        text=True,
        timeout=400,
    )
    story = done.stdout.partition("$ supervise why run inc-1")[2]

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^inc-1 .* RECOVERED$", story, re.M)
    for word in ("What", "Cause", "Did", "Cost", "Proof", "Loss", "Next"):
        assert f"\n{word} " in story
    assert "; training goes on at step " in story and "no relapse in" in story
    assert "same: " in story  # replay's word
    assert len(re.findall(r"^  \S*supervise (audit|export|--policy) ", story, re.M)) == 3
    assert verify_audit(tmp_path / "run" / "audit.log").exit_code == 0
    is_complete(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "ckpt_000320.pt").is_file()
    home = tmp_path / "run" / "incidents" / "inc-1"
    document = json.loads((home / "incident.json").read_text())
    jsonschema.validate(document, incident_schema())
    assert (document["state"], document["final"]) == ("RECOVERED", True)
    assert document["cause"]["text"].startswith("drill lr_spike at step 150")
    assert "; training goes on at step " in document["did"]["text"]
    assert "⟲" in document["loss"]["spark"]
    (early,) = home.glob("snapshot-*/incident.json")
    assert json.loads(early.read_text())["state"] == "ACTING"
    for directory in (home, early.parent):
        assert document["title"].split()[0] in (directory / "incident.html").read_text()
        assert "**Proof**" in (directory / "summary.md").read_text()
