"""A run directory that somebody else has written, or could: nothing that it says is acted on."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from supervise.runtime import start_ticks
from supervise.store import find_foreign_writer

from .conftest import story

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


@pytest.fixture
def run_directory():
    """A private directory below one of ours to which others have access."""
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    home.chmod(0o755)
    path = home / "above" / "run"
    path.mkdir(parents=True)
    path.chmod(0o700)
    yield path
    shutil.rmtree(home)


def give_to(owner: int, *paths: Path) -> None:
    for path in paths:
        os.chown(path, owner, owner, follow_symlinks=False)
        if path.is_dir() and not path.is_symlink():
            give_to(owner, *path.iterdir())


@pytest.fixture
def armed(recorded, tmp_path):
    """A run whose supervisor died, and whose files name a process and a directory of others."""
    run = recorded(story()[:-1], end=None)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("kept")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    more = {"tier": "T1", "tier_reason": None, "reload": ["small", None], "drills": []}
    described = json.loads((run.path / "run.json").read_text()) | more
    run.write_json("run.json", described | {"host": socket.gethostname(), "cwd": str(tmp_path)})
    run.write_secret("environ.json", {"LD_PRELOAD": "theirs.so"})
    run.write_json("probe.json", {"shm": str(victim)})
    pid = bystander.pid
    made = {"attempt": 0, "pid": pid, "start_ticks": start_ticks(pid)}
    run.write_json("launch.json", made)
    yield run
    assert (victim / "precious").read_text() == "kept"
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


@as_root
@pytest.mark.parametrize(
    "command",
    [
        "adopt {}",
        "run -p nano --resume-run --run-dir {} -- train",
        "checkpoints --verify {}",
    ],
)
def test_root_does_not_act_for_another_user(supervise, armed, command):
    """None of them runs a command or an interpreter of the run, and the way that works is said."""
    give_to(NOBODY, armed.path)

    code, _, said = supervise(*command.format(armed.path).split())

    assert code == 64
    assert "belongs to user nobody: what" in said
    assert "sudo -u nobody supervise" in said


def test_a_process_without_the_mark_of_the_run_is_left_alone(supervise, armed):
    """A pid and a start time can be written down by anybody."""
    code, _, said = supervise("adopt", armed.path)

    assert code == 64
    assert "does not carry the mark of run" in said


@pytest.mark.parametrize(("mode", "trusted"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_directories_above_count_too(run_directory, mode, trusted):
    """Who may write there can put another run in its place, but for a sticky one."""
    run_directory.parent.chmod(mode)

    assert bool(find_foreign_writer(run_directory)[0]) is not trusted


@pytest.mark.parametrize("open_to", ["directory", "file", "subdirectory"])
def test_files_that_others_may_write_count_where_others_get_in(run_directory, open_to):
    """Behind a directory that is closed to others their modes do not matter."""
    inside = run_directory / "journal"
    inside.mkdir()
    (inside / "00000.jrn").write_text("")
    path = {"directory": run_directory, "file": inside / "00000.jrn", "subdirectory": inside}
    run_directory.chmod(0o711)
    path[open_to].chmod(0o777)

    why, hint = find_foreign_writer(run_directory)
    assert "may be written by other users" in why
    assert hint == f"chmod -R go-w {run_directory}"
    run_directory.chmod(0o700)
    assert find_foreign_writer(run_directory) == ("", "")


@as_root
def test_a_file_of_another_user_in_our_directory_counts(run_directory):
    """It was put there while that was possible."""
    (run_directory / "command.json").write_text("[]")
    give_to(NOBODY, run_directory / "command.json")

    assert "belongs to user nobody" in find_foreign_writer(run_directory)[0]
