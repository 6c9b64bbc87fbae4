"""The way in for the probe, and what keeps it out."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from supervise.runtime import (
    child_environment,
    explain_ulimit_shortage,
    forecast_tier,
    lock_run_directory,
    make_environment,
    mark_directory_owner,
    remove_environment,
    sweep_environments,
)
from supervise_probe.ipc import segment

PYTHON = sys.executable


OURS = str(Path(segment.__file__).parents[1] / "inject")


def test_only_two_variables_change(tmp_path):
    environ = {"PATH": "/bin", "PYTHONPATH": "/a:/b", "LANG": "C"}

    child = child_environment(environ, tmp_path / "probe.json")

    ours = {"PYTHONPATH": f"{OURS}:/a:/b", "SUPERVISE_PROBE": str(tmp_path / "probe.json")}
    assert child == environ | ours
    assert environ == {"PATH": "/bin", "PYTHONPATH": "/a:/b", "LANG": "C"}
    inner = child_environment(child, tmp_path / "inner.json")
    assert inner == child | {"SUPERVISE_PROBE": str(tmp_path / "inner.json")}
    for before in ({}, {"PYTHONPATH": ""}):  # an empty entry would be the working directory
        assert child_environment(before, tmp_path)["PYTHONPATH"] == OURS


def test_the_kill_switch_changes_nothing(tmp_path):
    off = {"SUPERVISE_DISABLE": "1"}
    assert child_environment(off, tmp_path) == off
    assert "SUPERVISE_PROBE" in child_environment({"SUPERVISE_DISABLE": "0"}, tmp_path)
    assert forecast_tier(["python", "x.py"], off) == ("T0", "SUPERVISE_DISABLE is set")


def test_too_few_files_are_named_before_a_run_begins():
    """Beside those that are open, twelve may be needed."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = sum(Path(f"/proc/self/fd/{fd}").exists() for fd in range(12))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 11, limits[1]))
        short = explain_ulimit_shortage()
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, limits[1]))
        enough = explain_ulimit_shortage()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert (short or "").startswith(f"only {used + 11} files may be open, {used} are (ulimit -n")
    assert enough is None


