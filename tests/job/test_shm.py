"""The directory in shared memory: ours while we live, swept when everybody in it is dead."""

from __future__ import annotations

import os
import subprocess
import sys

from supervise.job import shm

OLD = 10_000


def aged(path):
    then = path.stat().st_mtime - OLD
    os.utime(path, (then, then))
    return path


def test_only_dead_and_old_directories_are_swept(tmp_path):
    """Locked, young, with a living job, or no directory at all: left alone."""
    mine = aged(shm.make(tmp_path, "mine"))
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

    assert shm.sweep(tmp_path) == [dead]
    assert mine.is_dir()
    assert not dead.exists()


def test_a_killed_supervisor_lets_go(tmp_path):
    """The lock goes with the process, whatever became of it."""
    made = subprocess.Popen(
        [sys.executable, "-c",
         "import sys, pathlib, time; from supervise.job import shm;"
         f"print(shm.make(pathlib.Path({str(tmp_path)!r}), 'theirs'), flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert made.stdout is not None
    made.stdout.readline()
    (path,) = tmp_path.iterdir()
    aged(path)
    assert shm.sweep(tmp_path) == []
    made.kill()
    made.communicate()

    assert shm.sweep(tmp_path) == [path]


def test_scarce_memory_gets_fewer_slots(tmp_path):
    """Never fewer than 256; all that were asked for where there is room."""
    assert shm.slots(tmp_path, 8192) == 8192
    assert shm.slots(tmp_path / "absent", 8192) == 8192


def test_a_job_without_a_segment_keeps_its_directory(tmp_path):
    """Importing may take longer than its supervisor lives."""
    path = tmp_path / f"supervise-{os.getuid()}-starting"
    path.mkdir()
    shm.lend(path, os.getpid())

    assert shm.sweep(tmp_path) == []
    aged(path)
    assert shm.sweep(tmp_path) == []
