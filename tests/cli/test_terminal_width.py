"""A terminal of 80 columns: lines break between words, and what a person pastes stays whole."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.support.supervised_run import FAST_TORCH

COLUMNS = 80
HELP = Path(__file__).parents[1] / "golden" / "help.txt"
STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
END = "-- end --"
COMMANDS = [
    ("drill", "list"),
    ("policy", "diff", "nano", "medium"),
    ("why", "RUN"),
    ("why-not", "RUN", "--rule", "loss_spike.coupled", "--step", "50"),
    ("triage", "RUN"),
    ("status", "RUN"),
    ("events", "RUN"),
    ("metrics", "list"),
]


def on_terminal(args: list[str], interrupt_after: str = "", **more: str) -> tuple[str, int]:
    """Run a command on a terminal; return what it prints, and its exit code.

    Args:
        interrupt_after: what it prints before it is interrupted, as by Ctrl-C; "": it is not.
        more: variables of its environment.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, COLUMNS, 0, 0))
    environ = {**os.environ, "TERM": "xterm", **more}
    environ.pop("COLUMNS", None)
    with subprocess.Popen(
        args, stdout=slave, stderr=slave, env=environ, start_new_session=True
    ) as process:
        os.close(slave)
        printed = bytearray()
        while True:
            try:
                printed += os.read(master, 1 << 16)
            except OSError:  # the last writer is gone
                break
            if interrupt_after and interrupt_after.encode() in printed:
                os.killpg(process.pid, signal.SIGINT)
                interrupt_after = ""
    os.close(master)
    return printed.decode().replace("\r\n", "\n"), process.returncode


def test_lines_break_between_words_and_lose_none(recorded):
    run = str(recorded().path)
    commands = [[run if word == "RUN" else word for word in command] for command in COMMANDS]
    code = f"""if True:
        from supervise.cli import invoke
        for command in {commands}:
            print("{END}", *command[:1], flush=True)
            invoke(command)
    """
    args = [sys.executable, "-c", code]
    piped = subprocess.run(args, capture_output=True, text=True, check=False).stdout.split(END)
    shown = STYLE.sub("", on_terminal(args)[0]).split(END)

    assert len(shown) == len(piped) == 1 + len(COMMANDS)
    for all_words, text in zip(piped[1:], shown[1:], strict=True):
        assert len(all_words.splitlines()) > 1
        assert sorted(text.split()) == sorted(all_words.split())
        for line in text.splitlines():
            assert len(line) <= COLUMNS or re.match(r"\s*(\S+|.*supervise .*)$", line), line


def test_help_fits():
    assert not [line for line in HELP.read_text("utf-8").splitlines() if len(line) > COLUMNS]


@pytest.mark.parametrize("plain", ["", "1"])
def test_colours_are_left_out_where_that_is_asked_for(plain):
    text, code = on_terminal([sys.executable, "-m", "supervise", "doctor"], NO_COLOR=plain)

    assert code == 0
    assert ("\x1b[32m" in text) is not bool(plain)


def test_events_of_a_long_run_are_counted_on_a_terminal_only(recorded):
    args = [sys.executable, "-m", "supervise", "replay", str(recorded().path)]
    text, code = on_terminal(args)
    piped = subprocess.run(args, capture_output=True, text=True, check=True)

    assert code == 0
    assert re.search(r"events of the journal .* 0/\d+", STYLE.sub("", text))
    assert text.endswith(f"\x1b[2K{piped.stdout}") and not piped.stderr


def test_the_next_command_is_printed_after_an_interrupt(commands):
    (commands.parent / "bin" / "python").write_text("#!/bin/sh\nexec sleep 600\n")
    (commands / "train.py").write_text("")
    args = [sys.executable, "-m", "supervise", "doctor", "--", "python", "train.py"]

    text, code = on_terminal(args, "the job's Python")

    assert code == 130
    assert text.splitlines()[-1] == f"supervise: interrupted; next: supervise {' '.join(args[3:])}"


@pytest.mark.slow
def test_a_demo_that_is_interrupted_judges_nothing(tmp_path, monkeypatch):
    """Its run says how it ended; the fault that was not reached is not called undetected."""
    monkeypatch.chdir(tmp_path)
    args = [sys.executable, "-m", "supervise", "demo", "--run-dir", "run"]

    # Imports may swallow an interrupt: from this line on the code of the job itself runs.
    text, code = on_terminal(args, "bytes, from step 0", PYTHONPATH=FAST_TORCH)

    assert code == 130
    assert re.search(r"supervise: exit code 130 (before the first step|at step \d\d?\b)", text)
    assert text.splitlines()[-1] == "supervise: interrupted; next: supervise demo"
