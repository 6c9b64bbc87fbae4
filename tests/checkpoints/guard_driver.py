"""Drives a checkpoint guard over real files by hand, and plays the job that writes them.

The interpreter that verifies is a fake, so that no test needs torch: the first word of a file is
its verdict.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec

from supervise.checkpoints import CheckpointService, RunFacts, RunPosition, read_registry
from supervise.core.model import Checkpoints, Notice
from tests.support.waiting import wait_until

VERIFIER = f"""#!{sys.executable}
import json, os, signal, sys, time
sys.path.append({str(Path(__file__).parents[2] / "probes")!r})
from supervise_offline import verify

request = json.load(sys.stdin)
if "checkpoint" in request:
    word = open(request["checkpoint"]).read().split()[-1]
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "late":
        time.sleep(60)
    if word == "changed":
        open(request["checkpoint"], "a").write(" more")
    answer = {{"was": 1.5, "now": 1.5, "values": {{"checkpoint_probe_loss": 2.0}}}}
    answer |= {{"artefact": 8 * "1f2e", "unmeasured": {{"zlib_ratio": "too short"}}}}
    answer["values"]["codec_score"] = 72.0
    if word == "other":
        answer = {{"was": 1.5, "now": 1.6, "reason": "they are other weights"}}
    print(json.dumps(answer))
    sys.exit()
print(json.dumps({{"environment": {{"torch": "2.0", "lock": "sha256:0"}}}}), flush=True)
for path in request["paths"]:
    names = verify.list_files(path)
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    word, *more = open(os.path.join(folder, names[0])).read().split()
    if word == "slow":
        here = os.path.dirname(sys.argv[0])
        held = os.path.exists(os.path.join(here, "hold"))
        open(os.path.join(here, "started"), "w").close()
        while held and os.path.exists(os.path.join(here, "hold")):
            time.sleep(0.005)
        time.sleep(0.0 if held else 0.4)
        word = open(os.path.join(folder, names[0])).read().split()[1]
    if word == "works":  # reads for longer than anybody waits for one who does nothing
        until = time.monotonic() + float(more[0])
        while time.monotonic() < until:
            pass
        word = "good"
    if word == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "memory":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "hang":
        open(os.path.join(os.path.dirname(sys.argv[0]), "hanging"), "w").close()
        time.sleep(60)
    files = {{name: verify.hash_file(os.path.join(folder, name)) for name in names}}
    ok = {{"good": True, "weights": True, "code": None}}.get(word, False)
    inside = "weights only" if word == "weights" else "full"
    bad, unread = ["it is damaged"] * (ok is False), ["it needs code"] * (ok is None)
    print(json.dumps({{"path": path, "ok": ok, "problems": bad, "unread": unread, "files": files,
                      "step": 5 if ok else None, "rng": True, "resumable": inside}}), flush=True)
"""


class GuardDriver:
    """A checkpoint guard and the job whose files it guards."""

    def __init__(self, folder, out="out", run="run"):
        self.out, self.run = folder / out, folder / run
        self.out.mkdir(exist_ok=True)
        self.run.mkdir()
        self.tokenizer = folder / "tokenizer.json"
        self.tokenizer.write_text("{}")
        self.python = folder / "python"
        self.python.write_text(VERIFIER)
        self.python.chmod(0o755)
        self.position = RunPosition(values={"train_loss_raw": 2.5})
        self.events = []
        self.open()

    def open(self, limit_s=60.0, share=1.0, soon_s=60.0, evaluate=None, **form):
        self.guard = CheckpointService(
            Checkpoints(**{"settle": 0.0, "restore_test": None, **form}),
            self.run,
            self.out,
            lambda: self.position,
            facts=RunFacts(["python", "train.py"]),
            code=lambda: {"commit": "1f2e"},
            data=["../tokenizer.json"],
            every_s=0.0,
            limit_s=limit_s,
            share=share,
            soon_s=soon_s,
        )
        if evaluate is not None:
            self.guard.add_evaluator(evaluate, self.out)

    def write(self, name, text, step=None):
        """Write a file; with a step, also report the save as the probe does."""
        path = Path(os.path.normpath(self.out / name))
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        if step is not None:
            self.report(path, step)
        return path

    def save(self, name, text, step=None):
        path = self.write(name, text, step)
        self.run_once()
        return path

    def report(self, path, step, **about):
        stat = path.stat()
        file = {"device": stat.st_dev, "inode": stat.st_ino}
        file |= {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        data = {
            "path": str(path),
            "file": file,
            "python": str(self.python),
            "seconds": 0.5,
            **about,
        }
        now_ns = time.monotonic_ns()
        self.guard.on_save(Notice(now_ns, "checkpoint-saved", "", 0, step + 1, data))

    def run_once(self):
        """Scan twice, verify all, and return the events: (id, step, ok)."""
        self.guard.scan()
        self.guard.scan(closely=True)
        while self.guard.verify_next():
            pass
        events = self.guard.poll()
        self.events += events
        return [(e.data["id"], e.data["step"], e.data["ok"]) for e in events if "id" in e.data]

    def verdicts(self):
        """Return the new verdicts: (id, ok)."""
        return [(e.data["id"], e.data["ok"]) for e in self.guard.poll() if "id" in e.data]

    def verify_now(self, **within):
        """Verify at once, and wait until that is done."""
        self.guard.verify_now(**within)
        wait_until(lambda: not self.guard.is_verifying_now)

    def entry(self, name):
        return next(e for e in self.entries() if e["id"] == name)

    def entries(self):
        return msgspec.to_builtins(read_registry(self.run).checkpoints)

    def states(self, state):
        return [e["id"] for e in self.entries() if e["state"] == state]

    def pinned(self):
        return [e["id"] for e in self.entries() if e["pinned"]]


class Overwriter:
    """Overwrites one file faster than it can be verified, and reports each save."""

    def __init__(self, driver, name="ckpt.pt", word="good", *, rename=False):
        self.step, self.largest = 0, 0
        self._driver, self._name, self._word, self._rename = driver, name, word, rename
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _run(self):
        while not self._over.wait(0.1):
            self.step += 10
            name = "fresh.partial" if self._rename else self._name
            path = self._driver.write(name, f"slow {self._word} {self.step}")
            path = path.rename(self._driver.out / self._name) if self._rename else path
            self._driver.report(path, self.step)
            copies = self._driver.run.glob("checkpoints/.ckpt-*")
            self.largest = max(self.largest, len(list(copies)))

    def run_until(self, events):
        found = []

        def enough():
            if len(found) < events:
                found.extend(e for e in self._driver.guard.poll() if "id" in e.data)
            return len(found) >= events

        # The verifier runs at the lowest priority.
        wait_until(enough, f"{events} verdicts", within_s=240.0, every_s=0.05)
        return found


@contextmanager
def slow_verification(driver, work):
    """Run `work`, which verifies a slow file, in a thread; it goes on when the block is left."""
    started, hold = (driver.python.with_name(name) for name in ("started", "hold"))
    started.unlink(missing_ok=True)
    hold.touch()
    worker = threading.Thread(target=work)
    worker.start()
    while worker.is_alive() and not started.exists():
        time.sleep(0.005)
    yield
    hold.unlink()
    worker.join()


def overwrite_during_verification(driver, save):
    """Verify the file; call `save`, which overwrites it, meanwhile."""
    driver.guard.scan()
    driver.guard.scan()
    with slow_verification(driver, driver.guard.verify_next):
        save()


def copies(driver):
    return list(driver.run.glob("checkpoints/.ckpt-*"))
