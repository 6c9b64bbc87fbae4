"""What every scenario stands on: a real `supervise` on a real job, and what must hold of both.

A scenario is a function of a `Case`. It draws its numbers from `case.draw`, whose seed is the
scenario's name and number, so that one command repeats it.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from supervise.cli import invoke
from supervise.store import read_audit

sys.path.append(str(Path(__file__).parents[2]))
from tests.support.waiting import slack, wait_until

JOBS = Path(__file__).with_name("jobs")
MARK = "SUPERVISE_CHAOS_CASE"
LATE_S = 10.0  # supervise may end so much later than its job
PATIENCE_S = 90.0
SHM = Path("/dev/shm")


class Skip(Exception):  # noqa: N818
    """This machine does not permit the scenario; says why."""


@dataclass(frozen=True)
class Scenario:
    """One row of the table.

    Attributes:
        seeds: how often it runs in a whole round.
        idle: it mostly waits, so that many may run at once.
    """

    area: str
    name: str
    run: Callable[[Case], None]
    seeds: int
    idle: bool


SCENARIOS: dict[str, Scenario] = {}
GATE = multiprocessing.get_context("fork").Semaphore(2)  # jobs of idle scenarios that start


def scenario(
    area: str, seeds: int = 8, idle: bool = False
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Enter a function into the table under its own name."""

    def enter(run: Callable[[Case], None]) -> Callable[[Case], None]:
        assert run.__name__ not in SCENARIOS, run.__name__
        SCENARIOS[run.__name__] = Scenario(area, run.__name__, run, seeds, idle)
        return run

    return enter


def eventually(check: Callable[[], Any], what: str, within_s: float = 60.0) -> Any:
    """Return the first true answer of `check`."""
    return wait_until(check, what, within_s=within_s, every_s=0.05)


