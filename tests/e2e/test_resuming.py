"""The same command line again, after the supervisor was killed: `run --resume-run`."""

from __future__ import annotations

import json
import os
import signal
import socket

import psutil
import pytest

from supervise.core.model import Frame
from supervise.runtime import become_subreaper
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

CODE = 7  # of the job
LINE = ("--policy", "nano", "--mode", "observe", "--run-dir", "main", "--resume-run")
GATED = ["sh", "-c", f"echo up; until [ -e go ]; do sleep 0.05; done; exit {CODE}"]


def start_and_kill(supervise):
    """Let the supervisor die while the job waits; return the job's pid."""
    watcher = supervise.start(*LINE, "--", *GATED)
    watcher.stdout.readline()
    launch = supervise.home / "main" / "launch.json"
    wait_until(launch.exists, "launch.json")
    watcher.send_signal(signal.SIGKILL)
    watcher.wait(60)
    return json.loads(launch.read_text())["pid"]


def test_a_job_that_ended_unwatched_is_closed_first(supervise):
    """With the job's exit code; no other one is started for it.

    We inherit the orphan: an init process that collects it at once would lose its code, which a
    job without a probe records nowhere.
    """
    become_subreaper()
    pid = start_and_kill(supervise)
    (supervise.home / "go").touch()
    job = psutil.Process(pid)
    wait_until(lambda: job.status() == psutil.STATUS_ZOMBIE, "the end of the job")

    assert supervise.process(*LINE, "--", *GATED).returncode == CODE
    os.waitpid(pid, 0)
    assert not (supervise.home / "main.2").exists()
    assert supervise.records("main")[-1]["reason"] == f"exit code {CODE}"


def test_a_run_that_is_watched_or_was_started_otherwise_is_left_alone(supervise):
    watcher = supervise.start(*LINE, "--", *GATED)
    watcher.stdout.readline()
    refused = [(f"is watched by process {watcher.pid}", supervise(*LINE, "--", *GATED))]
    watcher.send_signal(signal.SIGKILL)
    watcher.wait(60)
    (supervise.home / "mine.yaml").write_text("version: supervise/v1\npolicy: mine\nuse: [hang]\n")
    for differs, options, job in (
        ("command", (), ["true"]),
        ("drills", ("--drill", "hang@99"), GATED),
        ("mode observe, not shadow", ("--mode", "shadow"), GATED),
        ("policy nano, not mine", ("--policy", "mine.yaml"), GATED),
    ):
        refused.append((differs, supervise(*LINE, *options, "--", *job)))
        assert "was started with" in refused[-1][1].stderr
    for differs, done in refused:
        assert done.returncode == 64 and differs in done.stderr, done.stderr
    assert not (supervise.home / "main.2").exists()
    (supervise.home / "go").touch()
    done = supervise.process(*LINE, "--", *GATED)
    assert done.returncode == CODE and "resuming " in done.stderr
    assert supervise.records("main")[-1]["kind"] == "run_end"


def test_on_a_host_that_is_still_not_fit_nothing_is_started_again(supervise, tmp_path):
    policy = tmp_path / "p.yaml"
    policy.write_text("version: supervise/v1\njob: {health: {disk_gb: 1e6, matmul: 1s}}\n")
    options, job = ("--policy", policy, "--resume-run"), ["true"]
    first = supervise.run(*options, job=job)
    memo = {"host": socket.gethostname(), "folder": str(tmp_path), "size": 0.0}
    memo |= dict.fromkeys(("python", "peak_bytes", "device_count"))
    (first.directory / "unfit.json").write_text(json.dumps(memo))

    again = supervise.run(*options, job=job)
    assert again.returncode == 78
    assert "this host is still not fit to start the job on: disk: " in again.stderr
    assert not (tmp_path / "run.2").exists()

    policy.write_text("version: supervise/v1\nuse: [hang]\n")
    later = supervise.run(*options, job=job)
    assert later.returncode == 0 and "it is looked at again" in later.stderr
    assert (tmp_path / "run.2").is_dir()


SAVES = """\
import glob
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
os.makedirs("ck", exist_ok=True)
start, found = 0, sorted(glob.glob("ck/*.pt"))
if "--resume" in sys.argv and found:
    state = torch.load(found[-1])
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
print("begins at", start, flush=True)
for step in range(start, start + 1000):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    if (step + 1) % 20 == 0 and step < start + 60:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step + 1}, f"ck/{step + 1:05d}.pt")
    if step == start + 70:
        print("saved", flush=True)
        time.sleep(60)
"""
RECIPE = """\
version: supervise/v1
extends: nano
job:
  checkpoints: {glob: ["ck/*.pt"]}
"""


def test_after_an_interrupt_the_same_command_goes_on_from_the_newest_checkpoint(supervise, script):
    """The last line is that command. Without a recipe it is refused, and no file is written over;
    `--fresh` starts the command as it is, and a plain run never gets an argument."""
    home = supervise.home
    job = script(SAVES)
    (home / "none.yaml").write_text(RECIPE)
    (home / "recipe.yaml").write_text(RECIPE + '  relaunch: {args: ["--resume"]}\n')

    def start(*options):
        given = ("run", "--policy", "recipe.yaml", "--run-dir", "main", *options)
        return supervise.start(*given, "--", *job)

    def interrupted(watcher):
        begin = next(line for line in watcher.stdout if line.startswith("begins at"))
        next(line for line in watcher.stdout if line == "saved\n")
        watcher.send_signal(signal.SIGINT)
        return begin, watcher.communicate(timeout=100)[1]

    begin, told = interrupted(start())
    assert begin == "begins at 0\n"
    command = told.splitlines()[-1].removeprefix("  to go on: ")
    assert command == (
        f"supervise run --policy recipe.yaml --run-dir main --resume-run -- {' '.join(job)}"
    ), told
    (home / "ck/00080.pt").write_bytes((home / "ck/00060.pt").read_bytes()[:300])  # cut off
    before = {path.name: path.stat().st_mtime_ns for path in (home / "ck").iterdir()}

    options = ("--policy", "none.yaml", "--run-dir", "main", "--resume-run")
    refused = supervise.process("run", *options, "--", *job)
    assert refused.returncode == 64, refused.stderr
    assert "job.relaunch" in refused.stderr and "supervise init -- " in refused.stderr
    assert {path.name: path.stat().st_mtime_ns for path in (home / "ck").iterdir()} == before
    assert not (home / "main.2").exists()

    begin, told = interrupted(start("--resume-run"))
    assert begin == "begins at 60\n", told
    assert f"going on from ckpt-3 of step 59 in {home}/ck/00060.pt" in told
    assert command in told.splitlines()[-1]
    assert supervise.run_of("main.2").events(Frame)[0].step == 60
    assert supervise.records("main.2")[0]["data"]["resumed_from"]["step"] == 59

    assert start("--resume-run", "--fresh").stdout.readline() == "begins at 0\n"
