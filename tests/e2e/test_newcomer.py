"""The walk-through of policies/README.md, executed as it stands: every file and every command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft7Validator
from yaml import safe_load

from tests.support.supervised_run import FAST_TORCH, Records

pytestmark = pytest.mark.slow

README = Path(__file__).parents[2] / "policies" / "README.md"
SECTION = re.compile(r"## A policy for a number of your own\n(.*?)\n## ", re.DOTALL)
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def walk_through(folder):
    """Write the section's files and run its commands; return what each block printed, in order."""
    section = SECTION.search(README.read_text("utf-8"))
    assert section is not None
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": FAST_TORCH,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    said = []
    for language, name, text in BLOCK.findall(section[1]):
        if language == "sh":
            done = subprocess.run(
                ["bash", "-ec", text],
                cwd=folder,
                env=environ,
                capture_output=True,
                text=True,
                timeout=180,
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            assert "internal error" not in done.stderr
            said.append(done.stdout + done.stderr)
        else:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    return said


@pytest.mark.chaos  # takes long, and others look at each part
def test_the_walk_through_does_what_it_says(tmp_path):
    said = walk_through(tmp_path)
    schema = Draft7Validator(json.loads((tmp_path / "policy.schema.json").read_text("utf-8")))
    policy = safe_load((tmp_path / "mine.yaml").read_text("utf-8"))
    assert not list(schema.iter_errors(policy))
    policy["detectors"]["fell"]["windw"] = 64
    assert list(schema.iter_errors(policy))

    check = next(text for text in said if "my_score" in text and "warning" in text)
    assert check.count(": warning:") == 1
    assert "the job must report it itself" in check
    assert "would have run stop-with-evidence" in "\n".join(said)

    lines = [json.loads(x) for text in said for x in text.splitlines() if x.startswith('{"run"')]
    found = {Path(line["run"]).name: line["incidents"] for line in lines}
    assert not [i for i in found["good"] if i["severity"] != "SEV2"]
    assert any(i["rule"] == "score" and 200 <= i["step"] <= 220 for i in found["rotten"])

    intents = {path.name: Records(path).intents for path in (tmp_path / "runs").iterdir()}
    assert intents["rotten"] == intents["untouched"] == []
    assert "stop" in intents["stopped"]
