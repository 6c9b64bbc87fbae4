"""The same command line again, after the supervisor was killed: `run --resume-run`."""

from __future__ import annotations

import json
import os
import signal
import sys

import psutil
import pytest

from supervise.core.model import Frame
from supervise.runtime import become_subreaper
from tests.support.supervised_run import tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

CODE = 7  # of the job
GATED = """\
import time
from pathlib import Path
print("up", flush=True)
while not Path("go").exists():
    time.sleep(0.02)
"""


class Service:
    """What a service manager does: one command line, given again and again."""

    def __init__(self, supervise, job):
        self.supervise, self.job = supervise, job
        self.started = []

    def line(self, *job, policy="nano", options=()):
        given = ("--policy", policy, "--mode", "observe", "--run-dir", "main", "--resume-run")
        return (*given, *options, "--", *(job or self.job))

    def start(self):
        self.started.append(self.supervise.start(*self.line()))
        return self.started[-1]

    def once(self, *job, **other):
        return self.supervise.process(*self.line(*job, **other))

    def start_and_kill(self):
        """Let the supervisor die while the job runs; return the job."""
        watcher = self.start()
        watcher.stdout.readline()
        launch = self.supervise.home / "main" / "launch.json"
        wait_until(launch.exists, "launch.json")
        pid = json.loads(launch.read_text())["pid"]
        job = psutil.Process(pid)
        watcher.send_signal(signal.SIGKILL)
        watcher.wait(60)
        return job

    def close(self):
        (self.supervise.home / "go").touch()
        for watcher in self.started:
            watcher.communicate(timeout=60)


@pytest.fixture
def serve(supervise):
    """A function from a job's command to a service that runs it."""
    made = []

    def make(*job):
        made.append(Service(supervise, job))
        return made[-1]

    yield make
    for service in made:
        service.close()


@pytest.mark.chaos
def test_the_same_command_continues_a_living_job_and_follows_one_that_is_over(serve, supervise):
    """No frame is lost or judged twice, one audit log, the job's own exit code; then a directory
    with the next number."""
    service = serve(*tiny("--steps", 150, "--sleep", 0.01, "--exit", CODE))
    (supervise.home / "tokenizer.json").write_text("one")
    service.start_and_kill()
    done = service.once()

    assert done.returncode == CODE, done.stderr
    (supervise.home / "tokenizer.json").write_text("another")
    frames = supervise.run_of("main").events(Frame)
    assert [frame.step for frame in frames] == list(range(150))
    assert {r["epoch"] for r in supervise.records("main")} == {1, 2}
    assert service.once().returncode == CODE
    for name in ("main", "main.2"):
        assert supervise.records(name)[-1]["reason"] == f"exit code {CODE}"
        supervise.prove(name)
    (first,) = supervise.run_of("main").kinds("identity")
    assert first["data"]["identity"]["packages"]["versions"]["torch"]
    (second,) = supervise.run_of("main.2").kinds("identity")
    assert [d["field"] for d in second["data"]["differs"]] == ["inputs.tokenizer.json"]
    reported = [r["reason"] for r in supervise.run_of("main.2").kinds("notify_intent")]
    before = f"the job differs from attempt 0 of run {first['run']}: inputs.tokenizer.json"
    assert [text.startswith(before) for text in reported if "differs" in text] == [True]


def test_a_job_that_ended_unwatched_is_closed_first(serve, supervise):
    """With the job's exit code; no other one is started for it.

    We inherit the orphan: an init process that collects it at once would lose its code, which a
    job without a probe records nowhere.
    """
    become_subreaper()
    service = serve("sh", "-c", f"echo up; until [ -e go ]; do sleep 0.05; done; exit {CODE}")
    job = service.start_and_kill()
    (supervise.home / "go").touch()
    wait_until(lambda: job.status() == psutil.STATUS_ZOMBIE, "the end of the job")

    assert service.once().returncode == CODE
    os.waitpid(job.pid, 0)
    assert not (supervise.home / "main.2").exists()
    assert supervise.records("main")[-1]["reason"] == f"exit code {CODE}"