def alive(pid: int) -> bool:
    """Return whether the process runs, or is stopped; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def limit(**limits: int) -> Callable[[], None]:
    """Return what sets these limits in a child: `nofile=64`."""

    def apply() -> None:
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (value, value))

    return apply


class Case:
    """One scenario under way, in a folder of its own.

    Attributes:
        home: where `supervise` and the job are started. shm: their shared memory. run: the run.
        env: of both. watcher: `supervise`, once it was started.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.draw = random.Random(f"{name}:{seed}")
        self.home = Path(tempfile.mkdtemp(prefix="supervise-chaos-"))
        self.shm = Path(tempfile.mkdtemp(prefix="supervise-chaos-", dir=SHM))
        self.run = self.home / "run"
        (self.home / "tmp").mkdir()
        inherited = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
        self.env = {
            **inherited,
            "OMP_NUM_THREADS": "1",
            MARK: self.home.name,
            "SUPERVISE_SHM": str(self.shm),
            "TMPDIR": str(self.home / "tmp"),
        }
        self.watcher: subprocess.Popen[bytes] | None = None
        self.patience_s = PATIENCE_S
        self.follow: Callable[[], Sequence[int]] = lambda: [self.job_pid]  # ended: the job is over
        self._mounts: list[Path] = []

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────

    def plain(self, body: str = "", code: int = 0, name: str = "job.py") -> list[str]:
        """Return a job of plain Python: `body`, then the proof that it ran to its end, once."""
        text = (
            "import os, signal, subprocess, sys, threading, time\n"
            f"open({str(self.home / 'pid')!r}, 'w').write(str(os.getpid()))\n"
            f"{body}\nopen({str(self.home / 'done')!r}, 'a').write('x')\nsys.exit({code})\n"
        )
        (self.home / name).write_text(text)
        return [sys.executable, name]

    def job(self, seconds: float) -> tuple[list[str], int]:
        """Return a job that trains or that waits for so long, and its exit code."""
        code = self.draw.randrange(60)
        if self.draw.random() < 0.5:
            return self.train(max(5, int(seconds / 0.02)), sleep=0.02, exit=code), code
        return self.plain(f"time.sleep({seconds})", code), code

    def train(self, steps: int = 60, **options: object) -> list[str]:
        """Return a job of real, tiny training; it writes what it came to into `result`."""
        words = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, str(JOBS / "train.py"), f"--steps={steps}", *words]

    def policy(self, text: str) -> str:
        (self.home / "policy.yaml").write_text(text)
        return str(self.home / "policy.yaml")

    def bare(self, job: Sequence[str], **options: Any) -> int:
        return self.forget(self.popen(job, **options))

    def forget(self, job: subprocess.Popen[bytes]) -> int:
        """Wait for a job without us; return its exit code, and forget what it wrote."""
        code = job.wait(PATIENCE_S)
        for name in ("done", "pid", "result"):
            (self.home / name).unlink(missing_ok=True)
        for name in ("stdout", "stderr"):
            (self.home / name).exists() and (self.home / name).rename(self.home / f"bare.{name}")
        return code if code >= 0 else 128 - code

    # ── supervise ─────────────────────────────────────────────────────────────────────────────────

    def start(
        self, *words: object, job: Sequence[str], before: Sequence[str] = (), **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start `BEFORE supervise WORDS --run-dir run -- JOB`; its output goes to files."""
        command = [*before, sys.executable, "-m", "supervise", *map(str, words)]
        command += ["--run-dir", str(self.run), "--", *job]
        idle = SCENARIOS[self.name].idle
        with GATE if idle else contextlib.nullcontext():
            self.watcher = self.popen(command, **options)
            if idle:
                self.steps(1)
        return self.watcher

    def call(self, *words: object, within_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "supervise", *map(str, words)]
        how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": within_s}
        return subprocess.run(command, cwd=self.home, env=self.env, **how)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as stack:
            for name in ("stdout", "stderr"):
                if name not in options:
                    options[name] = stack.enter_context((self.home / name).open("ab"))
            options.setdefault("stdin", subprocess.DEVNULL)
            return subprocess.Popen(command, cwd=self.home, env=self.env, **options)

    @property
    def job_pid(self) -> int:
        try:
            return int((self.home / "pid").read_text())
        except (OSError, ValueError):
            return 0

    def up(self) -> int:
        return int(eventually(lambda: self.job_pid, "the job's start"))

    def ready(self) -> None:
        eventually((self.home / "up").exists, "the job")

    def steps(self, least: int) -> None:
        """Wait until the supervisor has seen so many steps of the job."""
        eventually(lambda: self.state().get("step", -1) >= least, f"step {least}")

    def state(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.run / "state.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def records(self, kind: str, what: str | None = None) -> list[dict[str, Any]]:
        found = read_audit(self.run / "audit.log")
        return [r for r in found if r["kind"] == kind and what in (None, r["data"].get("what"))]

    def said(self) -> str:
        """What stood on stderr so far, in one line."""
        return " ".join(self.text("stderr").split())

    # ── what must hold ────────────────────────────────────────────────────────────────────────────

    def ends(self, code: int | Sequence[int] = 0, done: bool | None = True) -> None:
        """Insist that `supervise` ends with this code, soon after its job, which was not harmed.

        Args:
            done: whether the job must have come to its end; None: whatever it did.
        """
        assert self.watcher is not None
        began, over = time.monotonic(), None
        while self.watcher.poll() is None:
            pids = self.follow()
            gone = bool(pids) and all(pids) and not any(alive(pid) for pid in pids)
            over = (over or time.monotonic()) if gone else None
            late = over is not None and time.monotonic() > over + LATE_S * slack()
            assert not late, f"supervise still runs {LATE_S:g} s after the end of its job"
            said = f"no end within {self.patience_s:g} s: {self.said()[-500:]}"
            assert time.monotonic() - began < self.patience_s * slack(), said
            time.sleep(0.05)
        codes = (code,) if isinstance(code, int) else code
        assert self.watcher.returncode in codes, (
            f"exit code {self.watcher.returncode}, not {code}: {self.said()[-500:]}"
        )
        if done is not None:
            count = len(self.text("done"))
            assert count == done, f"the job came to its end {count} times, not {int(done)}"
        assert "internal error" not in self.text("stderr"), self.said()[-800:]

    def text(self, name: str) -> str:
        path = self.home / name
        return path.read_text(errors="replace") if path.exists() else ""

    def clean(self, besides: Sequence[str] = ()) -> None:
        """Insist that nothing was left behind: no process, no shared memory, no stray file."""
        with contextlib.suppress(AssertionError):
            eventually(lambda: not self.processes(besides), "an end", 5.0)
        left = self.processes(besides)
        assert not left, f"left behind: {[' '.join(p.info['cmdline'] or [])[:80] for p in left]}"
        for folder in (self.shm, self.home / "tmp"):
            names = (path.name for path in (folder.iterdir() if folder.exists() else ()))
            found = [name for name in names if not name.startswith("torch")]  # its own
            assert not found, f"left behind in {folder.name}: {found}"

    def readable(self, replay: Sequence[int] = (0,), verify: Sequence[int] = (0,)) -> None:
        """Insist that the records verify, and that replay agrees as far as the journal goes."""
        for command, codes in ((["audit", "verify"], verify), (["replay"], replay)):
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = invoke([*command, str(self.run)])
            assert code in codes, f"{' '.join(command)}: {code}: {said.getvalue()[-300:]}"

    def fine(
        self, code: int | Sequence[int] = 0, done: bool | None = True, replay: Sequence[int] = (0,)
    ) -> None:
        """Insist on all of it: for a scenario in which nothing of ours may break."""
        self.ends(code, done)
        self.clean()
        self.readable(replay)

    def survived(self, code: int | Sequence[int] = 0, verify: Sequence[int] = (0, 2)) -> None:
        """Insist on the job's end and on readable records, which may be incomplete."""
        self.ends(code, done=None)
        assert self.text("done") or self.text("result"), "the job did not come to its end"
        self.clean()
        self.readable((0, 2), verify)

    def unharmed(self, code: int = 0, actions: int | None = 0) -> None:
        """Insist on all of it for `train`, whose weights must be those of a run without us."""
        self.fine(code, done=None)
        result = json.loads(self.text("result") or "{}")
        assert result.get("sha") == baseline(result.get("steps", 0), self.env), result
        if actions is not None:
            acted = [
                r["data"]["action"]["verb"]
                for r in self.records("intent")
                if r["data"]["action"]["touches_job"]
            ]
            assert len(acted) == actions, f"acted on a healthy job: {acted}"

    def processes(self, besides: Sequence[str] = ()) -> list[psutil.Process]:
        """Return what carries our mark in its environment and is alive."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            try:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            except OSError:
                continue
            mine = f"{MARK}={self.home.name}".encode() in environ.split(b"\0")
            line = " ".join(process.info["cmdline"] or [])
            running = mine and process.info["status"] != psutil.STATUS_ZOMBIE
            if running and not any(word in line for word in besides):
                found.append(process)
        return found

    # ── disks and clocks ──────────────────────────────────────────────────────────────────────────

    def preload(self, source: str, **environ: object) -> None:
        """Build a shim of C, and put it before all that is started from here on."""
        (self.home / "shim.c").write_text(source)
        build = ["cc", "-shared", "-fPIC", "-O1", "-w", "-o", "shim.so", "shim.c", "-ldl"]
        try:
            subprocess.run(build, cwd=self.home, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            raise Skip("a shim before the C library needs a C compiler") from None
        self.env |= {"LD_PRELOAD": str(self.home / "shim.so")}
        self.env |= {name: str(value) for name, value in environ.items()}

    def tmpfs(self, name: str, options: str) -> Path:
        """Mount a file system of its own under home and return where."""
        where = self.home / name
        where.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise Skip("there is no mount command here") from None
        if done.returncode:
            raise Skip(f"mounting is not permitted here: {done.stderr.strip()}")
        self._mounts.append(where)
        return where

    def close(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.watcher is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.watcher.wait(10.0)
        for mount in reversed(self._mounts):
            subprocess.run(["umount", "-l", str(mount)], capture_output=True, check=False)
        subprocess.run(["chattr", "-R", "-i", str(self.run)], capture_output=True, check=False)
        shutil.rmtree(self.shm, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)


def baseline(steps: int, env: dict[str, str]) -> str:
    """Return the weights' digest of `train` without us."""
    kept = Path(tempfile.gettempdir()) / f"supervise-chaos-baseline-{os.getppid()}-{steps}"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(JOBS / "train.py"), f"--steps={steps}"]
            plain = {name: value for name, value in env.items() if name not in (MARK, "TMPDIR")}
            subprocess.run(command, cwd=folder, env=plain, check=True, capture_output=True)
            part = kept.with_suffix(f".{os.getpid()}")
            part.write_text(json.loads((Path(folder) / "result").read_text())["sha"])
            part.replace(kept)
    return kept.read_text()
