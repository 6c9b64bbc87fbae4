import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading

import pytest

from supervise.cli._streams import MAX_BYTES, Stream, share_terminal


@pytest.fixture
def full():
    """Both ends of a pipe that takes no byte more."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def drained(reader, until):
    """Read on, as somebody who came back, until `until` has come."""
    text = b""
    while until not in text:
        assert select.select([reader], [], [], 60)[0], text[-200:]
        text += os.read(reader, 1 << 16)
    return text.lstrip(b"x").decode()


def test_nobody_who_writes_waits_and_what_is_lost_is_counted(full):
    reader, writer = full
    stream = Stream(writer)
    line = "y" * 1023 + "\n"
    for _ in range(2 * MAX_BYTES // len(line)):
        stream.write(line)
    stream.flush()

    text = drained(reader, b"missing here")
    stream.write("again\n")
    text += drained(reader, b"again\n")

    lost = 2 * MAX_BYTES // len(line) - text.count("y\n")
    assert lost > 0
    assert text.count("missing") == 1
    told = f"supervise: {lost} lines are missing here: standard error could not be written\n"
    assert text.endswith(f"y\n{told}again\n")


def test_who_wants_to_know_waits_for_his_own_text(full):
    reader, writer = full
    stream = Stream(writer)
    came = threading.Event()
    waiting = threading.Thread(target=lambda: (stream.deliver("a\n"), came.set()), daemon=True)
    waiting.start()
    stream.flush()

    assert not came.is_set()
    assert drained(reader, b"a\n").endswith("a\n")
    assert came.wait(60)
    with pytest.raises(OSError, match="Bad file"):
        Stream(-1).deliver("b\n")


def test_a_line_is_written_whole():
    """Standard error is shared: what comes in parts waits for its end, or for a flush."""
    reader, writer = os.pipe()
    stream = Stream(writer)
    stream.write("one")
    stream.deliver("two\n")
    stream.write(" line\nthe rest")
    stream.flush()

    assert os.read(reader, 100) == b"two\none line\nthe rest"


def test_without_a_thread_a_last_word_is_still_said(no_threads):
    reader, writer = os.pipe()
    stream = Stream(writer)
    stream.write("the reason\n")
    stream.flush()

    assert os.read(reader, 100) == b"the reason\n"


class Screen:
    """The lines of a terminal of a few columns, as an xterm wraps them."""

    def __init__(self, columns):
        self.columns, self.lines, self.column = columns, [""], 0

    def feed(self, data):
        text = data.decode().replace("\r\n", "\n").replace("\x1b[K", "\v")
        for char in text:
            if char == "\r":
                self.column = 0
            elif char == "\v":
                self.lines[-1] = self.lines[-1][: self.column]
            elif char == "\n":
                self.lines.append("")
                self.column = 0
            else:
                if self.column == self.columns:  # it is behind the last column
                    self.lines.append("")
                    self.column = 0
                line = self.lines[-1].ljust(self.column)
                self.lines[-1] = line[: self.column] + char + line[self.column + 1 :]
                self.column += 1


@pytest.mark.parametrize(
    ("before", "shown"),
    [
        (b"", ["ours"]),
        (b"epoch 1\n", ["epoch 1", "ours"]),
        (b"\r 40%|####    |", [" 40%|####    |", "ours"]),
        (b"\r 40%|########    | 4/10", [" 40%|########    | 4", "/10", "ours"]),
        (b"\r" + b"#" * 20, ["#" * 20, "ours"]),
    ],
    ids=["empty", "line", "bar", "wrapped", "full"],
)
def test_our_line_begins_in_a_line_of_its_own(monkeypatch, before, shown):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 10, 20, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    stream = Stream(slave)
    monkeypatch.setattr(sys, "stderr", stream)
    share_terminal()
    os.write(slave, before)
    stream.deliver("ours\n")
    os.write(slave, b"\r 50%")
    screen = Screen(20)
    while select.select([master], [], [], 0.05)[0]:
        screen.feed(os.read(master, 4096))
    os.close(slave)
    os.close(master)

    assert [line.rstrip() for line in screen.lines] == [*shown, " 50%"]


def test_no_terminal_gets_no_control_characters(monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stderr", Stream(writer))
    monkeypatch.setenv("TERM", "xterm")
    share_terminal()
    sys.stderr.deliver("ours\n")
    assert os.read(reader, 100) == b"ours\n"
    _, slave = pty.openpty()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stderr", Stream(slave))
    share_terminal()
    assert not sys.stderr.shared


def test_our_lines_do_not_join_a_progress_bar_in_a_file(tmp_path):
    job = "import sys; sys.stderr.write('\\r 40%|####    | 4/10'); sys.stderr.flush(); sys.exit(3)"
    log = tmp_path / "log"
    with log.open("wb") as out:
        argv = [sys.executable, "-m", "supervise", "--run-dir", str(tmp_path / "run"), "--"]
        done = subprocess.run([*argv, sys.executable, "-c", job], stdout=out, stderr=out)
    lines = log.read_bytes().split(b"\n")

    assert done.returncode == 3
    assert b"\r 40%|####    | 4/10" in lines, "the bar stays as the job wrote it"
    ours = [line for line in lines if b"supervise: " in line]
    assert ours and all(line.startswith(b"supervise: ") for line in ours)
