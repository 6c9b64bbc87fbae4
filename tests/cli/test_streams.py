import contextlib
import os
import select
import threading

import pytest

from supervise.cli._streams import MAX_BYTES, Stream


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
    """A reader that comes back gets whole lines, and at the place of the lost ones their number."""
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
    """A message to people counts as printed once it is, and as failed when it cannot be."""
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
    """A process at its limit of threads can say why it ends."""
    reader, writer = os.pipe()
    stream = Stream(writer)
    stream.write("the reason\n")
    stream.flush()

    assert os.read(reader, 100) == b"the reason\n"
