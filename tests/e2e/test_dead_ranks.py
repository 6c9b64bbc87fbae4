"""A rank that dies while its launcher lives."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.supervised_run import tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

POLICY = """\
version: supervise/v1
policy: dead
mode: enforce
use: [hang]
override: {hang.dead: {after: {min: 1s}}}
"""
# A launcher that does not notice the end of its ranks. The last one trains for 60 steps.
LAUNCHER = """\
for rank in 0 1 2; do
  RANK=$rank WORLD_SIZE=3 "$@" --steps $((rank == 2 ? 60 : 1000000)) > out$rank &
  echo $! > rank$rank
done
exec sleep 300
"""


def test_a_rank_that_died_below_its_launcher_is_a_sev0(supervise, tmp_path):
    """With evidence; the job is left as it is. A rank that ended well before is not missed."""
    (tmp_path / "p.yaml").write_text(POLICY)
    job = ["sh", "-c", LAUNCHER, "sh", *tiny("--sleep", 0.01)]
    popen = supervise.start("--policy", tmp_path / "p.yaml", "--run-dir", "run", "--", *job)
    printed = [tmp_path / f"out{rank}" for rank in range(3)]
    wait_until(lambda: all(out.exists() and "step 50" in out.read_text() for out in printed), "all")
    wait_until(lambda: "finite" in printed[2].read_text(), "the end of the last rank")
    os.kill(int((tmp_path / "rank1").read_text()), signal.SIGKILL)

    run = supervise.run_of()
    wait_until(lambda: run.kinds("commit"), "the evidence")
    (fired,) = run.kinds("rule", "fired")
    told = (fired["rule"], fired["severity"], fired["data"]["rank"])
    assert told == ("hang.dead_rank", "SEV0", 1)
    assert (run.intents, run.actions, popen.poll()) == (["snapshot"], [], None)
    popen.terminate()
    assert "no process for" in popen.communicate(timeout=60)[1]
    run.prove()
