"""The directory in shared memory: ours while we live, swept when everybody in it is dead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervise.runtime import (
    lend_directory,
    make_environment,
    remove_environment,
    sweep_environments,
    take_ownership,
)
from supervise_probe.ipc.segment import Writer

OLD = 10_000


def aged(path):
    then = path.stat().st_mtime - OLD
    os.utime(path, (then, then))
    return path


def test_only_dead_and_old_directories_are_swept(tmp_path):
    """Locked, young, with a living job, or no directory at all: left alone."""
    mine = aged(make_environment(tmp_path, "mine"))
    prefix = f"supervise-{os.getuid()}-"
    young = tmp_path / f"{prefix}young"
    young.mkdir()
    living = tmp_path / f"{prefix}living"
    living.mkdir()
    (living / f"rank-0.{os.getpid()}.seg").write_bytes(b"")
    aged(living)
    (tmp_path / f"{prefix}file").write_text("")
    dead = tmp_path / f"{prefix}dead"
    dead.mkdir()
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    (dead / f"rank-0.{done.pid}.seg").write_bytes(b"")
    aged(dead)

    assert sweep_environments(tmp_path) == [dead]
    assert mine.is_dir()
    assert not dead.exists()


def test_a_killed_supervisor_lets_go(tmp_path):
    """The lock goes with the process, whatever became of it."""
    made = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib, time; from supervise.runtime import environment as shared_memory;"
            f"print(shared_memory.make(pathlib.Path({str(tmp_path)!r}), 'theirs'), flush=True);"
            "time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert made.stdout is not None
    made.stdout.readline()
    (path,) = tmp_path.iterdir()
    aged(path)
    assert sweep_environments(tmp_path) == []
    made.kill()
    made.communicate()

    assert sweep_environments(tmp_path) == [path]


def test_a_name_alone_keeps_no_directory(tmp_path):
    """Only a segment that a living process wrote does: pids are reused, and anything is planted."""
    path = make_environment(tmp_path, "mine")
    (path / f"rank-0.{os.getppid()}.seg").write_bytes(b"garbage")
    (path / "job.1").write_text("")
    os.mkfifo(path / f"rank-1.{os.getpid()}.seg")
    writer = Writer.create(str(path), "mine", 0, 1, slots=16, capacity=8)

    remove_environment(path)
    assert path.is_dir()
    writer.close()
    Path(writer.path).unlink()
    remove_environment(path)
    assert not path.exists()


def test_a_segment_that_cannot_be_read_may_be_somebodys(tmp_path):
    """The probe in the job may be that of another release, with a wire version of its own."""
    path = make_environment(tmp_path, "mine")
    writer = Writer.create(str(path), "mine", 0, 1, slots=16, capacity=8)
    raw = bytearray(Path(writer.path).read_bytes())
    raw[8] += 1
    Path(writer.path).write_bytes(raw)
    writer.close()

    remove_environment(path)
    assert path.is_dir()


def test_a_job_without_a_segment_keeps_its_directory(tmp_path):
    """Importing may take longer than its supervisor lives."""
    path = tmp_path / f"supervise-{os.getuid()}-starting"
    path.mkdir()
    lend_directory(path, os.getpid())

    assert sweep_environments(tmp_path) == []
    aged(path)
    assert sweep_environments(tmp_path) == []


AS_NOBODY = """
import os, sys
os.umask(0)
os.chdir(sys.argv[1])
os.setgid(65534)
os.setuid(65534)
for name in ("fifo", "directory", "link"):
    place = f"supervise-0-{name}"
    if name == "fifo":
        os.mkfifo(place)
    elif name == "link":
        os.symlink("supervise-0-directory", place)
    else:
        os.mkdir(place)
        os.mkfifo(place + "/owner")
        os.utime(place, (0, 0))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")
def test_what_another_user_plants_holds_up_no_start(tmp_path):
    """A FIFO, a link, a directory with a FIFO in it: passed over, and left alone."""
    tmp_path.chmod(0o777)  # without the sticky bit: no kernel setting helps
    for parent in list(tmp_path.parents)[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)
    subprocess.run([sys.executable, "-c", AS_NOBODY, str(tmp_path)], check=True)
    planted = sorted(path.name for path in tmp_path.iterdir())
    start = (
        "import pathlib, sys; from supervise.runtime import environment as shared_memory;"
        "root = pathlib.Path(sys.argv[1]);"
        "print(shared_memory.sweep(root), shared_memory.make(root, 'mine').name)"
    )

    done = subprocess.run(
        [sys.executable, "-c", start, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stdout.strip() == "[] supervise-0-mine", done.stderr
    assert sorted({p.name for p in tmp_path.iterdir()} - {"supervise-0-mine"}) == planted


@pytest.mark.parametrize("lacks", ["name", "mark", "owner"])
def test_only_what_is_ours_by_name_owner_and_mark_is_removed(tmp_path, lacks):
    """The path may have been written down by somebody else."""
    if lacks == "owner" and os.geteuid() != 0:
        pytest.skip("only root can act as a second user")
    name = f"supervise-{0 if lacks == 'name' else ''}{os.getuid()}-run"
    path = tmp_path / name
    path.mkdir()
    (path / "theirs").touch()
    if lacks != "mark":
        take_ownership(path)
    if lacks == "owner":
        os.chown(path, 65534, 65534)

    remove_environment(path)

    assert (path / "theirs").exists()
