"""A terminal of 80 columns: lines break between words, and what a person pastes stays whole."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

COLUMNS = 80
STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
COMMANDS = [
    ("drill", "list"),
    ("policy", "diff", "nano", "medium"),
    ("why", "RUN"),
    ("why-not", "RUN", "--rule", "loss_spike.coupled", "--step", "50"),
    ("triage", "RUN"),
    ("status", "RUN"),
    ("events", "RUN"),
]


def on_terminal(args: list[str]) -> list[str]:
    """Run a command on a terminal; return the lines that it prints."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, COLUMNS, 0, 0))
    environ = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environ.pop("COLUMNS", None)
    with subprocess.Popen(args, stdout=slave, env=environ):
        os.close(slave)
        printed = bytearray()
        while True:
            try:
                printed += os.read(master, 1 << 16)
            except OSError:  # the last writer is gone
                break
    os.close(master)
    return STYLE.sub("", printed.decode()).replace("\r\n", "\n").splitlines()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_lines_break_between_words_and_lose_none(recorded, command):
    run = str(recorded().path) if "RUN" in command else ""
    args = [sys.executable, "-m", "supervise", *(run if a == "RUN" else a for a in command)]
    piped = subprocess.run(args, capture_output=True, text=True, check=False).stdout
    lines = on_terminal(args)
    assert piped

    assert sorted(" ".join(lines).split()) == sorted(piped.split())
    for line in lines:
        assert len(line) <= COLUMNS or re.match(r"\s*(\S+|.*supervise .*)$", line), line
