"""Starting the command as the user would have."""

import os
import subprocess
import sys

import psutil
import pytest

from supervise.errors import LaunchError
from supervise.runtime import Process

PYTHON = sys.executable


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 255", 255), ("kill -9 $$", 137)],
)
def test_the_exit_code_is_the_jobs_own_or_128_and_its_signal(wrapped, script, code):
    assert wrapped("sh", "-c", script).wait() == code


TELLS = """
import os, sys
print(sys.argv[1:], os.getcwd(), sys.stdin.read(), flush=True)
print("oops", file=sys.stderr)
os.write(int(sys.argv[1]), b"hi")
"""


def test_argv_directory_and_descriptors_are_untouched(wrapped, tmp_path):
    read, write = os.pipe()
    argv = [str(write), "", "a b", "--policy", "*"]
    popen = wrapped(PYTHON, "-c", TELLS, *argv, cwd=tmp_path, pass_fds=[write])
    os.close(write)

    out, err = popen.communicate("one\ntwo")

    assert out == f"{argv} {tmp_path} one\ntwo\n"
    assert "oops" in err  # our own lines come from a thread, at any place
    assert os.read(read, 10) == b"hi"
    os.close(read)


def test_the_job_has_a_process_group_of_its_own(wrapped, job_pid):
    popen = wrapped("sleep", "60")

    pid = job_pid(popen)

    assert os.getpgid(pid) not in (pid, os.getpgid(popen.pid))
    assert not psutil.pid_exists(os.getpgid(pid))
    assert os.getsid(pid) == os.getsid(popen.pid)


def test_a_job_may_begin_a_session_of_its_own(wrapped, job_pid):
    """As without us: `setsid` does not fork, and the first process is the one that leads it."""
    program = "import os, sys; print(os.getpid(), os.getsid(0), flush=True); sys.stdin.read()"
    popen = wrapped("setsid", PYTHON, "-c", program)

    pid = job_pid(popen)
    out, _ = popen.communicate("")

    assert out == f"{pid} {pid}\n"
    assert popen.returncode == 0


def test_killing_the_supervisor_leaves_the_job_alive_with_working_stdio(wrapped, job_pid):
    code = "import sys\nfor line in sys.stdin: print('got', line.strip(), flush=True)\nprint('end')"
    popen = wrapped(PYTHON, "-c", code)
    job = psutil.Process(job_pid(popen))
    popen.stdin.write("before\n")
    popen.stdin.flush()
    assert popen.stdout.readline() == "got before\n"

    popen.kill()
    popen.wait()
    out, _ = popen.communicate("after\n")

    assert out == "got after\nend\n"
    assert psutil.wait_procs([job], timeout=60)[0] == [job]


def test_a_signal_that_was_ignored_stays_ignored_for_the_job(wrapper):
    command = ["nohup", *wrapper, "sh", "-c", "kill -HUP $PPID; kill -HUP $$; echo lives"]

    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    assert done.stdout == "lives\n"


def test_a_parent_that_ignores_sigchld_costs_no_exit_code(wrapper):
    """The kernel throws exit codes away then; ours still arrives."""
    command = [*wrapper, "sh", "-c", "exit 5"]
    ignores = "import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    ignoring = [PYTHON, "-c", f"{ignores}; os.execv({PYTHON!r}, {command!r})"]

    assert subprocess.run(ignoring, capture_output=True).returncode == 5


@pytest.mark.parametrize(
    ("command", "code", "reason", "hint"),
    [
        ("slepp", 127, "", "did you mean sleep?"),
        ("train.py", 127, "", "did you mean: supervise -- python train.py"),
        ("./train.py", 126, "not executable", "did you mean: supervise -- python ./train.py"),
        ("./folder", 126, "it is a directory", None),
        ("./text", 126, "it is not a program", None),
        ("./script", 126, "its interpreter /nowhere/python3 does not exist", None),
    ],
)
def test_a_command_that_cannot_be_started_says_why_with_a_hint(
    tmp_path, monkeypatch, command, code, reason, hint
):
    """A guess at the right name; a script without its interpreter is the commonest slip."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.py").write_text("print(1)\n")
    for name, text in (("text", "just words\n"), ("script", "#!/nowhere/python3\nprint(1)\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with pytest.raises(LaunchError, match=f"cannot start.*{reason}") as caught:
        Process.start([command], os.environ)

    assert caught.value.exit_code == code
    assert hint is None or caught.value.hint == hint
