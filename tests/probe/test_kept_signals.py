"""Signals that come to the job itself: kept while the supervisor offers to hold them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, time
from types import SimpleNamespace
from supervise_probe.ipc.commands import KeptSignals

until_ns, said = [int(sys.argv[1])], []
reporter = SimpleNamespace(
    writer=SimpleNamespace(keep_until_ns=lambda: until_ns[0]),
    notice=lambda kind, text, data: said.append(data["signal"]),
    status_changed=lambda: None,
)
signal.signal(signal.SIGUSR2, own := lambda *_: said.append("own"))
kept = KeptSignals(SimpleNamespace(reporter=reporter, position=SimpleNamespace(world_size=1)))
kept.install()
"""
HOLDS, HOLDS_NOT = str(2**62), "0"


def run(body: str, until: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT + body, until]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_is_kept_while_it_may_be_held_and_then_does_what_it_does():
    """A handler of the job stays the job's."""
    body = """
assert kept.names() == ["SIGTERM", "SIGUSR1"]
os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGUSR2)
assert said == ["SIGTERM", "own"], said
until_ns[0] = 0
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(9)
"""
    done = run(body, HOLDS)
    assert done.returncode == -signal.SIGUSR1, done.stderr


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_children_are_as_they_would_be(how):
    """Of a fork and of a program that is started; a handler that the job sets later counts."""
    start = """
ready, tell = os.pipe()
pid = os.fork()
if not pid:
    os.write(tell, b"x")  # a signal before the fork has returned is lost with any handler
    time.sleep(9)
    os._exit(0)
os.read(ready, 1)
"""
    if how == "exec":
        start = "import subprocess\npid = subprocess.Popen(['sleep', '9']).pid\n"
    body = (
        start
        + """
os.kill(pid, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -15
signal.signal(signal.SIGTERM, own)
assert kept.names() == ["SIGUSR1"]
"""
    )
    done = run(body, HOLDS)
    assert done.returncode == 0, done.stderr


def test_without_an_offer_it_ends_the_process():
    assert run("os.kill(os.getpid(), 15); time.sleep(9)", HOLDS_NOT).returncode == -15
