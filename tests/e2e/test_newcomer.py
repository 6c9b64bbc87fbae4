"""The walk-through of policies/README.md, executed as it stands: every file and every command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.supervised_run import FAST_TORCH, Records, Supervise, nano

pytestmark = pytest.mark.slow

README = Path(__file__).parents[2] / "policies" / "README.md"
SECTION = re.compile(r"## A policy for a number of your own\n(.*?)\n## ", re.DOTALL)
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def walk(tmp_path_factory):
    """The walk, under way beside the first test: its trainings mostly sleep."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(walk_through, tmp_path_factory.mktemp("newcomer"))


@pytest.fixture(scope="module")
def walked(walk):
    """The folder, and what each command block printed, in order."""
    return walk.result()


def walk_through(folder):
    """Write the section's files and run its commands."""
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
    return folder, said


def test_a_job_gets_its_policy_and_trains_under_it(tmp_path):
    """`init` writes and checks it; the run keeps a copy that needs no other file."""
    command = Supervise(tmp_path)
    job = nano("--steps", 3, "--checkpoint-every", 2, "--out", "out")
    written = command("init", "--", *job)
    run = command.run("--policy", "supervise.yaml", job=job)

    assert written.returncode == 0, written.stderr
    assert "resumes by --resume={checkpoint}" in written.stdout
    assert "ready in mode enforce" in written.stdout
    assert written.stdout.splitlines()[-1].startswith("next: supervise --policy supervise.yaml -- ")
    assert run.returncode == 0 and "policy supervise" in run.stderr
    assert "extends" not in (run.directory / "policy.yaml").read_text()
    (tmp_path / "supervise.yaml").write_text("version: supervise/v1\n")
    run.prove()
    command.close()


def test_the_editor_gets_a_schema_that_knows_her_policy(walked):
    from jsonschema import Draft7Validator
    from yaml import safe_load

    folder, _ = walked
    schema = json.loads((folder / "policy.schema.json").read_text("utf-8"))
    policy = safe_load((folder / "mine.yaml").read_text("utf-8"))

    assert not list(Draft7Validator(schema).iter_errors(policy))
    policy["detectors"]["fell"]["windw"] = 64
    assert list(Draft7Validator(schema).iter_errors(policy))


def test_the_check_warns_of_her_metric_and_nothing_else(walked):
    _, said = walked
    check = next(text for text in said if "my_score" in text and "warning" in text)

    assert check.count(": warning:") == 1
    assert "the job must report it itself" in check


def test_shadow_says_what_it_would_have_done_and_why(walked):
    folder, said = walked
    story = "\n".join(said)

    assert "would have run stop-with-evidence" in story
    assert Records(folder / "runs" / "rotten").intents == []


def test_the_back_test_finds_the_rotten_run_only(walked):
    _, said = walked
    lines = [json.loads(x) for text in said for x in text.splitlines() if x.startswith('{"run"')]
    found = {Path(line["run"]).name: line["incidents"] for line in lines}

    assert not [i for i in found["good"] if i["severity"] != "SEV2"]
    assert any(i["rule"] == "score" and 200 <= i["step"] <= 220 for i in found["rotten"])


def test_enforced_the_rotten_run_is_stopped_and_the_good_one_is_not(walked):
    folder, _ = walked
    assert "stop" in Records(folder / "runs" / "stopped").intents
    assert Records(folder / "runs" / "untouched").intents == []
