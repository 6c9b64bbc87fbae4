"""What only the supervisor can tell of a run: a launcher in a loop, and frames judged late."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.supervised_run import tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

POLICY = """\
version: supervise/v1
policy: watched
mode: observe
use: [hang, probe]
override: {probe.behind: {gt: 1.0, clear: 0.5}}
"""
# It starts its rank again whenever that fails: no budget of the policy counts these starts.
LAUNCHER = """\
for i in 1 2 3 4; do "$@" --steps 3 --sleep 0.1 --exit 1; done > /dev/null
exec "$@" --steps 1000000 --sleep 0.01 > out
"""


@pytest.mark.chaos
def test_a_crash_loop_and_a_supervisor_that_stood_are_told(supervise, tmp_path):
    """The fourth restart in the hour; then frames a second and a half old, of a limit of one."""
    (tmp_path / "p.yaml").write_text(POLICY)
    job = ["sh", "-c", LAUNCHER, "sh", *tiny()]
    popen = supervise.start("--policy", tmp_path / "p.yaml", "--run-dir", "run", "--", *job)
    run = supervise.run_of()
    fired = lambda: [r["rule"] for r in run.kinds("rule", "fired")]  # noqa: E731
    wait_until(lambda: "hang.crash_loop" in fired())
    assert fired() == ["hang.crash_loop"]

    os.kill(popen.pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(popen.pid, signal.SIGCONT)
    wait_until(lambda: "probe.late" in fired())
    popen.terminate()
    popen.communicate(timeout=60)
    rates = {row["restart_rate"] for row in supervise.rows("run")}
    assert {"", "24.0", "48.0", "72.0", "96.0"} == rates
    errors = [row["error_event_rate"] for row in supervise.rows("run")]
    assert errors[0] == "" and float(errors[-1]) >= 1.0  # four in a minute, of one class
    run.prove()