def test_a_run_that_is_watched_or_was_started_otherwise_is_left_alone(serve, supervise):
    """Refused with 64, and what differs; the same command as before continues it."""
    (supervise.home / "job.py").write_text(GATED)
    gated = serve(sys.executable, "job.py")
    watcher = gated.start()
    watcher.stdout.readline()
    refused = [(f"is watched by process {watcher.pid}", gated.once())]
    watcher.send_signal(signal.SIGKILL)
    watcher.wait(60)
    (supervise.home / "mine.yaml").write_text("version: supervise/v1\npolicy: mine\nuse: [hang]\n")
    refused += [
        ("command", gated.once("true")),
        ("drills", gated.once(options=("--drill", "hang@99"))),
        ("mode observe, not shadow", gated.once(options=("--mode", "shadow"))),
        ("policy nano, not mine", gated.once(policy="mine.yaml")),
    ]
    for differs, done in refused:
        assert done.returncode == 64 and differs in done.stderr, done.stderr
    assert all("was started with" in done.stderr for _, done in refused[1:])
    assert not (supervise.home / "main.2").exists()
    (supervise.home / "go").touch()
    assert "resuming " in gated.once().stderr
    assert supervise.records("main")[-1]["kind"] == "run_end"


@pytest.mark.chaos
def test_on_a_host_that_is_not_fit_it_is_not_started_again(supervise, comes_back, resuming_job):
    """Neither by the policy after a crash, nor by the same command line; once it is fit, it is."""
    fit = comes_back.read_text()
    comes_back.write_text(fit.replace("probe_batch: true", "health: {disk_gb: 1e6, matmul: 1s}"))
    options = ("--policy", comes_back, "--resume-run")
    job = resuming_job("--max_iters=140", "--every=50")
    run = supervise.run(*options, "--drill", "crash@120", job=job)

    why = "this host is not fit to start the job on: disk: "
    assert run.returncode == 78 and run.actions == ["relaunch"], run.stderr
    assert f"not started again: the relaunch failed: {why}" in run.stderr
    assert "job.health.disk_gb is 1e+06" in run.stderr
    assert (
        "start the job on another host" in run.kinds("notify_intent")[-1]["data"]["message"]["next"]
    )
    (note,) = run.kinds("note", "host-health")
    verdicts = {k: each["verdict"] for k, each in note["data"]["details"]["checks"].items()}
    assert verdicts["disk"] == "bad" and verdicts["devices"] != "bad"
    run.prove()

    again = supervise.run(*options, job=job)
    assert again.returncode == 78 and f"{why.replace('not fit', 'still not fit')}" in again.stderr
    assert not (supervise.home / "run.2").exists()

    comes_back.write_text(fit)
    elsewhere = supervise.run(*options, job=[sys.executable, "-c", ""])
    assert elsewhere.returncode == 0 and "it is looked at again" in elsewhere.stderr
    assert (supervise.home / "run.2").is_dir()


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

    def interrupted(policy, *options, name="main"):
        given = ("run", "--policy", policy, "--run-dir", name, *options)
        watcher = supervise.start(*given, "--", *job)
        begin = next(line for line in watcher.stdout if line.startswith("begins at"))
        next(line for line in watcher.stdout if line == "saved\n")
        watcher.send_signal(signal.SIGINT)
        _, told = watcher.communicate(timeout=100)
        return begin, told

    begin, told = interrupted("recipe.yaml")
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

    begin, told = interrupted("recipe.yaml", "--resume-run")
    assert begin == "begins at 60\n", told
    assert f"going on from ckpt-3 of step 59 in {home}/ck/00060.pt" in told
    assert command in told.splitlines()[-1]
    assert supervise.run_of("main.2").events(Frame)[0].step == 60
    assert supervise.records("main.2")[0]["data"]["resumed_from"]["step"] == 59

    begin, told = interrupted("recipe.yaml", "--resume-run", "--fresh")
    assert begin == "begins at 0\n", told
