"""Whatever is wrong gets one clear message and a documented code; the job's own result is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HELLO = [sys.executable, "-c", "import sys; print('hello'); sys.exit(5)"]


def test_no_command(supervise):
    """64, and what to type instead."""
    done = supervise("--policy", "nano")

    assert done.returncode == 64
    assert "no command given" in done.stderr
    assert "supervise --policy nano -- python train.py" in done.stderr


def test_an_unknown_option_is_not_the_jobs(supervise):
    """64, before anything is started."""
    done = supervise("--polcy", "nano", "--", *HELLO)

    assert done.returncode == 64
    assert "--policy" in done.stderr
    assert "hello" not in done.stdout


def test_an_unknown_policy(supervise):
    """65, and the nearest name."""
    done = supervise("--policy", "nanoo", "--", *HELLO)

    assert done.returncode == 65
    assert "nano" in done.stderr.replace("nanoo", "")
    assert "hello" not in done.stdout


def test_a_broken_policy_names_line_and_column(supervise, tmp_path):
    """65, every mistake at once, each with file:line:col."""
    path = tmp_path / "bad.yaml"
    path.write_text(
        "version: supervise/v1\npolicy: bad\nmode: enforce\nuse: [nonfinit]\nbudgts: {}\n"
    )
    done = supervise("--policy", str(path), "--", *HELLO)

    assert done.returncode == 65
    assert "bad.yaml:4:" in done.stderr
    assert "bad.yaml:5:1" in done.stderr
    assert "nonfinite" in done.stderr
    assert "budgets" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_unknown_fault(supervise):
    """64, and what it is called."""
    done = supervise("--drill", "lr_spik@10", "--", *HELLO)

    assert done.returncode == 64
    assert "lr_spike" in done.stderr


def test_a_command_that_is_not_there(supervise, tmp_path):
    """127, and no run directory is left."""
    done = supervise("--run-dir", "run", "--", "pythn-no-such-command", "train.py")

    assert done.returncode == 127
    assert "command not found" in done.stderr
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    supervise("--run-dir", "mine", "--", "pythn-no-such-command")
    supervise("--", "pythn-no-such-command")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_command_that_is_not_executable(supervise, tmp_path):
    """126, with the way out."""
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    done = supervise("--", "./train.py")

    assert done.returncode == 126
    assert "python ./train.py" in done.stderr


def test_a_command_that_is_not_python(supervise):
    """It runs, with its own result; the downgrade is said once."""
    run = supervise.run(job=["sh", "-c", "echo out; exit 7"])

    assert (run.returncode, run.stdout) == (7, "out\n")
    assert run.stderr.count("no step was seen") == 1
    assert run.state["tier"] == "T0"


def test_a_run_directory_that_cannot_be_made(supervise, tmp_path):
    """64, and the job is not started: nothing would be recorded."""
    (tmp_path / "file").write_text("")
    done = supervise("--run-dir", "file/run", "--", *HELLO)

    assert done.returncode == 64
    assert "--run-dir" in done.stderr
    assert "hello" not in done.stdout


def test_a_run_directory_that_is_not_empty(supervise, tmp_path):
    """64: two runs are never mixed."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    done = supervise("--run-dir", "run", "--", *HELLO)

    assert done.returncode == 64
    assert "not empty" in done.stderr
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_isolated_python(supervise):
    """`python -I` keeps the probe out: said at the start, watched as T0."""
    run = supervise.run(job=[sys.executable, "-I", "-c", "print('alone')"])

    assert (run.returncode, run.stdout) == (0, "alone\n")
    assert "python -I ignores PYTHONPATH" in run.stderr
    assert run.state["tier"] == "T0"


def test_a_job_without_torch(supervise):
    """Python that never imports torch: T0, and why."""
    run = supervise.run(job=HELLO)

    assert (run.returncode, run.stdout) == (5, "hello\n")
    assert "has not imported torch" in run.stderr


def test_a_job_that_ends_before_its_first_step(supervise):
    """torch was imported, nothing was trained: said, and the exit code is the job's."""
    run = supervise.run(job=[sys.executable, "-c", "import torch; raise SystemExit(9)"])

    assert run.returncode == 9
    assert "no optimizer step" in run.stderr


def test_a_full_shared_memory(supervise, tiny_job, tmp_path):
    """No space for a segment: the probe stays off and says so; the job trains on to its end."""
    full = tmp_path / "shm"
    full.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(full)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        supervise.env["SUPERVISE_SHM"] = str(full)
        run = supervise.run("--policy", "nano", job=tiny_job("--steps", 40))
    finally:
        subprocess.run(["umount", str(full)], check=True)

    assert run.returncode == 0
    assert "steps 40" in run.stdout
    assert "No space left" in run.stderr
    assert run.state["tier"] == "T0"


def test_a_run_directory_that_fills_up(supervise, tiny_job, tmp_path):
    """The run directory is full: watching goes on, acting stops, the job is untouched."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        done = supervise(
            "--policy",
            "nano",
            "--run-dir",
            str(disk / "run"),
            "--drill",
            "lr_spike@150",
            "--",
            *tiny_job("--steps", 900),
        )
    finally:
        subprocess.run(["umount", str(disk)], check=True)

    assert done.returncode == 0
    assert "steps 900" in done.stdout
    assert "no action will be taken" in done.stderr


def test_a_disabled_probe(supervise):
    """SUPERVISE_DISABLE=1 makes injection a no-op; the command still runs."""
    supervise.env["SUPERVISE_DISABLE"] = "1"
    run = supervise.run(job=[sys.executable, "-c", "import os; print('PYTHONPATH' in os.environ)"])

    assert run.stdout == f"{'PYTHONPATH' in os.environ}\n"
    assert "SUPERVISE_DISABLE is set" in run.stderr


def test_a_directory_that_is_no_run(supervise, tmp_path):
    """Every reader says so in the same way."""
    for command in (("status",), ("replay",), ("audit", "show"), ("export", "--csv")):
        done = supervise(*command, str(tmp_path))
        assert done.returncode == 64, command
        assert "holds no run" in done.stderr


def test_completion_of_a_pipe(supervise, tiny_job):
    """A reader that goes away (`| head`) is no traceback."""
    run = supervise.run(job=HELLO)
    shown = subprocess.run(
        f"{sys.executable} -m supervise audit show {run.directory} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )

    assert "Traceback" not in shown.stderr
    assert Path(run.directory).exists()
