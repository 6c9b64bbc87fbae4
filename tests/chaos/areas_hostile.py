"""What other users, and the job's own files and words, could have us do."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time

import psutil
from world import Case, Skip, alive, eventually, scenario

NOBODY = 65534
SECRET = "s3cr3tQ7w9value"


@scenario("hostile", seeds=16)
def run_of_another_user(case: Case) -> None:
    """Root does not take over what another user wrote, in whole or in part; nothing is touched."""
    if os.getuid():
        raise Skip("needs root, to be another user")
    watcher = case.start(job=case.plain("open('up', 'w'); time.sleep(4)", 5))
    case.ready()
    eventually((case.run / "launch.json").exists, "the record of the launch")
    watcher.kill()
    watcher.wait()
    paths = [case.run, *case.run.rglob("*")]
    some = case.draw.choice([paths, [case.run / "probe.json"], [case.run / "launch.json"]])
    for path in some:
        os.chown(path, NOBODY, NOBODY)
    done = case.call("adopt", case.run)
    assert done.returncode == 64 and "belongs to user" in done.stderr, done.stderr
    assert alive(case.job_pid), "the job was ended"
    for path in some:
        os.chown(path, 0, 0)
    done = case.call("adopt", case.run)
    assert done.returncode in (5, 255), done.stderr
    case.clean()


@scenario("hostile", seeds=16)
def swapped_run(case: Case) -> None:
    """Another directory in place of the run: nothing is written there, and the job goes on."""
    case.start(job=case.plain("open('up', 'w'); time.sleep(4)", 5))
    case.ready()
    eventually((case.run / "launch.json").exists, "the record of the launch")
    target = case.home / "target"
    (target / "incidents").mkdir(parents=True)
    case.run.rename(case.home / "moved")
    link = case.draw.choice([True, False])
    case.run.symlink_to(target) if link else target.rename(case.run)
    case.ends(5)
    found = sorted(path.name for path in case.run.rglob("*"))
    assert found == ["incidents"], f"written there: {found}"


@scenario("hostile", seeds=16)
def shared_run(case: Case) -> None:
    """`chmod -R g+rX RUN`, while it goes on, after a kill and at the end, shows no secret."""
    case.env["HF_TOKEN"] = SECRET
    when = case.draw.choice(["running", "killed", "ended"])
    watcher = case.start(job=[*case.plain("open('up', 'w'); time.sleep(2)"), f"--pw={SECRET}"])
    case.ready()
    if when == "killed":
        watcher.kill()
        watcher.wait()
        eventually(lambda: not alive(case.job_pid), "the end of the job")
    elif when == "ended":
        case.ends(0)
    subprocess.run(["chmod", "-R", "g+rX", case.run], check=True)
    files = [path for path in case.run.rglob("*") if path.is_file()]
    shown = [path for path in files if path.stat().st_mode & stat.S_IRGRP]
    assert shown and not [p for p in shown if SECRET.encode() in p.read_bytes()]
    if when == "running":
        case.ends(0)
    if when != "killed":
        case.clean()


@scenario("hostile", seeds=2)
def killed_backtest(case: Case) -> None:
    """Its workers end with it."""
    for name in ("a.csv", "b.csv"):
        rows = "".join(f"{step},2.0\n" for step in range(200_000))
        (case.home / name).write_text(f"step,loss\n{rows}")
    words = ["backtest", "--policy", "nano", "--jobs", "2", "a.csv", "b.csv"]
    parent = case.popen([sys.executable, "-m", "supervise", *words])
    known = psutil.Process(parent.pid)
    eventually(lambda: len(known.children(recursive=True)) >= 2, "its workers")
    time.sleep(case.draw.uniform(0, 2))
    workers = known.children(recursive=True)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    eventually(lambda: not any(alive(worker.pid) for worker in workers), "the end of its workers")
