"""The disk under the run directory does not answer: signals, the end, and what comes after."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supervise.core.model import Frame, Notice
from tests.support.supervised_run import Records, Supervise, tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
# Says each signal, and ends with 7 once its stdin does. It never blocks for long: Python runs no
# handler for a signal that comes right before a read blocks.
LISTENER = """
import os, select, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"TERM\\n"))
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"USR1\\n"))
os.write(1, b"up\\n")
while not select.select([0], [], [], 0.1)[0]:
    pass
sys.exit(7)
"""


class Frozen(Records):
    """A run whose disk is frozen and thawed at will."""

    def __init__(self, supervise: Supervise) -> None:
        super().__init__(supervise.home / "run")
        self._supervise, self._gate = supervise, supervise.home / "gate"

    def start(self, *job: str) -> subprocess.Popen[str]:
        driver = str(Path(__file__).with_name("driver.py"))
        given = ("run", f"gate {self._gate}", "nano", self.directory, "", *job)
        self.popen = self._supervise.start(*given, by=(driver,), stdin=subprocess.PIPE)
        return self.popen

    def expect(self, text: str) -> None:
        """Read what the job prints until it says that."""
        seen, out = "", self.popen.stdout
        while text not in seen:
            assert select.select([out], [], [], PATIENCE_S)[0], f"no {text!r} in {seen!r}"
            more = os.read(out.fileno(), 4096).decode()
            assert more, f"no {text!r} in {seen!r}"
            seen += more

    def freeze(self) -> None:
        """Return once somebody waits for the disk."""
        os.mkfifo(self._gate)
        tasks = Path(f"/proc/{self.popen.pid}/task")
        wait_until(lambda: any(_waits(task) for task in tasks.iterdir()), "a wait for the disk")

    def thaw(self) -> None:
        aside = self._gate.rename(self._gate.with_suffix(".thawed"))
        os.close(os.open(aside, os.O_WRONLY))


def _waits(task: Path) -> bool:
    """Whether this thread has all signals blocked, and sleeps."""
    try:
        status = (task / "status").read_text()
    except OSError:
        return False
    blocked = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    return int(blocked, 16) & 1 << (signal.SIGTERM - 1) != 0 and "State:\tS" in status


@pytest.fixture
def frozen(supervise):
    return Frozen(supervise)


def test_a_signal_reaches_the_job_and_is_recorded_afterwards(frozen):
    popen = frozen.start(sys.executable, "-c", LISTENER)
    frozen.expect("up\n")
    frozen.freeze()
    for name in ("USR1", "TERM"):
        popen.send_signal(getattr(signal, f"SIG{name}"))
        frozen.expect(f"{name}\n")
    forwarded_ns = time.monotonic_ns()
    frozen.thaw()
    _, said = popen.communicate("", timeout=PATIENCE_S)

    assert popen.returncode == 7, said
    signals = [e for e in frozen.events(Notice) if e.kind == "signal"]
    assert [e.message for e in signals] == ["SIGUSR1 was passed on", "SIGTERM was passed on"]
    assert all(e.at_ns < forwarded_ns for e in signals)
    assert frozen.records[-1]["kind"] == "run_end"


def test_after_the_thaw_nothing_is_missing(frozen):
    popen = frozen.start(*tiny("--steps", 120, "--sleep", 0.01))
    frozen.expect("step 50 ")
    frozen.freeze()
    frozen.expect("step 100 ")
    frozen.thaw()
    _, said = popen.communicate(timeout=PATIENCE_S)

    assert popen.returncode == 0, said
    assert [e.step for e in frozen.events(Frame)] == list(range(120))
    assert not [r for r in frozen.records if r["kind"] in ("gap", "intent")]


@pytest.mark.chaos
def test_a_job_that_ends_while_the_disk_hangs(frozen, supervise):
    """We end as it did and say what is lost; once the disk answers, `adopt` reads the rest."""
    popen = frozen.start(*tiny("--steps", 70, "--sleep", 0.02, "--exit", 3))
    frozen.expect("step 50 ")
    frozen.freeze()
    _, said = popen.communicate(timeout=PATIENCE_S)

    assert popen.returncode == 3, said
    assert "does not answer. Not recorded: at least" in said
    adopted = supervise.process("adopt", "run")
    assert adopted.returncode == 3, adopted.stderr
    assert [e.step for e in frozen.events(Frame)] == list(range(70))
    assert frozen.records[-1]["kind"] == "run_end"
