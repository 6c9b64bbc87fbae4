"""A launch gives the job its command, its environment and the orders of the probe."""

import json
import os
import shutil
import sys
from dataclasses import replace

import psutil
import pytest

from supervise.core.model import JobSettings, Policy, RelaunchSettings, Rewarm, Savepoints
from supervise.errors import ActionError
from supervise.runtime import Launch, Launcher, first_environment, inner_restarts
from supervise.store import RunDir

TELL = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
"""
HOW = RelaunchSettings(
    args=["--init_from=resume", "--ckpt={checkpoint}", "--dir={directory}", "x={y}"],
    env={"START_STEP": "{step}"},
)
POLICY = Policy("p", "sha256:0", "enforce", {}, (), job=JobSettings(relaunch=HOW))
AGAIN = Launch(3, 99, "/ckpt/at-99.pt", Rewarm(0.1, 50), [[120, 139]])
NAME = "SUPERVISE_LAUNCH"


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "run", argv=[], policy=POLICY, wall="2026-01-05T10:11:12Z")


@pytest.fixture
def launcher(run, tmp_path):
    argv = [sys.executable, "-c", TELL, str(tmp_path / "told")]
    return Launcher(argv, {**os.environ, "START_STEP": "0"}, run, tmp_path, ["drill"])


@pytest.fixture
def told(tmp_path, run, launcher):
    def start(policy, launch=Launch()):  # noqa: B008
        assert launcher.start(policy, launch).wait(60.0) == 0
        (_, *words), environ = json.loads((tmp_path / "told").read_text())
        return words, environ, run.read_json("probe.json")

    return start


def test_the_first_launch_is_the_command_as_it_was_given_and_later_ones_follow_the_policy(
    told, run
):
    """Templates are filled in, other braces are the job's own; the probe counts on."""
    words, environ, config = told(POLICY)
    assert words == []
    assert (environ["START_STEP"], environ[NAME]) == ("0", f"{run.id}:0")
    assert config["drills"] == ["drill"] and "first_step" not in config
    first = first_environment(run)  # for a supervisor that comes later

    words, environ, config = told(POLICY, AGAIN)
    assert words == ["--init_from=resume", "--ckpt=/ckpt/at-99.pt", "--dir=/ckpt", "x={y}"]
    assert (environ["START_STEP"], environ[NAME]) == ("100", f"{run.id}:3")
    assert (config["attempt"], config["first_step"]) == (3, 100)
    assert (config["rewarm"], config["skip"]) == ({"start": 0.1, "steps": 50}, [[120, 139]])
    assert config["resume"] is None
    assert first == first_environment(run)
    assert (first["PATH"], first["START_STEP"]) == (os.environ["PATH"], "0")
    assert NAME not in first
    assert (run.secrets_path / "environ.json").stat().st_mode & 0o777 == 0o600


def test_a_library_is_told_by_the_probe_where_no_argument_can_say_it(told):
    how = JobSettings(relaunch=RelaunchSettings(resume="library"))
    words, _, config = told(replace(POLICY, job=how), AGAIN)

    assert words == []
    assert config["resume"] == {"how": "library", "path": "/ckpt/at-99.pt"}


@pytest.mark.parametrize(
    ("job", "mode", "name", "value"),
    [
        ({"peak_flops": 1.2e14}, "enforce", "peak_flops", 1.2e14),
        ({"probe_batch": True}, "enforce", "probe_batch", {}),
        ({"probe_batch": True}, "shadow", "probe_batch", None),
        ({}, "enforce", "probe_batch", None),
    ],
)
def test_settings_of_the_policy_reach_the_probe(told, job, mode, name, value):
    policy = replace(POLICY, mode=mode, job=JobSettings(**job))
    assert told(policy)[2][name] == value


def test_savepoints_have_a_budget_of_memory_and_one_of_disk(told, tmp_path):
    def savepoints(**keys):
        return told(replace(POLICY, savepoints=Savepoints(25, **keys)))[2]["savepoints"]

    shares = savepoints(spill="disk")
    assert 0 < shares["max_bytes"] < psutil.virtual_memory().total
    assert 0 < shares["max_disk_bytes"] < shutil.disk_usage(tmp_path).total
    assert "spill" not in shares  # beside the marks
    assert savepoints(spill="none")["spill"] is None
    written = savepoints(spill="disk", max_bytes=5, max_disk_bytes=7)
    assert (written["max_bytes"], written["max_disk_bytes"]) == (5, 7)


def test_a_launch_that_was_made_is_not_made_again(launcher, run, tmp_path, sleeper):
    """A supervisor that died behind the start left a process that carries its name."""
    pid = sleeper({NAME: f"{run.id}:3"})
    with pytest.raises(ActionError, match=f"started already, as process {pid}"):
        launcher.start(POLICY, AGAIN)

    later = Launcher(["false"], {}, run, tmp_path, adopt=lambda found, _: found)

    assert later.start(POLICY, AGAIN) == pid


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
    assert inner_restarts(command.split()) == times
