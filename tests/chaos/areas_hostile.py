"""What other users, and the job's own files and words, could have us do."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
from world import Case, Skip, alive, eventually, scenario

NOBODY = 65534
SECRET = "s3cr3tQ7w9value"
PROGRAM = Path(__file__).parents[2] / "probes" / "supervise_offline" / "checkpoint"


def _orphan(case: Case) -> int:
    """Start a run and kill its supervisor; return the pid of the job, which goes on."""
    watcher = case.start(job=case.plain("open('up', 'w'); time.sleep(4)", 5))
    case.ready()
    eventually((case.run / "launch.json").exists, "the record of the launch")
    watcher.kill()
    watcher.wait()
    return case.job_pid


@scenario("hostile", seeds=16)
def run_of_another_user(case: Case) -> None:
    """Root does not take over what another user wrote, in whole or in part; nothing is touched."""
    if os.getuid():
        raise Skip("needs root, to be another user")
    job = _orphan(case)
    paths = [case.run, *case.run.rglob("*")]
    some = case.draw.choice([paths, [case.run / "probe.json"], [case.run / "launch.json"]])
    for path in some:
        os.chown(path, NOBODY, NOBODY)
    done = case.call("adopt", case.run)
    assert done.returncode == 64 and "belongs to user" in done.stderr, done.stderr
    assert alive(job), "the job was ended"
    for path in some:
        os.chown(path, 0, 0)
    done = case.call("adopt", case.run)
    assert done.returncode in (5, 255), done.stderr
    case.clean()


@scenario("hostile", seeds=16)
def pid_of_another_process(case: Case) -> None:
    """`launch.json` names a process without the mark of the run: it is not signalled."""
    _orphan(case)
    other = subprocess.Popen(["sleep", "60"])
    try:
        fields = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()
        made = {"attempt": 0, "pid": other.pid, "start_ticks": int(fields[19])}
        (case.run / "launch.json").write_text(json.dumps(made))
        done = case.call("adopt", case.run)
        assert done.returncode == 64 and "does not carry the mark" in done.stderr, done.stderr
        assert other.poll() is None, "it was ended"
    finally:
        other.kill()
        other.wait()
        eventually(lambda: not alive(case.job_pid), "the end of the job")


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
def checkpoint_as_a_weapon(case: Case) -> None:
    """A file that would start a process, or hold its reader, is read at once and does neither."""
    folder = case.home / "ckpt"
    folder.mkdir()
    kind = case.draw.choice(["process", "fifo", "json", "expanded"])
    path = folder
    if kind == "process":
        raw = (
            b"ctorch.distributed.checkpoint._async_process_executor\n_AsyncCheckpointProcess\n(NtR."
        )
        (folder / ".metadata").write_bytes(raw)
    elif kind == "fifo":
        os.mkfifo(folder / "__0_0.distcp")
        (folder / ".metadata").write_bytes(pickle.dumps(None))
    elif kind == "json":
        (folder / "config.json").write_text("[" * 10**6)
    else:
        path = folder / "a.pt"
        make = "import torch; torch.save({'w': torch.ones(1).expand(2**40)}, 'ckpt/a.pt')"
        subprocess.run([sys.executable, "-c", make], cwd=case.home, check=True)
    request = json.dumps({"paths": [str(path)], "load": True, "finite": True})
    done = subprocess.run(
        [sys.executable, "-I", str(PROGRAM)],
        input=request,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    expected = {"process": None, "fifo": False, "json": False, "expanded": True}[kind]
    assert found["ok"] is expected, found


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


@scenario("hostile", seeds=16)
def words_of_a_job(case: Case) -> None:
    """Marks that reorder a text, markup and formulas: none gets onto the terminal or the record."""
    said = "\u202egnp.exe <img src=x onerror=y> =cmd()"
    case.start(
        "--policy", "nano", job=case.plain(f"raise ValueError({said!r})", name="\u202ejob.py")
    )
    case.ends(1, done=False)
    case.clean()
    for words in (["status"], ["status", "--json"], ["audit", "show", "--json"], ["why"]):
        done = case.call(*words, case.run)
        assert "\u202e" not in done.stdout + done.stderr, words
    record = case.call("record", case.run)
    assert record.returncode == 0, record.stderr
    for path in (case.run / "record").iterdir():
        text = path.read_text()
        assert "\u202e" not in text, path.name
        if path.suffix != ".json":  # which is data: who shows it escapes it
            assert "<img" not in text.replace("\\<img", ""), path.name


@scenario("hostile", seeds=16)
def status_in_the_start_window(case: Case) -> None:
    """Killed before the launch was written down: the job runs, and that is what is said."""
    watcher = case.start(job=case.plain("open('up', 'w'); time.sleep(6)"))
    case.ready()
    watcher.kill()
    watcher.wait()
    (case.run / "launch.json").unlink(missing_ok=True)
    for piece in (case.run / "journal").iterdir():
        piece.unlink()
    said = case.call("status", case.run).stdout
    assert re.search(rf"running \(pid {case.job_pid}\)", said), said
    eventually(lambda: not alive(case.job_pid), "the end of the job")


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