LIMITED = """
import resource, sys
from supervise.runtime import explain_ulimit_shortage
explain_ulimit_shortage()  # with what it imports
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), hard))
print(explain_ulimit_shortage())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("below", "text"), [(1, "only 511 MiB of address space"), (0, "None")])
def test_too_little_memory_is_named_before_a_run_begins(below, text):
    argv = [PYTHON, "-c", LIMITED, str((512 << 20) - below)]

    assert subprocess.check_output(argv, text=True).startswith(text)


ORDINARY = """
python train.py
python3.11 -u -m pkg.train -I
python -c pass -E
python -Wignore -X dev train.py -S
python -uc pass
python - -I
python --check-hash-based-pycs always train.py
env A=1 python train.py
timeout 5 nice -n 3 python train.py
bash run.sh
"""


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        *((command, None) for command in ORDINARY.split("\n")[1:-1]),
        ("python -I train.py", "python -I ignores PYTHONPATH"),
        ("python3 -uE train.py", "python -E ignores PYTHONPATH"),
        ("python -X dev -S train.py", "python -S does not import sitecustomize"),
        ("numactl -N 0 python3 -E train.py", "python -E ignores PYTHONPATH"),
        ("sleep 5", "sleep is not Python"),
    ],
)
def test_a_command_gets_the_probe_unless_something_keeps_it_out(command, reason):
    assert forecast_tier(command.split()) == ("T0" if reason else "T1", reason)


@pytest.mark.parametrize("flags", ["-I", "-E", "-S", "-u", "-Im"])
def test_the_forecast_is_what_python_does(flags, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('in')")
    argv = [PYTHON, flags, *(["platform"] if flags.endswith("m") else ["-c", "pass"])]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}

    out = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True).stdout

    assert (forecast_tier(argv)[0] == "T1") == out.startswith("in")


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("#!/usr/bin/env python3\n", None),
        ("#!/usr/bin/env -S python3 -I\n", "python -I ignores PYTHONPATH"),
        (
            "#!/bin/sh\n'''exec' \"/a very long/python3\" -E \"$0\" \"$@\"\n' '''\n",
            "python -E ignores PYTHONPATH",
        ),
        ("#!/bin/sh\necho hello\n", None),
        ("\x7fELF and so on", "tool is not Python"),
    ],
)
def test_a_script_is_judged_by_its_first_line(head, expected, tmp_path):
    tool = tmp_path / "tool"
    tool.write_text(head)
    tool.chmod(0o755)

    assert forecast_tier([str(tool), "--flag"])[1] == expected
    assert forecast_tier(["tool"], {"PATH": str(tmp_path)})[1] == expected


# ── the directory in shared memory: ours while we live, swept when everybody in it is dead ────────


OLD = 10_000


def aged(path):
    then = path.stat().st_mtime - OLD
    os.utime(path, (then, then))
    return path


def named(root, name):
    path = root / f"supervise-{os.getuid()}-{name}"
    path.mkdir()
    return path


def test_only_dead_and_old_directories_are_swept(tmp_path):
    mine = aged(make_environment(tmp_path, "mine"))
    named(tmp_path, "young")
    (tmp_path / f"supervise-{os.getuid()}-file").write_text("")
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    living, dead = (named(tmp_path, name) for name in ("living", "dead"))
    for path, pid in ((living, os.getpid()), (dead, done.pid)):
        (path / f"rank-0.{pid}.seg").write_bytes(b"")
        aged(path)

    assert sweep_environments(tmp_path) == [dead]
    assert mine.is_dir()
    assert not dead.exists()


MAKES = """
import pathlib, sys
from supervise.runtime import make_environment, sweep_environments
root = pathlib.Path(sys.argv[1])
print(sweep_environments(root), make_environment(root, "mine").name, flush=True)
sys.stdin.read()
"""


def test_a_killed_supervisor_lets_go(tmp_path):
    pipe = subprocess.PIPE
    made = subprocess.Popen([sys.executable, "-c", MAKES, tmp_path], stdin=pipe, stdout=pipe)
    made.stdout.readline()
    (path,) = tmp_path.iterdir()
    aged(path)
    assert sweep_environments(tmp_path) == []
    made.kill()
    made.communicate()

    assert sweep_environments(tmp_path) == [path]


def test_a_name_alone_keeps_no_directory_but_any_segment_of_a_living_process_does(tmp_path):
    """Pids are reused, and anything is planted; the probe may be that of another release."""
    path = make_environment(tmp_path, "mine")
    (path / f"rank-0.{os.getppid()}.seg").write_bytes(b"garbage")
    (path / "job.1").write_text("")
    os.mkfifo(path / f"rank-1.{os.getpid()}.seg")
    writer = segment.Writer.create(str(path), "mine", 0, 1, slots=16, capacity=8)
    writer.close()
    raw = bytearray(Path(writer.path).read_bytes())
    for version in (raw[8], raw[8] + 1):
        raw[8] = version
        Path(writer.path).write_bytes(raw)
        remove_environment(path)
        assert path.is_dir()
    Path(writer.path).unlink()
    (path / "owner").unlink()
    os.mkfifo(path / "owner")
    remove_environment(path)
    assert not path.exists()


def test_a_job_without_a_segment_keeps_its_directory(tmp_path):
    """Importing may take longer than its supervisor lives."""
    path = named(tmp_path, "starting")
    mark_directory_owner(path, os.getpid())

    assert sweep_environments(tmp_path) == []
    aged(path)
    assert sweep_environments(tmp_path) == []


AS_NOBODY = """
import os, sys
os.umask(0)
os.chdir(sys.argv[1])
os.setgid(65534)
os.setuid(65534)
os.mkfifo("supervise-0-fifo")
os.mkdir("supervise-0-directory")
os.mkfifo("supervise-0-directory/owner")
os.utime("supervise-0-directory", (0, 0))
os.symlink("supervise-0-directory", "supervise-0-link")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")
def test_what_another_user_plants_holds_up_no_start(tmp_path):
    tmp_path.chmod(0o777)  # without the sticky bit: no kernel setting helps
    for parent in list(tmp_path.parents)[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)
    subprocess.run([sys.executable, "-c", AS_NOBODY, str(tmp_path)], check=True)
    planted = {path.name for path in tmp_path.iterdir()}

    argv, null = [sys.executable, "-c", MAKES, tmp_path], subprocess.DEVNULL
    done = subprocess.run(argv, stdin=null, capture_output=True, text=True, timeout=60)

    assert done.stdout.strip() == "[] supervise-0-mine", done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {*planted, "supervise-0-mine"}


def test_a_directory_that_a_cleaner_emptied_is_removed(tmp_path):
    path = make_environment(tmp_path, "mine")
    (path / "owner").unlink()
    remove_environment(path)
    assert not path.exists()


@pytest.mark.parametrize("lacks", ["name", "mark", "owner"])
def test_only_what_is_ours_by_name_owner_and_mark_is_removed(tmp_path, lacks):
    if lacks == "owner" and os.geteuid() != 0:
        pytest.skip("only root can act as a second user")
    path = tmp_path / f"supervise-{0 if lacks == 'name' else ''}{os.getuid()}-run"
    path.mkdir()
    (path / "theirs").touch()
    if lacks != "mark":
        lock_run_directory(path)
    if lacks == "owner":
        os.chown(path, 65534, 65534)

    remove_environment(path)

    assert (path / "theirs").exists()
