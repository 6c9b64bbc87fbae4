"""A run directory that another user or another version has written: nothing it says is acted on."""

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
from supervise_probe import wire

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
    more |= {"host": socket.gethostname(), "cwd": str(tmp_path)}
    run.write_json("run.json", run.read_json("run.json") | more)
    run.write_secret("environ.json", {"LD_PRELOAD": "theirs.so"})
    run.write_json("probe.json", {"shm": str(victim)})
    pid = bystander.pid
    run.write_json("launch.json", {"attempt": 0, "pid": pid, "start_ticks": start_ticks(pid)})
    yield run
    assert (victim / "precious").read_text() == "kept"
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


@as_root
@pytest.mark.parametrize(
    "command",
    ["adopt {}", "run -p nano --resume-run --run-dir {} -- train", "checkpoints --verify {}"],
)
def test_root_does_not_act_for_another_user(supervise, armed, command):
    give_to(NOBODY, armed.path)

    code, _, said = supervise(*command.format(armed.path).split())

    assert code == 64
    assert "belongs to user nobody: what" in said
    assert "sudo -u nobody supervise" in said


def test_a_process_without_the_mark_of_the_run_is_left_alone(supervise, armed):
    code, _, said = supervise("adopt", armed.path)

    assert code == 64
    assert "does not carry the mark of run" in said


def test_directories_above_count_too_unless_they_are_sticky(run_directory):
    """Who may write there can put another run in its place."""
    for mode, trusted in ((0o777, False), (0o1777, True), (0o755, True)):
        run_directory.parent.chmod(mode)
        assert bool(find_foreign_writer(run_directory)[0]) is not trusted


@pytest.mark.parametrize("open_to", ["", "journal", "journal/00000.jrn"])
def test_files_that_others_may_write_count_where_others_get_in(run_directory, open_to):
    (run_directory / "journal").mkdir()
    (run_directory / "journal/00000.jrn").touch()
    run_directory.chmod(0o711)
    (run_directory / open_to).chmod(0o777)

    why, hint = find_foreign_writer(run_directory)
    assert "may be written by other users" in why
    assert hint == f"chmod -R go-w {run_directory}"
    run_directory.chmod(0o700)
    assert find_foreign_writer(run_directory) == ("", "")


@as_root
def test_a_file_of_another_user_in_our_directory_counts(run_directory):
    (run_directory / "command.json").write_text("[]")
    give_to(NOBODY, run_directory / "command.json")

    assert "belongs to user nobody" in find_foreign_writer(run_directory)[0]


READERS = (
    *("status {}", "why {} inc-1", "why-not --rule nonfinite --step 5 {}", "triage {}"),
    *("replay {}", "record {}", "export -o out.csv {}", "events {}"),
    *("audit verify {}", "audit show {}", "checkpoints {}", "checkpoints --verify {}"),
    *("adopt {}", "run -p nano --resume-run --run-dir {} -- train"),
    *("release {}", "reload {}", "outbox flush {}", "backtest --policy nano {}"),
)


def content(run) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("number", [0, 2])
def test_a_run_of_another_format_is_refused_whole(supervise, recorded, number):
    run = recorded()
    run.write_json("run.json", run.read_json("run.json") | {"format": number, "supervise": "7.0.1"})
    before = content(run)

    for command in READERS:
        code, out, said = supervise(*command.format(run.path, run.path).split())

        assert code in (64, 65) and not out, command
        assert f"has the format {number} of supervise 7.0.1; this is supervise" in said, command
        assert "pip install supervise-train==7.0.1" in said, command
        assert content(run) == before, command


def test_a_list_of_runs_names_one_of_another_format_and_leaves_it(supervise, recorded):
    run = recorded()
    run.write_json("run.json", run.read_json("run.json") | {"format": 2, "supervise": "rm -rf /"})
    before = content(run)

    listed = json.loads(supervise("runs", "--json", "--runs", run.path.parent)[1])
    code, kept, _ = supervise("gc", "--older-than", "0s", "--keep", "0", run.path.parent)

    assert "has the format 2 of supervise another version" in str(listed)
    assert code == 0 and "cannot be read: " in kept
    assert content(run) == before


def test_a_run_from_before_formats_had_numbers_is_read(supervise, recorded):
    run = recorded()
    described = run.read_json("run.json")
    del described["format"]
    run.write_json("run.json", described)

    assert supervise("status", run.path)[0] == 0


def test_a_job_whose_probe_speaks_another_version_is_not_taken_over(supervise, armed, tmp_path):
    shm = tmp_path / f"supervise-{os.getuid()}-{armed.id}"
    shm.mkdir(mode=0o700)
    header = wire.MAGIC + (wire.VERSION + 1).to_bytes(4, "little") + bytes(wire.FIXED_SIZE)
    (shm / f"rank-0.{os.getpid()}.seg").write_bytes(header)
    armed.write_json("probe.json", {"shm": str(shm)})

    code, _, said = supervise("adopt", armed.path)

    assert code == 64
    assert "has wire version 2, this supervisor reads version 1" in said
    assert "the job trains on, and is not touched" in said and "started it, supervise 0." in said
