"""Two runs in one folder, one pattern that matches the checkpoints of both: one crashes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.supervised_run import JOBS, Records
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

OPEN = "was verified, was restarted"  # what the jobs wait for in their gates


def command(home: Path, name: str, *more: str) -> list[str]:
    words = [f"--out_dir={home / f'out-{name}'}", f"--wait_file={home / f'gate-{name}'}"]
    return [sys.executable, str(JOBS / "resuming.py"), *words, "--pause_s=0.002", *more]


def known(run: Records) -> dict[str, dict]:
    """Return the registered checkpoints of a run by path; later ones win."""
    return {entry["path"]: entry for entry in run.checkpoints}


@pytest.mark.chaos
def test_a_relaunch_leaves_the_checkpoints_of_another_run_alone(supervise, comes_back):
    """The other run's are newer, by their step and by when they were saved. The one that crashed
    goes back to its own, before which it has lost steps; the other never notices."""
    home, crashed, healthy = supervise.home, supervise.run_of("a"), supervise.run_of("b")
    glob = 'on_crash: restart\n  checkpoints: {glob: ["out*/ckpt*.pt"], settle: 0.2s}'
    comes_back.write_text(comes_back.read_text().replace("on_crash: restart", glob))
    for name in ("a", "b"):
        (home / f"gate-{name}").touch()
    mine, theirs = str(home / "out-a" / "ckpt.pt"), str(home / "out-b" / "ckpt.pt")
    options = ("--policy", comes_back, "--run-dir")
    job = command(home, "a", "--max_iters=250")
    first = supervise.start(*options, "a", "--drill", "crash@170", "--", *job)
    wait_until(lambda: known(crashed).get(mine, {}).get("state") == "verified")
    job = command(home, "b", "--max_iters=300", "--every=150")
    second = supervise.start(*options, "b", "--", *job)
    wait_until(lambda: known(healthy).get(theirs, {}).get("state") == "verified")
    wait_until(lambda: known(crashed).get(theirs, {}).get("state") in ("unverified", "verified"))
    inode = Path(theirs).stat().st_ino

    (home / "gate-a").write_text(OPEN)
    out, err = first.communicate(timeout=300)

    assert first.returncode == 0, err
    assert "resumed at 100\n" in out and Path(theirs).stat().st_ino == inode
    results = [r["data"]["result"] for r in crashed.kinds("commit")]
    (done,) = [result for result in results if "pid" in result]
    assert (done["path"], done["moved"]) == (mine, [])
    assert known(crashed)[theirs]["problems"][0].startswith("another job wrote it")
    listed = supervise("checkpoints", "a").stdout
    assert listed.count("another job wrote it") == 1
    (left,) = [r["reason"] for r in crashed.records if "is left alone" in r["reason"]]
    assert theirs in left

    (home / "gate-b").write_text(OPEN)
    out, err = second.communicate(timeout=300)
    assert second.returncode == 0 and "done at 300" in out, err
    assert not list((healthy.directory / "checkpoints").glob("aside/*"))
    for name in ("a", "b"):
        supervise.prove(name)
