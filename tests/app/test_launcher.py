"""What a launch gives to the job: the command, the environment, the probe's orders."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import pytest

from supervise.core.model import JobSettings, Policy, RelaunchSettings, Rewarm
from supervise.errors import ActionError
from supervise.runtime import LAUNCH_FILE, Launch, Launcher, first_environment, inner_restarts
from supervise.store import RunDir

TELL = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
"""
POLICY = Policy("p", "sha256:0", "enforce", {}, ())
HOW = RelaunchSettings(
    args=["--init_from=resume", "--ckpt={checkpoint}", "--dir={directory}", "x={y}"],
    env={"START_STEP": "{step}"},
)
AGAIN = Launch(3, 99, "/ckpt/at-99.pt", Rewarm(0.1, 50), [[120, 139]])


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "run", argv=[], policy=POLICY, wall="2026-01-05T10:11:12Z")


@pytest.fixture
def launcher(run, tmp_path):
    argv = [sys.executable, "-c", TELL, str(tmp_path / "told")]
    return Launcher(argv, {**os.environ, "START_STEP": "0"}, run, tmp_path, ["drill"])


@pytest.fixture
def told(tmp_path, run, launcher):
    """Start a launch; return its further arguments, its environment, and what the probe reads."""

    def start(policy, launch):
        assert launcher.start(policy, launch).wait(60.0) == 0
        (_, *words), environ = json.loads((tmp_path / "told").read_text())
        return words, environ, run.read_json("probe.json")

    return start


def test_the_first_launch_is_the_command_as_it_was_given(told, run):
    """No argument and no order more; its name is attempt 0 of the run."""
    words, environ, config = told(replace(POLICY, job=JobSettings(relaunch=HOW)), Launch())

    assert words == []
    assert (environ["START_STEP"], environ[LAUNCH_FILE]) == ("0", f"{run.id}:0")
    assert config["drills"] == ["drill"]
    assert "first_step" not in config


def test_a_supervisor_that_comes_later_knows_the_environment(told, run):
    """As it was first given; nobody else can read it, and later launches do not change it."""
    policy = replace(POLICY, job=JobSettings(relaunch=HOW))
    told(policy, Launch())
    kept = first_environment(run)
    told(policy, AGAIN)

    assert kept == first_environment(run)
    assert (kept["PATH"], kept["START_STEP"]) == (os.environ["PATH"], "0")
    assert LAUNCH_FILE not in kept
    assert (run.secrets_path / "environ.json").stat().st_mode & 0o777 == 0o600


def test_a_later_launch_gets_what_the_policy_says(told, run):
    """Templates are filled in, other braces are the job's own; the probe counts on."""
    words, environ, config = told(replace(POLICY, job=JobSettings(relaunch=HOW)), AGAIN)

    assert words == ["--init_from=resume", "--ckpt=/ckpt/at-99.pt", "--dir=/ckpt", "x={y}"]
    assert (environ["START_STEP"], environ[LAUNCH_FILE]) == ("100", f"{run.id}:3")
    assert (config["attempt"], config["first_step"]) == (3, 100)
    assert (config["rewarm"], config["skip"]) == ({"start": 0.1, "steps": 50}, [[120, 139]])
    assert config["resume"] is None


def test_a_library_is_told_by_the_probe(told):
    """Where no argument can say it."""
    how = RelaunchSettings(resume="library")

    words, _, config = told(replace(POLICY, job=JobSettings(relaunch=how)), AGAIN)

    assert words == []
    assert config["resume"] == {"how": "library", "path": "/ckpt/at-99.pt"}


def test_a_launch_that_was_made_is_not_made_again(launcher, run, tmp_path, sleeper):
    """A supervisor that died behind the start left a process that carries its name."""
    policy = replace(POLICY, job=JobSettings(relaunch=HOW))
    pid = sleeper({LAUNCH_FILE: f"{run.id}:3"})
    with pytest.raises(ActionError, match=f"started already, as process {pid}"):
        launcher.start(policy, AGAIN)

    later = Launcher(["false"], {}, run, tmp_path, adopt=lambda found, _: found)

    assert later.start(policy, AGAIN) == pid


@pytest.mark.parametrize(
    ("command", "times"),
    [
        ("torchrun --max-restarts=3 train.py", 3),
        ("python -m torch.distributed.run --max_restarts 2 train.py", 2),
        ("torchrun --nproc-per-node=2 train.py", 0),
        ("torchrun --max-restarts=0 train.py", 0),
        ("python train.py --max-restarts=3", 0),
        ("torchrun --max-restarts", 0),
    ],
)
def test_restarts_that_multiply_with_ours_are_found(command, times):
    """Both spellings, with and without an equals sign; the script's own option is none of ours."""
    assert inner_restarts(command.split()) == times
