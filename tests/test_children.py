"""Tools of ours end with us, as a tree, whatever they do and whatever we die of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from supervise import system
from supervise.runtime import read_git_facts, run_tool
from tests.support.waiting import wait_until

# One that detached itself and one that holds the pipes, behind a tool that never ends.
HANGS = """#!/bin/sh
setsid sleep 1000 > /dev/null 2>&1 < /dev/null &
sleep 1000 &
echo > {started}
{last}
"""
OWNER = """
import pathlib, threading, time
def hang_up():
    while not pathlib.Path({started!r}).exists():
        time.sleep(0.01)
    system.end_tools()
from supervise import system
from supervise.runtime import host
if {polite}:
    threading.Thread(target=hang_up).start()
print(host.read_git_facts(pathlib.Path(".")), flush=True)
"""


@pytest.fixture
def fake_git(tmp_path, monkeypatch):
    """Put a script in the place of git; returns a function that waits for its tree to be gone."""
    started = tmp_path / "started"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SUPERVISE_TEST_TREE", str(tmp_path))  # what they are known by

    def write(last: str = "sleep 1000") -> Path:
        (tmp_path / "git").write_text(HANGS.format(started=started, last=last))
        (tmp_path / "git").chmod(0o755)
        return started

    yield write
    try:
        wait_until(lambda: not _tree(tmp_path), "the end of its tree")  # the last may just begin
    finally:
        for each in _tree(tmp_path):
            each.kill()


def _tree(mark: Path) -> list[psutil.Process]:
    found = []
    for each in psutil.process_iter():
        try:
            if each.name() == "sleep" and each.environ().get("SUPERVISE_TEST_TREE") == str(mark):
                found.append(each)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("tool", ["evidence", "in the background"])
def test_a_tool_that_hangs_leaves_nothing_behind(fake_git, tmp_path, tool):
    """When its time is up, or when it ends and leaves others that hold its pipes."""
    fake_git("exit 3" if tool == "in the background" else "sleep 1000")

    if tool == "in the background":
        assert "exit code 3" in read_git_facts(tmp_path).missing
    else:
        with pytest.raises(OSError, match=r"longer than 0\.5 s"):
            run_tool(["git"], 0.5)


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "end_all"])
def test_a_tool_that_hangs_ends_with_us(fake_git, tmp_path, end):
    """Of whatever we die; and when we hang up, who waits for it is told at once."""
    started = fake_git()
    code = OWNER.format(polite=end == "end_all", started=str(started))
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    wait_until(started.exists)

    if end != "end_all":
        owner.send_signal(getattr(signal, end))
    out, _ = owner.communicate(timeout=60)

    assert ("exit code -9" in out) == (end == "end_all")
    wait_until(lambda: not _tree(tmp_path))


@pytest.mark.parametrize("how", ["exit 7", "kill -SEGV $$", "kill -KILL $$"])
def test_the_end_of_a_tool_is_told_as_it_was(how):
    pipe = subprocess.PIPE
    child = system.Child(
        ["sh", "-c", f"cat; echo oops >&2; ulimit -c 0; {how}"],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )

    assert child.talk(b"hello", 60.0) == (b"hello", b"oops\n")
    expected = {"exit 7": 7, "kill -SEGV $$": -signal.SIGSEGV, "kill -KILL $$": -signal.SIGKILL}
    assert child.returncode == expected[how]


def test_a_tool_that_is_not_there_is_an_os_error():
    with pytest.raises(FileNotFoundError):
        system.run_tool(["no-such-tool"], within_s=1.0)
