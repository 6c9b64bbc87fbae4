"""The job's output arrives as without us and is kept, whoever dies: reader, relay, or we."""

import os
import signal
import sys
import threading

import psutil
import pytest

from supervise.runtime import OutputLog
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

# Prints a line for each one that it reads, and the exit code says whether all could be written.
ECHO = """
import signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
print("up", flush=True)
for line in sys.stdin:
    sys.stdout.write("got " + line)
    sys.stdout.flush()
    sys.stderr.write("also " + line)
sys.exit(3)
"""


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "output.log"


@pytest.fixture
def echo(wrapped, job_pid, kept):
    """A wrapped job whose output is kept, as the wrapper's process, with both its pipes one."""
    popen = wrapped(sys.executable, "-c", ECHO, env={**os.environ, "KEEP": str(kept)})
    popen.job = psutil.Process(job_pid(popen))
    assert popen.stdout.readline() == "up\n"
    return popen


def say(popen, text):
    popen.stdin.write(f"{text}\n")
    popen.stdin.flush()
    return popen.stdout.readline()


def close(popen, name):
    getattr(popen, name).close()
    setattr(popen, name, None)


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def relays_of(popen):
    return [
        child
        for child in psutil.Process(popen.pid).children()
        if is_alive(child) and "output_relay.py" in " ".join(child.cmdline())
    ]


def relay_of(popen):
    return wait_until(lambda: relays_of(popen), "a relay")[0]


def kill(relay):
    """Kill a relay, and wait until it is collected.

    Its first thread may be a zombie while another one, which is about to die, takes what the job
    writes next out of the pipe.
    """
    relay.kill()
    wait_until(lambda: not relay.is_running(), "the end of all threads of the relay")


def test_what_is_written_arrives_and_is_kept(echo, kept):
    assert say(echo, "one") == "got one\n"
    out, err = echo.communicate(timeout=60)

    assert (echo.returncode, out, err) == (3, "", "also one\n")
    assert sorted(kept.read_text().splitlines()) == ["also one", "got one", "up"]
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_relay_that_dies_is_replaced(echo, kept):
    """Nothing of the job's output is lost, and the job notices nothing; where relays die at once,
    the supervisor copies."""
    first = relay_of(echo)
    kill(first)

    assert say(echo, "two") == "got two\n"
    second = relay_of(echo)
    assert second.pid != first.pid
    wait_until(lambda: "got two" in kept.read_text(), "the kept line")
    for _ in range(2):
        kill(relay_of(echo))
        assert say(echo, "more") == "got more\n"
    assert relays_of(echo) == []
    echo.communicate(timeout=60)
    assert echo.returncode == 3


def test_the_relay_outlives_us(echo, kept):
    relay = relay_of(echo)
    echo.send_signal(signal.SIGKILL)
    echo.wait(60)

    assert say(echo, "three") == "got three\n"
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        relay.send_signal(number)
    assert say(echo, "four") == "got four\n"
    close(echo, "stdin")
    wait_until(lambda: not is_alive(relay), "the end of the relay")
    assert {"got three", "got four"} <= set(kept.read_text().splitlines())


def test_a_reader_that_has_gone_does_not_end_the_job(echo, kept):
    close(echo, "stdout")
    for number in range(3):
        echo.stdin.write(f"{number}\n")
    close(echo, "stdin")
    echo.communicate(timeout=60)  # stderr ends with the relay, which may end after us

    assert echo.returncode == 3
    assert [line for line in kept.read_text().splitlines() if "got" in line][-1] == "got 2"


RESIZED = """
import os, signal, sys
signal.signal(signal.SIGWINCH, lambda *_: print("size", os.get_terminal_size(1), flush=True))
print("tty", [os.isatty(fd) for fd in (0, 1, 2)], os.get_terminal_size(2), flush=True)
for line in sys.stdin:
    print("line", line.strip(), flush=True)
"""


def test_a_terminal_stays_a_terminal(shell, wrapper, tmp_path, kept):
    (tmp_path / "job.py").write_text(RESIZED)
    shell.type("stty cols 91 rows 21\n")
    command = [f"KEEP={kept}", *wrapper, sys.executable, str(tmp_path / "job.py")]
    size = r"os.terminal_size\(columns=91, lines=21\)"
    shell.type(" ".join(command) + "\n", rf"tty \[True, True, True\] {size}")
    shell.resize(30, 100)
    shell.expect(r"columns=100, lines=30")
    shell.type("\x1a", "Stopped", "ready> ")
    shell.type("fg\n", "job.py")  # now the terminal is the job's: before, the line is the shell's
    shell.type("hello\n", "line hello")
    shell.type("\x04", "ready> ")
    assert shell.foreground() == shell.bash.pid
    text = kept.read_bytes()
    assert b"line hello\n" in text and b"\r" not in text


def test_a_disk_that_is_full_or_slow_costs_the_log_only(tmp_path):
    log = OutputLog("/dev/full")
    log.put(b"x" * 100)
    log.close(5.0)
    assert log.lost == 100

    held = threading.Event()

    class Slow(OutputLog):
        def write(self, data):
            held.wait(10)
            super().write(data)

    slow = Slow(str(tmp_path / "slow.log"), waiting=250)
    slow.put(b"first\n")
    wait_until(lambda: slow.waiting == 0, "the first write")
    for _ in range(4):
        slow.put(b"y" * 100)
    held.set()
    wait_until(lambda: slow.waiting == 0, "the disk")
    slow.put(b"last\n")
    slow.close(5.0)
    text = (tmp_path / "slow.log").read_text()
    assert text.count("y" * 100) == 2
    assert text.endswith(
        "\n[supervise: 200 bytes were not kept: the disk did not take them]\nlast\n"
    )


def test_files_are_limited_in_number_and_size(tmp_path):
    path = tmp_path / "output.log"
    log = OutputLog(str(path), max_bytes=10)
    for number in range(7):
        log.put(f"part {number}...\n".encode())
    log.close(5.0)

    assert sorted(each.name for each in tmp_path.iterdir()) == [
        f"output.log.{n}" for n in (1, 2, 3)
    ]
    assert (tmp_path / "output.log.1").read_text() == "part 6...\n"
