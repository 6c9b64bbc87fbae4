"""Starting the command as the user would have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from supervise.errors import LaunchError
from supervise.runtime import spawn_job

PYTHON = sys.executable


@pytest.mark.parametrize("code", [0, 255])
def test_the_exit_code_is_the_jobs_own(wrapped, code):
    """Whatever the job exits with, we exit with."""
    popen = wrapped(PYTHON, "-c", f"raise SystemExit({code})")

    assert popen.wait() == code


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_death_by_a_signal_becomes_128_plus_n(wrapped, name):
    """The shell's rule, so that schedulers still see an out-of-memory kill as 137."""
    number = getattr(signal, name)

    assert wrapped("sh", "-c", f"ulimit -c 0; kill -{int(number)} $$").wait() == 128 + number


def test_stdin_and_stdout_pass_through(wrapped):
    """The job reads what is typed and its output comes out unchanged, stderr apart from stdout."""
    popen = wrapped("sh", "-c", "cat; echo oops >&2")

    out, err = popen.communicate("one\ntwo\n")

    assert out == "one\ntwo\n"
    assert "oops" in err  # our own lines come from a thread, at any place


def test_argv_directory_and_descriptors_are_untouched(wrapped, tmp_path):
    """Odd arguments, the working directory and an inherited descriptor arrive as they are."""
    read, write = os.pipe()
    code = "import os, sys; print(sys.argv[1:], os.getcwd()); os.write(int(sys.argv[1]), b'hi')"
    popen = wrapped(
        PYTHON, "-c", code, str(write), "", "a b", "--policy", "*", cwd=tmp_path, pass_fds=[write]
    )
    os.close(write)

    out, _ = popen.communicate()

    assert out.strip() == f"{[str(write), '', 'a b', '--policy', '*']} {tmp_path}"
    assert os.read(read, 10) == b"hi"
    os.close(read)


def test_the_job_has_a_process_group_of_its_own(wrapped, job_pid):
    """It does not lead it, nobody else is left in it, and it stays in our session."""
    popen = wrapped("sleep", "60")

    pid = job_pid(popen)

    assert os.getpgid(pid) not in (pid, os.getpgid(popen.pid))
    assert not psutil.pid_exists(os.getpgid(pid))
    assert os.getsid(pid) == os.getsid(popen.pid)


def test_a_job_may_begin_a_session_of_its_own(wrapped, job_pid):
    """As without us: `setsid` does not fork, and the first process is the one that leads it."""
    program = (
        "import os; print(os.getpid(), os.getsid(0), flush=True); import sys; sys.stdin.read()"
    )
    popen = wrapped("setsid", PYTHON, "-c", program)

    pid = job_pid(popen)
    out, _ = popen.communicate("")

    assert out == f"{pid} {pid}\n"
    assert popen.returncode == 0


def test_killing_the_supervisor_leaves_the_job_alive_with_working_stdio(wrapped, job_pid):
    """kill -9 of ours: the job still reads its stdin and writes its stdout, to its own end."""
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
    """`nohup supervise -- …` protects the job from a hang-up, as without us."""
    code = (
        "import os, signal; os.kill(os.getppid(), signal.SIGHUP);"
        "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    )
    command = ["nohup", *wrapper, PYTHON, "-c", code]

    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    assert done.stdout == "True\n"


def test_a_parent_that_ignores_sigchld_costs_no_exit_code(wrapper):
    """With SIGCHLD ignored the kernel throws exit codes away; ours still arrives."""
    command = [*wrapper, "sh", "-c", "exit 5"]
    ignoring = (
        "import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
        f"os.execv({PYTHON!r}, {command!r})"
    )

    assert subprocess.run([PYTHON, "-c", ignoring], capture_output=True).returncode == 5


@pytest.mark.parametrize(
    ("command", "code", "hint"),
    [
        ("slepp", 127, "did you mean sleep?"),
        ("train.py", 127, "did you mean: supervise -- python train.py"),
        ("./train.py", 126, "did you mean: supervise -- python ./train.py"),
    ],
)
def test_a_command_that_cannot_be_started_comes_with_a_hint(
    tmp_path, monkeypatch, command, code, hint
):
    """A guess at the right name; a script without its interpreter is the commonest slip."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    with pytest.raises(LaunchError, match="cannot start") as caught:
        spawn_job([command], os.environ)

    assert (caught.value.exit_code, caught.value.hint) == (code, hint)


def test_what_cannot_be_executed_exits_126_and_says_why(tmp_path):
    """A directory, a file without mode x, a text file, a script with a missing interpreter."""
    plain, text, script = tmp_path / "plain", tmp_path / "text", tmp_path / "script"
    plain.write_text("")
    text.write_text("just words\n")
    script.write_text("#!/nowhere/python3\nprint(1)\n")
    text.chmod(0o755)
    script.chmod(0o755)
    reasons = {
        tmp_path: "it is a directory",
        plain: "it is not executable",
        text: "it is not a program",
        script: "its interpreter /nowhere/python3 does not exist",
    }

    for path, reason in reasons.items():
        with pytest.raises(LaunchError, match=reason) as caught:
            spawn_job([str(path)], os.environ)

        assert caught.value.exit_code == 126
