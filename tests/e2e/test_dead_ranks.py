"""A rank that dies while its launcher lives: a SEV0 with evidence, and never at a normal end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

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
# A launcher that does not notice the end of its ranks; both are ranks of one job.
LAUNCHER = """\
RANK=0 WORLD_SIZE=$RANKS "$@" > out0 & echo $! > rank0
if [ $RANKS = 2 ]; then RANK=1 WORLD_SIZE=2 "$@" > out1 & echo $! > rank1; fi
exec sleep 300
"""
FOREVER = ("--steps", 10**6, "--sleep", 0.01)


@pytest.fixture
def launch(supervise, tmp_path):
    """Start a launcher of ranks under the policy."""

    def start(*args: object, ranks: int = 1):
        (tmp_path / "p.yaml").write_text(POLICY)
        supervise.env["RANKS"] = str(ranks)
        job = ["sh", "-c", LAUNCHER, "sh", *tiny(*args)]
        return supervise.start("--policy", tmp_path / "p.yaml", "--run-dir", "run", "--", *job)

    return start


def printed(tmp_path: Path, rank: int) -> str:
    """Return what a rank has printed."""
    out = tmp_path / f"out{rank}"
    return out.read_text() if out.exists() else ""


@pytest.mark.parametrize(
    ("ranks", "how"), [pytest.param(1, "error", marks=pytest.mark.chaos), (2, "killed")]
)
def test_a_rank_that_died_below_its_launcher_is_a_sev0(launch, supervise, tmp_path, ranks, how):
    """Evidence is taken, people are told which rank it was, and the job is left as it is."""
    rank = ranks - 1
    options = FOREVER if how == "killed" else ("--steps", 60, "--exit", 1)
    popen = launch(*options, ranks=ranks)
    for each in range(ranks):
        wait_until(lambda each=each: "step 50" in printed(tmp_path, each))
    if how == "killed":
        os.kill(int((tmp_path / f"rank{rank}").read_text()), signal.SIGKILL)

    run = supervise.run_of()
    wait_until(lambda: run.kinds("commit"))
    (fired,) = run.kinds("rule", "fired")
    told = (fired["rule"], fired["severity"], fired["data"]["rank"])
    assert told == ("hang.dead_rank", "SEV0", rank)
    assert (run.intents, run.actions, popen.poll()) == (["snapshot"], [], None)
    popen.terminate()
    assert "no process for" in popen.communicate(timeout=60)[1]
    run.prove()


@pytest.mark.chaos
def test_ranks_that_end_well_are_not_missed(launch, supervise, tmp_path):
    """The launcher goes on for longer than the limit."""
    popen = launch("--steps", 60, ranks=2)
    for rank in (0, 1):
        wait_until(lambda rank=rank: "finite" in printed(tmp_path, rank))
    time.sleep(2.5)

    popen.terminate()
    popen.communicate(timeout=60)
    assert supervise.run_of().kinds("rule", "fired") == []
