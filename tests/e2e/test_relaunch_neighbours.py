"""Two runs in one folder, one pattern that matches the checkpoints of both: one crashes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from supervise.store import audit

from .conftest import JOBS

pytestmark = pytest.mark.slow

OPEN = "was verified, was started again"  # what the jobs wait for in their gates


def command(home: Path, name: str, *more: str) -> list[str]:
    words = [f"--out_dir={home / f'out-{name}'}", f"--wait_file={home / f'gate-{name}'}"]
    return [sys.executable, str(JOBS / "resuming.py"), *words, "--pause_s=0.005", *more]


def known(run: Path) -> dict[str, dict]:
    """Return what the register of a run has, by path; later ones win."""
    register = run / "checkpoints.json"
    text = register.read_text() if register.exists() else '{"checkpoints": []}'
    return {entry["path"]: entry for entry in json.loads(text)["checkpoints"]}


def until(what, seconds=120):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_relaunch_leaves_the_checkpoints_of_another_run_alone(supervise, comes_back):
    """The other run's are newer, by their step and by when they were saved. The one that crashed
    goes back to its own, before which it has lost steps; the other never notices."""
    home, crashed, healthy = supervise.home, supervise.home / "a", supervise.home / "b"
    glob = 'on_crash: restart\n  checkpoints: {glob: ["out*/ckpt*.pt"], settle: 0.2s}'
    comes_back.write_text(comes_back.read_text().replace("on_crash: restart", glob))
    for name in ("a", "b"):
        (home / f"gate-{name}").touch()
    mine, theirs = str(home / "out-a" / "ckpt.pt"), str(home / "out-b" / "ckpt.pt")
    first = supervise.start(
        "--policy",
        comes_back,
        "--run-dir",
        "a",
        "--drill",
        "crash@170",
        "--",
        *command(home, "a", "--max_iters=250"),
    )
    until(lambda: known(crashed).get(mine, {}).get("state") == "verified")
    second = supervise.start(
        "--policy",
        comes_back,
        "--run-dir",
        "b",
        "--",
        *command(home, "b", "--max_iters=300", "--every=150"),
    )
    until(lambda: known(healthy).get(theirs, {}).get("state") == "verified")
    until(lambda: known(crashed).get(theirs, {}).get("state") in ("unverified", "verified"))
    inode = Path(theirs).stat().st_ino

    (home / "gate-a").write_text(OPEN)
    out, err = first.communicate(timeout=300)

    assert first.returncode == 0, err
    assert "resumed at 100\n" in out and Path(theirs).stat().st_ino == inode
    (done,) = [
        record["data"]["result"]
        for record in audit.read(crashed / "audit.log")
        if record["kind"] == "commit" and "pid" in record["data"]["result"]
    ]
    assert (done["path"], done["moved"]) == (mine, [])
    assert known(crashed)[theirs]["problems"][0].startswith("another job wrote it")
    listed = supervise("checkpoints", "a").stdout
    assert listed.count("another job wrote it") == 1
    said = [r for r in audit.read(crashed / "audit.log") if "is left alone" in r["reason"]]
    assert len(said) == 1 and theirs in said[0]["reason"]

    (home / "gate-b").write_text(OPEN)
    out, err = second.communicate(timeout=300)
    assert second.returncode == 0 and "done at 300" in out, err
    assert not list((healthy / "checkpoints").glob("aside/*"))
    for name in ("a", "b"):
        supervise.prove(name)
