import fcntl
import os
import struct
import subprocess
import sys
import termios

import pytest

from supervise import notifiers
from supervise.core.model import Advice, NotifyError, Step

CODE = """
import os, sys
from supervise import notifiers
from supervise.core.model import Advice, Message
(console,), _ = notifiers.build_senders({"console": {}}, os.environ)
console.send(Message("r", None, "SEV0", "t", "", "", Advice(), -1), key="k")
"""


def console():
    """The channel, on the standard error of the moment."""
    (sender,), _ = notifiers.build_senders({"console": {}}, {})
    return sender


def test_the_same_again_is_not_printed(message, capsys):
    """Only changes are news; another step alone is none."""
    sender, title = console(), "loss spike: verified"
    assert sender.send(message(), key="1") == "printed"
    assert capsys.readouterr().err.startswith("supervise: SEV1 loss spike (step 152)\n")

    assert sender.send(message(step=153), key="2") == "unchanged, not printed"
    assert capsys.readouterr().err == ""
    assert sender.send(message(title=title), key="3") == "printed"
    assert sender.send(message(incident="inc-2", title=title), key="4") == "printed"


def test_a_job_cannot_write_escape_sequences(message, capsys):
    """Titles, bells, line feeds and right-to-left marks from a job stay text on one line."""
    evil = "a\033]0;owned\007b\r\nsupervise: SEV0 fake\u202e"

    console().send(message(verdict=evil, title=evil), key="k")

    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 4
    assert all(c.isprintable() or c == "\n" for c in shown)


@pytest.mark.parametrize(("more", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_no_color_is_respected_on_a_real_terminal(more, coloured):
    ours, theirs = os.openpty()
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"} | more
    subprocess.run([sys.executable, "-c", CODE], stderr=theirs, env=env, check=True)
    text = os.read(ours, 4096).decode()
    os.close(ours)
    os.close(theirs)

    assert ("\033" in text) == coloured
    assert "SEV0" in text and "before the first step" in text


def test_a_narrow_terminal_breaks_no_word(message, monkeypatch):
    """Each line says who speaks; the text begins in one column; a command stays whole."""
    command = "supervise lr /data/runs/20260105-101112-7f3a9c 1.0"
    words = "the update norm and the gradient norm moved first, then the loss"
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 60, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        step = Step("to let the rate go", command)
        text = message(verdict=words, next=Advice(None, (step,)))
        console().send(text, key="k")
        lines = os.read(ours, 4096).decode().splitlines()
    os.close(ours)

    assert [line.removeprefix("supervise: ") for line in lines] == [
        "\033[31mSEV1\033[0m loss spike (step 152)",
        "  what  the update norm and the gradient norm",
        "        moved first, then the loss",
        "  why   spike: loss_z > 5",
        "  next  to let the rate go:",
        f"        {command}",
    ]


def test_no_colour_in_a_file_and_nothing_on_stdout():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)

    assert (done.stderr, done.stdout) == ("supervise: SEV0 t (before the first step)\n", "")


def test_a_closed_terminal_is_a_failed_delivery(message, monkeypatch):
    """Not a crash: the run does not depend on who is looking."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stderr", stream)

    with pytest.raises(NotifyError, match="Broken pipe"):
        console().send(message(), key="k")

    with pytest.raises(BrokenPipeError):
        stream.close()
