"""An interactive shell, a real terminal, and us between the shell and the job."""

import os
import shutil
import sys

import psutil
import pytest

from tests.support.waiting import wait_until

PYTHON = sys.executable
COUNTER = """
import signal, sys, time
hits = 0
def hit(*_):
    global hits
    hits += 1
signal.signal(signal.SIGINT, hit)
print("tty", sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty(), flush=True)
for line in sys.stdin:
    print("line", line.strip(), "hits", hits, flush=True)
print("end of input", flush=True)
"""
WAITER = """
import signal, sys, time
hits = []
signal.signal(signal.SIGINT, lambda *_: hits.append(1))
print("up", flush=True)
while not hits:
    time.sleep(0.01)
time.sleep(0.2)
print("hit", len(hits), flush=True)
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash for job control")


ENDLESS = """
import time
for n in range(10**6):
    print("beat", n, flush=True)
    time.sleep(0.1)
"""


@pytest.fixture
def run(shell, wrapper, tmp_path):
    def type_it(code, *patterns, suffix=""):
        script = tmp_path / "job.py"
        script.write_text(code)
        shell.type(" ".join([*wrapper, PYTHON, str(script)]) + f"{suffix}\n", *patterns)

    return type_it


def test_the_job_owns_the_terminal_and_gives_it_back(shell, run):
    run(COUNTER)
    pid = int(shell.expect(r"pid (\d+)")[1])
    shell.expect("tty True True True")

    assert shell.foreground() == os.getpgid(pid)
    shell.type("\x03")
    shell.type("hello\n", "line hello hits 1")
    shell.type("\x04", "end of input", "ready> ")
    assert shell.foreground() == shell.bash.pid
    shell.type("echo code $?\n", "code 0")


def test_ctrl_c_reaches_a_job_that_left_its_group(shell, run):
    run(f"import os\nos.setsid()\n{WAITER}", "up")
    wait_until(lambda: shell.foreground() in map(os.getpgid, psutil.pids()))

    shell.type("\x03", "hit 1", "ready> ")
    assert shell.foreground() == shell.bash.pid


def test_a_typed_interrupt_is_told_from_one_that_was_sent(shell, run):
    run(ENDLESS, "beat 1")
    shell.type("\x03", "KeyboardInterrupt", "interrupted at the terminal", "ready> ")
    shell.type("echo code $?\n", "code 130")
    run(ENDLESS, suffix=" < /dev/null &")
    pid = int(shell.expect(r"pid (\d+)")[1])
    shell.expect("beat 1")

    psutil.Process(pid).send_signal(2)
    shell.type("wait %1; echo co''de $?\n")

    assert "interrupted at the terminal" not in shell.expect("(?s)(.*)code 130")[1]


def test_ctrl_z_stops_both_and_fg_continues_both(shell, run):
    run(COUNTER)
    pid = int(shell.expect(r"pid (\d+)")[1])
    shell.expect("tty True")

    for round_ in "12":
        shell.type("\x1a", "Stopped", "ready> ")
        shell.type("echo shell is $((40+2))\n", "shell is 42")
        shell.type("fg\n", "job.py")
        shell.type(f"{round_}\n", f"line {round_} hits 0")

    assert shell.foreground() == os.getpgid(pid)
    shell.type("\x04", r"suspended for \d{5,} ns")


def test_killing_us_leaves_the_job_running_and_the_shell_usable(shell, run):
    run(ENDLESS)
    job = psutil.Process(int(shell.expect(r"pid (\d+)")[1]))
    shell.expect("beat 1")

    job.parent().kill()

    shell.expect("Killed")
    last = int(shell.expect(r"beat (\d+)\s")[1])
    shell.expect(f"beat {last + 3}")
    assert shell.foreground() == shell.bash.pid
    job.kill()


def test_bg_lets_it_run_without_the_terminal(shell, run):
    run(ENDLESS, "beat 3")

    shell.type("\x1a", "Stopped")
    shell.type("bg\n", r"beat \d+\s")
    assert shell.foreground() == shell.bash.pid
    shell.type("fg\n", r"beat \d+\s")
    shell.type("\x03", "KeyboardInterrupt", "ready> ")


def test_a_job_that_reads_at_once_is_not_stopped(shell, wrapper):
    """It may ask for input before we have handed it the terminal."""
    for _ in range(2):
        shell.type(" ".join([*wrapper, "head", "-n1"]) + "\n", r"pid \d+")
        shell.type("word\n", r"word\s+word\r\n", "ready> ")


def test_a_pipeline_around_us_stops_and_goes_on(shell, run):
    """`supervise -- … | cat`: Ctrl-Z stops the pipe as well, so that the shell comes back."""
    run(COUNTER, "tty True False True", suffix=" | cat")

    shell.type("\x1a", "Stopped", "ready> ")
    shell.type("fg\n", "job.py")
    shell.type("x\n", "line x hits 0")


def test_a_job_that_was_too_quick_for_us_is_continued(shell, run):
    """Stopped for reading although the terminal is its own by now: the shell hears nothing."""
    stops = "import os, signal\nos.kill(os.getpid(), signal.SIGTTIN)\n"
    run(f"{stops}print('went', input('say: '))", "say: ")
    shell.type("on\n", "went on")
