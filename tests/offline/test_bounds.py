"""What a file can take of its reader ends where the kernel says: memory, and idle time."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

PROBES = Path(__file__).parents[2] / "probes"
BEGIN = f"""
import signal, sys, time
sys.path.append({str(PROBES)!r})
from supervise_offline import verify
verify.IDLE_S = 1.0
"""


def run(code: str) -> int:
    return subprocess.run([sys.executable, "-c", BEGIN + code], check=False).returncode


def test_without_progress_it_ends():
    begin = "signal.signal(signal.SIGALRM, signal.SIG_IGN); verify.exit_when_stalled()\n"

    assert run(f"{begin}while True: signal.pause()") == -signal.SIGALRM


def test_with_progress_it_takes_the_time_that_it_needs():
    """A large part has as much more as its bytes take to read."""
    busy = "while time.monotonic() < until: verify.report_progress()"
    begin = f"until = time.monotonic() + 1.5; verify.exit_when_stalled()\n{busy}\n"

    assert run(f"{begin}verify.report_progress(10**9); time.sleep(1.2)") == 0


def test_memory_is_bounded_by_what_the_files_have():
    begin = "verify.limit_memory(1 << 26)\n"
    too_much = "bytearray((6 << 26) + verify.MARGIN)"

    assert run(f"{begin}held = bytearray(3 << 26)") == 0
    assert run(f"{begin}try: {too_much}\nexcept MemoryError: sys.exit(7)") == 7
